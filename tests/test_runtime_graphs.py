"""The runtime's target and draft on real, tiny ONNX graphs."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.artifacts import Precision
from elsi_edge.bundle import DRAFT_VOCAB_FILE, Bundle
from elsi_edge.runtime import draft as draft_module
from elsi_edge.runtime import kv_cache
from elsi_edge.runtime import target as target_module
from elsi_edge.runtime.draft import OrtDraft
from elsi_edge.runtime.engines import Engine
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import ROOT, Tree, best_first
from elsi_edge.tree_shape import TreeShape
from tests.toy_proposers import Endless, LiarProposer, NoisyProposer, OracleProposer, Scripted

MakeBundle = Callable[..., Path]
Floats = NDArray[np.float32]

ONE_THREAD = SessionSettings(threads=1)
PAST = [7, 120, 44, 201, 9, 88, 163, 240, 31, 77, 5, 190]
#        root 66
#       /    |   \
#     30     31   32
#    /  \    |
#  40   41   42
#  |    |
#  50   51
TREE = Tree(tokens=(30, 31, 32, 40, 41, 42, 50, 51), parents=(ROOT, ROOT, ROOT, 0, 0, 1, 3, 4))
ROOT_TOKEN = 66


def open_target(bundle: Path, role: str = "target-tree") -> OrtTarget:
    loaded = Bundle.load(bundle)
    graph = loaded.graph(role)  # type: ignore[arg-type]
    manifest = loaded.manifest
    return OrtTarget(open_session(graph, ONE_THREAD), shape=manifest.shape, tap_width=manifest.tap_width)


def open_draft(bundle: Path, *, context: int | None = None) -> OrtDraft:
    loaded = Bundle.load(bundle)
    config = loaded.manifest.draft
    assert config is not None
    return OrtDraft(
        open_session(loaded.graph("draft"), ONE_THREAD),
        open_session(loaded.graph("projection"), ONE_THREAD),
        config=replace(config, context=context or config.context),
        draft_to_target_ids=np.load(loaded.directory / DRAFT_VOCAB_FILE, allow_pickle=False),
    )


def one_at_a_time(target: OrtTarget, tokens: Sequence[int]) -> tuple[Floats, Floats]:
    """Logits and taps of tokens that are verified and committed singly."""
    logits, taps = [], []
    for token in tokens:
        step = target.verify(token, Tree.empty())
        logits.append(step.logits[0].copy())
        taps.append(step.taps[0].copy())
        target.commit([0])
    return np.stack(logits), np.stack(taps)


def drafted(budget: int, *, chain: bool) -> Bounds:
    return Bounds(budget=budget, depth=budget, chain=chain, proposals=("draft",))


def path_rows(tree: Tree, row: int) -> list[int]:
    return [] if row == 0 else [*path_rows(tree, tree.parents[row - 1] + 1), row]


# --- the target at fp32 --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree_target(tiny_bundle: MakeBundle) -> OrtTarget:
    return open_target(tiny_bundle("fp32"))


def test_each_row_of_a_tree_equals_its_path_run_as_a_chain(tree_target: OrtTarget) -> None:
    tree_target.keep(0)
    tree_target.prefill(PAST)
    step = tree_target.verify(ROOT_TOKEN, TREE)
    logits, taps = step.logits.copy(), step.taps.copy()
    assert logits.shape == (9, tree_target.vocab_size)
    assert tree_target.length == len(PAST)
    for row in range(TREE.size + 1):
        tokens = [TREE.tokens[r - 1] for r in path_rows(TREE, row)]
        tree_target.keep(0)
        tree_target.prefill([*PAST, ROOT_TOKEN, *tokens][:-1])
        last = tree_target.verify(tokens[-1] if tokens else ROOT_TOKEN, Tree.empty())
        np.testing.assert_allclose(logits[row], last.logits[0], atol=1e-4)
        np.testing.assert_allclose(taps[row], last.taps[0], atol=1e-4)
    # Not vacuous: the rows of one depth and token position differ from branch to branch.
    assert np.abs(logits[1] - logits[2]).max() > 0.1


def test_several_rows_with_a_past_equal_one_at_a_time(tree_target: OrtTarget) -> None:
    tree_target.keep(0)
    tree_target.prefill(PAST[:4])
    step = tree_target.verify(PAST[4], Tree.chain(PAST[5:]))
    logits, taps = step.logits.copy(), step.taps.copy()
    tree_target.keep(0)
    tree_target.prefill(PAST[:4])
    singly, singly_taps = one_at_a_time(tree_target, PAST[4:])
    np.testing.assert_allclose(logits, singly, atol=1e-4)
    np.testing.assert_allclose(taps, singly_taps, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 11])  # 12 tokens: blocks of one row, an uneven last block, a last block of one
def test_a_prefill_in_blocks_equals_a_whole_one(
    tree_target: OrtTarget, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree_target.keep(0)
    whole = tree_target.prefill(PAST)
    logits, taps = whole.logits.copy(), whole.taps.copy()
    monkeypatch.setattr(target_module, "PREFILL_ROWS", rows)
    tree_target.keep(0)
    step = tree_target.prefill(PAST)
    assert step.logits.shape == (1, tree_target.vocab_size)
    assert step.taps.shape == (12, tree_target.tap_width)
    np.testing.assert_allclose(step.logits, logits, atol=1e-4)
    np.testing.assert_allclose(step.taps, taps, atol=1e-4)
    assert tree_target.length == 12


@pytest.mark.parametrize("rows", [[0], [0, 1, 4, 7], [0, 2, 6], [0, 3]])
def test_after_a_commit_the_cache_is_that_of_the_accepted_path(tree_target: OrtTarget, rows: list[int]) -> None:
    tree_target.keep(0)
    tree_target.prefill(PAST)
    tree_target.verify(ROOT_TOKEN, TREE)
    tree_target.commit(rows)
    accepted = [TREE.tokens[row - 1] for row in rows[1:]]
    got = [buffer[:, :, : tree_target.length].copy() for buffer in tree_target.cache.buffers]
    after, _ = one_at_a_time(tree_target, [3, 4])
    tree_target.keep(0)
    tree_target.prefill([*PAST, ROOT_TOKEN, *accepted])
    for mine, theirs in zip(got, tree_target.cache.buffers, strict=True):
        np.testing.assert_allclose(mine, theirs[:, :, : tree_target.length], atol=1e-5)
    fresh, _ = one_at_a_time(tree_target, [3, 4])
    np.testing.assert_allclose(after, fresh, atol=1e-4)


def test_a_growing_cache_changes_nothing_and_lets_go_of_old_buffers(
    tiny_bundle: MakeBundle, tree_target: OrtTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "PAGE", 4)
    growing = open_target(tiny_bundle("fp32"))
    growing.prefill(PAST[:3])
    old = [weakref.ref(buffer) for buffer in growing.cache.buffers]
    got, _ = one_at_a_time(growing, PAST[3:])
    assert growing.cache.capacity == 12
    assert all(buffer() is None for buffer in old)
    tree_target.keep(0)
    tree_target.prefill(PAST[:3])
    expected, _ = one_at_a_time(tree_target, PAST[3:])
    assert np.array_equal(got, expected)


def test_an_interrupted_growth_is_made_up_for(tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target(tiny_bundle("fp32"))
    expected = target.prefill(PAST).logits.copy()
    for failing in range(4):
        target = open_target(tiny_bundle("fp32"))
        target.prefill(PAST[:2])
        bind = target._graph.bind_in_place
        bound: list[Any] = []

        def interrupted(*names_and_array: Any, fail: int = failing, bind: Any = bind, bound: list[Any] = bound) -> None:
            if len(bound) == fail:
                raise KeyboardInterrupt
            bound.append(names_and_array)
            bind(*names_and_array)

        with monkeypatch.context() as patch:
            patch.setattr(target._graph, "bind_in_place", interrupted)
            with pytest.raises(KeyboardInterrupt):
                target._graph.reserve(target.cache, 4 * kv_cache.PAGE)
        target.keep(0)
        assert np.array_equal(target.prefill(PAST).logits, expected)


# --- the exact chain form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_the_chain_form_gives_the_same_bits_for_any_number_of_rows(
    tiny_bundle: MakeBundle, precision: Precision
) -> None:
    target = open_target(tiny_bundle(precision), "target-chain")
    tokens = np.random.default_rng(0).integers(6, 300, 48).tolist()
    found = {}
    for rows in (1, 2, 3, 4, 8, 16):
        target.keep(0)
        target.prefill(PAST)
        logits, taps = [], []
        for start in range(0, len(tokens), rows):
            step = target.verify(tokens[start], Tree.chain(tokens[start + 1 : start + rows]))
            logits.append(step.logits.copy())
            taps.append(step.taps.copy())
            target.commit(range(rows))
        found[rows] = np.concatenate(logits), np.concatenate(taps)
    for rows, (row_logits, row_taps) in found.items():
        assert np.array_equal(row_logits, found[1][0]), f"{rows} rows a step"
        assert np.array_equal(row_taps, found[1][1])
    assert len(set(found[1][0].argmax(-1).tolist())) > 5


def test_rejected_rows_leave_no_trace_in_the_chain_form(tiny_bundle: MakeBundle) -> None:
    target = open_target(tiny_bundle("int4"), "target-chain")
    target.prefill(PAST)
    clean, _ = one_at_a_time(target, [30, 40, 50])
    target.keep(0)
    target.prefill(PAST)
    seen = []
    for token in (30, 40, 50):
        step = target.verify(token, Tree.chain([99, 98, 97]))
        seen.append(step.logits[0].copy())
        target.commit([0])
    assert np.array_equal(np.stack(seen), clean)


def test_the_chain_form_refuses_a_tree(tiny_bundle: MakeBundle) -> None:
    target = open_target(tiny_bundle("int4"), "target-chain")
    target.prefill(PAST)
    with pytest.raises(ValueError, match="chain form"):
        target.verify(ROOT_TOKEN, TREE)


# --- lossless on real graphs ---------------------------------------------------------------------------------------


def with_proposer(session: Session, proposer: Scripted, *, exact: bool = True) -> Session:
    engine = session.engine(exact=exact)
    return Session(
        codec=session.codec,
        engines={exact: Engine(target=engine.target, proposer=proposer)},
        precision=session.precision,
        context=session.context,
        settings=session.settings,
        has_draft=True,
    )


@pytest.mark.parametrize(("precision", "budgets"), [("fp32", (1, 4, 8, 30)), ("int4", (1, 3, 7)), ("int8", (2, 15))])
def test_lossless_on_real_graphs(tiny_bundle: MakeBundle, precision: Precision, budgets: tuple[int, ...]) -> None:
    session = Session.open(tiny_bundle(precision), ONE_THREAD)
    session.codec = Endless(session.codec)
    taus, said = set(), set()
    for prompt, temperature in (("Marn keeps", 0.0), ("The mill on", 0.0), ("the river", 4.0)):
        options = GenerateOptions(max_tokens=30, temperature=temperature, seed=3)
        plain = session.generate(prompt, replace(options, plain=True))
        said |= set(plain.token_ids)
        for nodes in budgets:
            for proposer in (None, OracleProposer(plain.token_ids), LiarProposer(plain.token_ids), NoisyProposer()):
                chosen = session if proposer is None else with_proposer(session, proposer)
                result = chosen.generate(prompt, replace(options, draft_nodes=nodes))
                assert result.token_ids == plain.token_ids
                assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)
                assert result.exact
                if isinstance(proposer, LiarProposer):
                    assert result.tau == 1.0
                if isinstance(proposer, OracleProposer) and result.tau is not None:
                    taus.add(result.tau)
    assert max(taus) > 3.0
    assert len(said) > 15  # the answers are not one token over and over


# --- the draft -----------------------------------------------------------------------------------------------------


def entries(target: OrtTarget) -> tuple[list[int], Floats]:
    """Tokens that followed, and tapped states, of the past."""
    target.keep(0)
    return [*PAST[1:], ROOT_TOKEN], target.prefill(PAST).taps


def test_entries_in_blocks_equal_entries_at_once(
    tiny_bundle: MakeBundle, tree_target: OrtTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed, taps = entries(tree_target)
    draft = open_draft(tiny_bundle("fp32"))
    whole = draft.extend(followed, taps)
    assert whole.log_probs.shape == (1, draft.config.draft_vocab_size)
    np.testing.assert_allclose(np.exp(whole.log_probs).sum(), 1.0, rtol=1e-5)
    draft.keep(0)
    draft.extend(followed[:5], taps[:5])
    again = draft.extend(followed[5:], taps[5:])
    np.testing.assert_allclose(again.log_probs, whole.log_probs, atol=1e-4)
    monkeypatch.setattr(draft_module, "ENTRY_ROWS", 5)
    draft.keep(0)
    blocks = draft.extend(followed, taps)
    np.testing.assert_allclose(blocks.log_probs, whole.log_probs, atol=1e-4)
    np.testing.assert_allclose(blocks.states, whole.states, atol=1e-4)
    assert draft.cache.length == len(PAST)


def test_the_proposed_tree_is_that_of_paths_run_one_by_one(tiny_bundle: MakeBundle, tree_target: OrtTarget) -> None:
    """The draft's beam over a masked tree against a beam whose every path runs alone, from a fresh cache."""
    followed, taps = entries(tree_target)
    draft = open_draft(tiny_bundle("fp32"))
    ids = draft.draft_to_target_ids

    def predicted(path: tuple[int, ...]) -> Floats:
        """Log-probabilities [U] after a path of target tokens below the root."""
        draft.keep(0)
        step = draft.extend(followed, taps)
        for depth, token in enumerate(path, start=1):
            step = draft.expand([token], step.states[-1:], depth, range(ROOT, depth - 1))
        last: Floats = step.log_probs[-1]
        return last

    for budget in (3, 8, 20):
        shape = TreeShape.for_budget(budget, chain=False)
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        frontier = [ROOT]
        for _ in range(shape.depth):
            fresh = []
            for parent in frontier:
                log_probs = predicted(paths[parent])
                for index in np.argsort(-log_probs, kind="stable")[: shape.beam]:
                    node = len(tokens)
                    tokens.append(int(ids[index]))
                    parents.append(parent)
                    scores.append((scores[parent] if parent != ROOT else 0.0) + float(log_probs[index]))
                    paths[node] = (*paths[parent], int(ids[index]))
                    fresh.append(node)
            frontier = sorted(sorted(fresh, key=lambda node: -scores[node])[: shape.beam])
        expected = best_first(tokens, parents, scores, budget)
        proposer = MixedProposer(draft)
        proposer.keep(0)
        proposer.observe(followed, taps)
        found = proposer._tree(drafted(budget, chain=False))  # may stop early, when no more can enter
        count = len(found.tokens)
        assert count >= budget
        assert (found.tokens, found.parents) == (tokens[:count], parents[:count])
        np.testing.assert_allclose(found.scores, scores[:count], atol=1e-4)
        proposer.keep(0)
        proposer.observe(followed, taps)
        tree = proposer.propose(drafted(budget, chain=False))
        assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
        assert budget < 8 or not tree.is_chain
        # Asked again without anything new, there is nothing to go on; a chain is the best token after the best token.
        with pytest.raises(ValueError, match="observed"):
            proposer.propose(drafted(budget, chain=False))
    proposer.keep(0)
    proposer.observe(followed, taps)
    chain = proposer.propose(drafted(4, chain=True))
    assert chain.is_chain
    for place in range(4):
        assert ids[np.argmax(predicted(chain.tokens[:place]))] == chain.tokens[place]


