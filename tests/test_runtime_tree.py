"""The tree of candidates and its mask, against definitions written the slow way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_edge.runtime.tree import ROOT, Tree, attention_bias, best_first
from elsi_edge.runtime.verify import walk


@st.composite
def trees(draw: st.DrawFn, largest: int = 20) -> Tree:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, largest)))]
    tokens = [draw(st.integers(0, 4)) for _ in parents]
    return Tree(tokens=tuple(tokens), parents=tuple(parents))


@st.composite
def scored_trees(draw: st.DrawFn) -> tuple[Tree, list[float]]:
    tree = draw(trees())
    scores: list[float] = []
    for parent in tree.parents:
        step = draw(st.sampled_from([0.0, -0.25, -1.0, -2.5]))  # few values, so that ties happen
        scores.append(step + (0.0 if parent == ROOT else scores[parent]))
    return tree, scores


def path(tree: Tree, row: int) -> list[int]:
    """Rows from the root to `row`."""
    return [0] if row == 0 else [*path(tree, tree.parents[row - 1] + 1), row]


@settings(deadline=None)
@given(trees())
def test_mask_depths_and_children_follow_from_the_parents(tree: Tree) -> None:
    seen, depths = tree.ancestors(), tree.depths()
    for row in range(tree.size + 1):
        assert np.flatnonzero(seen[row]).tolist() == sorted(path(tree, row))
        assert depths[row] == len(path(tree, row)) - 1
        below = [node + 1 for node, parent in enumerate(tree.parents) if parent + 1 == row]
        found = tree.children(row)
        assert set(found) == {tree.tokens[child - 1] for child in below}
        for token, child in found.items():
            assert child == min(c for c in below if tree.tokens[c - 1] == token)
    assert tree.is_chain == all(len(path(tree, row)) == row + 1 for row in range(tree.size + 1))


def test_the_mask_of_the_docstring() -> None:
    tree = Tree(tokens=(7, 8, 9), parents=(ROOT, ROOT, 0))
    assert tree.ancestors().astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


@settings(deadline=None)
@given(scored_trees(), st.integers(0, 25))
def test_best_first_keeps_the_best_and_stays_a_tree(scored: tuple[Tree, list[float]], budget: int) -> None:
    tree, scores = scored
    kept = best_first(tree.tokens, tree.parents, scores, budget)
    assert kept.size == min(budget, tree.size)
    # As sets of paths: the kept ones are paths of the whole tree, and none left out scores above one that is kept.
    whole = sorted((scores[row - 1], path_tokens(tree, row)) for row in range(1, tree.size + 1))
    kept_paths = [path_tokens(kept, row) for row in range(1, kept.size + 1)]
    by_score = sorted((score for score, _ in whole), reverse=True)[: kept.size]
    for tokens in kept_paths:
        score = max(score for score, other in whole if other == tokens)
        assert not by_score or score >= by_score[-1]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.25, -1.0]), max_size=9), st.integers(0, 12))
def test_of_a_chain_the_first_nodes_are_the_best(steps: list[float], budget: int) -> None:
    """Also beside a node that scores below them all, which makes a tree of it."""
    tokens, parents = list(range(len(steps))), list(range(ROOT, len(steps) - 1))
    scores = np.cumsum(steps).tolist()
    kept = best_first(tokens, parents, scores, budget, sources=["draft"] * len(steps))
    assert (kept.tokens, kept.parents) == (tuple(tokens[:budget]), tuple(parents[:budget]))
    assert kept.sources == ("draft",) * kept.size
    beside = best_first([*tokens, 99], [*parents, ROOT], [*scores, -99.0], min(budget, len(steps)))
    assert (beside.tokens, beside.parents) == (kept.tokens, kept.parents)


def test_best_first_lists_the_likeliest_path_first() -> None:
    """Depth first: a, its child c, c's child e, then a's other child, then b and its child."""
    tokens, parents = [1, 2, 3, 4, 5, 6], [ROOT, ROOT, 0, 0, 1, 2]
    scores = [-0.2, -1.8, -0.4, -1.0, -2.0, -0.5]
    kept = best_first(tokens, parents, scores, 6)
    assert kept.tokens == (1, 3, 6, 4, 2, 5)
    assert kept.parents == (ROOT, 0, 1, 0, ROOT, 4)


def path_tokens(tree: Tree, row: int) -> list[int]:
    return [tree.tokens[r - 1] for r in path(tree, row)[1:]]


def test_chains() -> None:
    assert Tree.chain([5, 6, 7]).parents == (ROOT, 0, 1)
    assert Tree.chain([5, 6, 7]).is_chain
    assert Tree.empty().size == 0
    assert Tree.empty().is_chain
    assert Tree.empty().ancestors().tolist() == [[True]]
    assert not Tree(tokens=(1, 2), parents=(ROOT, ROOT)).is_chain


@pytest.mark.parametrize("parents", [[0], [ROOT, 1], [ROOT, 2, 0], [-2]])
def test_a_parent_comes_before_its_child(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent must come before"):
        Tree(tokens=(0,) * len(parents), parents=tuple(parents))


@settings(deadline=None)
@given(trees(), st.integers(0, 9))
def test_attention_bias(tree: Tree, cached: int) -> None:
    seen = tree.ancestors()
    rows, total = tree.size + 1, cached + tree.size + 1
    bias = attention_bias(seen, cached)
    assert bias.shape == (1, 1, rows, total)
    assert bias.dtype == np.float32
    assert (bias[0, 0, :, :cached] == 0.0).all()
    assert ((bias[0, 0, :, cached:] == 0.0) == seen).all()
    assert (bias[0, 0, :, cached:][~seen] == np.finfo(np.float32).min).all()
    # The same in a dirty buffer that is longer than needed, without a copy.
    out = np.full(rows * total + 7, 3.0, np.float32)
    again = attention_bias(seen, cached, out=out)
    assert again.flags.c_contiguous
    assert np.shares_memory(again, out)
    assert np.array_equal(again, bias)
    assert (out[rows * total :] == 3.0).all()


def test_attention_bias_of_rows_that_see_columns_of_earlier_calls() -> None:
    seen = np.array([[True, False, True]])  # one new row after two that were run before it
    assert (attention_bias(seen, 2)[0, 0, 0] == 0.0).tolist() == [True, True, True, False, True]


@settings(deadline=None)
@given(trees(), st.lists(st.integers(0, 4), min_size=21, max_size=21))
def test_walk_follows_the_targets_own_choices(tree: Tree, preferred: list[int]) -> None:
    """`preferred[depth]` is what the target says at a depth, whatever the row."""
    verdict = walk(tree, lambda _, depth: preferred[depth])
    row = 0
    for depth, token in enumerate(verdict.tokens):
        assert token == preferred[depth]
        assert verdict.rows[depth] == row
        row = tree.children(row).get(token, -1)
    assert row == -1  # the last token, the bonus, is not in the tree
    assert list(verdict.rows) == sorted(verdict.rows)
    assert verdict.accepted == len(verdict.tokens) - 1