def test_nodes_leave_no_trace_in_the_drafts_cache(tiny_bundle: MakeBundle, tree_target: OrtTarget) -> None:
    followed, taps = entries(tree_target)
    proposer = MixedProposer(open_draft(tiny_bundle("fp32")))
    proposer.observe(followed[:6], taps[:6])
    proposer.propose(drafted(8, chain=False))
    proposer.observe(followed[6:], taps[6:])
    tree = proposer.propose(drafted(8, chain=False))
    proposer.keep(0)
    proposer.observe(followed, taps)
    fresh = proposer.propose(drafted(8, chain=False))
    assert (tree.tokens, tree.parents) == (fresh.tokens, fresh.parents)


@pytest.mark.parametrize("chain", [True, False])
def test_a_draft_for_shorter_sequences_stops_drafting_in_time(
    tiny_bundle: MakeBundle, tree_target: OrtTarget, chain: bool
) -> None:
    followed, taps = entries(tree_target)  # 12 entries
    for context, levels in ((16, 4), (13, 1), (12, 0), (11, 0)):
        proposer = MixedProposer(open_draft(tiny_bundle("fp32"), context=context))
        proposer.observe(followed, taps)
        tree = proposer.propose(drafted(8, chain=chain))
        assert tree.depths().max() <= levels
        assert (tree.size > 0) == (levels > 0)
        proposer.observe([1], taps[:1])
        proposer.propose(drafted(8, chain=chain))
