"""Drafts and n-grams in one proposal: bounds, prices, sources, and the same tokens whatever happens."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elsi_edge.runtime.confidence import PRIOR, TOPS, DraftConfidence
from elsi_edge.runtime.decode import Plan, rounds
from elsi_edge.runtime.draft import DraftStep, log_softmax
from elsi_edge.runtime.drafter import Drafter
from elsi_edge.runtime.mixed import MixedProposer, blend
from elsi_edge.runtime.ngram import Match
from elsi_edge.runtime.options import PROPOSALS, GenerateOptions, Proposal
from elsi_edge.runtime.pace import Clock, FixedPace, LivePace, Pace
from elsi_edge.runtime.price import FREE, Costs, Price, typical
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.sampling import choose
from elsi_edge.runtime.toy import ToyTarget
from elsi_edge.runtime.tree import ROOT, path_mask
from tests.toy_proposers import V, toy_target, world

DEAR = Price(nodes=tuple(0.45 * n for n in range(len(FREE.nodes))), entry=0.1, level=0.05)
SHUT = Price(nodes=tuple(9.0 * n for n in range(len(FREE.nodes))), entry=9.0, level=9.0)


class ToyDraft:
    """Guesses from the toy world's own logits, right or wrong as `skill` has it; half of the vocabulary.

    A state is the last three tokens, so a node that continues the wrong parent's state is noticed.
    """

    def __init__(self, *, seed: int = 0, skill: float = 0.7, context: int = 10_000) -> None:
        self.logits, self.skill, self.context = world(V, seed=seed), skill, context
        self.draft_to_target_ids = np.array([t for t in range(V) if t % 7 != 3], np.int64)
        self.entries: list[tuple[int, int]] = []  # (token of the row, token that followed)
        self.calls: list[str] = []

    @property
    def length(self) -> int:
        return len(self.entries)

    def keep(self, entries: int) -> None:
        del self.entries[entries:]

    def room(self) -> int:
        return self.context - len(self.entries)

    def extend(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> DraftStep:
        assert len(next_tokens) == len(taps) >= 1
        self.calls.append("entry")
        for token, tap in zip(next_tokens, taps[:, 0], strict=True):
            assert not self.entries or self.entries[-1][1] == int(tap), "a row is missing, or stands twice"
            self.entries.append((int(tap), int(token)))
        state = [self.entries[-2][0] if len(self.entries) > 1 else 0, *self.entries[-1]]
        return self._step(np.array([state], np.float32))

    def expand(
        self, tokens: Sequence[int], states: NDArray[np.float32], depth: int, parents: Sequence[int]
    ) -> DraftStep:
        self.calls.append("level")
        seen = path_mask(parents)[-len(tokens) :]
        assert (seen.sum(axis=1) == depth).all()  # a node sees its ancestors and itself
        return self._step(np.concatenate([states[:, 1:], np.array(tokens, np.float32)[:, None]], axis=1))

    def _step(self, states: NDArray[np.float32]) -> DraftStep:
        rows = []
        for state in states.astype(int).tolist():
            noise = np.random.default_rng(state).standard_normal(V)
            rows.append(self.skill * self.logits(tuple(state)) + (1.0 - self.skill) * 4.0 * noise)
        logits = np.array(rows, np.float32)[:, self.draft_to_target_ids]
        return DraftStep(log_probs=log_softmax(2.0 * logits), states=states)


def proposer_with(skill: float = 0.7, *, seed: int = 0) -> tuple[MixedProposer, ToyDraft]:
    draft = ToyDraft(seed=seed, skill=skill)
    return MixedProposer(draft), draft


def observed(proposer: MixedProposer, tokens: Sequence[int]) -> None:
    taps = np.array(tokens[:-1], np.float32)[:, None]
    proposer.observe(tokens[1:], taps)


# --- what is proposed ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=2, max_size=30),
    budget=st.integers(1, 12),
    depth=st.integers(1, 6),
    chain=st.booleans(),
    price=st.sampled_from([FREE, DEAR, SHUT]),
    proposals=st.sampled_from([PROPOSALS, ("draft",), ("ngram",)]),
)
def test_proposals_keep_to_their_bounds(
    tokens: list[int], budget: int, depth: int, chain: bool, price: Price, proposals: tuple[Proposal, ...]
) -> None:
    bounds = Bounds(budget=budget, depth=depth, chain=chain, price=price, proposals=proposals)
    proposer, draft = proposer_with()
    observed(proposer, tokens)
    tree = proposer.propose(bounds)
    assert tree.size <= budget and tree.depths().max() <= depth
    assert tree.is_chain or not chain
    children = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(children)) == len(children)  # no token twice below one node
    assert set(tree.sources) <= {"draft", "ngram", "both"} if "draft" in proposals else {"ngram"} >= set(tree.sources)
    if proposals == ("draft",):
        assert set(tree.sources) <= {"draft"}
        assert price is not FREE or tree.size == min(budget, tree.size) > 0
    if "draft" not in proposals:
        assert not draft.calls
    if price is SHUT:
        assert tree.size == 0 and not draft.calls
    # The same again from a fresh start, and nothing is left behind in the index.
    again, _ = proposer_with()
    observed(again, tokens)
    assert proposer._index.tokens == again._index.tokens == tokens[1:]
    assert again.propose(bounds).tokens == tree.tokens


def test_a_sure_ngram_saves_the_drafts_call() -> None:
    loop = [1, 2, 4, 5] * 12
    for chain in (True, False):
        proposer, draft = proposer_with()
        observed(proposer, loop)
        tree = proposer.propose(Bounds(budget=4, depth=9, chain=chain, price=DEAR))
        assert tree.tokens[:1] == (1,) and not draft.calls
        assert tree.sources[0] == "ngram"
    proposer, draft = proposer_with()
    observed(proposer, loop)
    assert proposer.propose(Bounds(budget=4, depth=9, chain=True, price=DEAR)).tokens == (1, 2, 4, 5)
    # Rows that the draft did not read are read when it is asked.
    proposer.observe([7, 9], np.array([[5.0], [7.0]], np.float32))
    proposer.propose(Bounds(budget=2, depth=9, chain=True))
    assert draft.calls[0] == "entry" and draft.entries[-1] == (7, 9)


def test_a_chain_takes_the_likelier_of_the_two_at_each_place() -> None:
    proposer, draft = proposer_with(1.0)
    observed(proposer, [1, 2, 6, 5, 0, 1, 2])  # 6 followed 1 2 once
    tree = proposer.propose(Bounds(budget=5, depth=5, chain=True))
    assert tree.size == 5 and draft.calls == ["entry", *["level"] * 4]
    single = MixedProposer(ToyDraft(skill=1.0))
    observed(single, [1, 2, 6, 5, 0, 1, 2])
    alone = single.propose(Bounds(budget=1, depth=1, chain=True, proposals=("draft",)))
    step = ToyDraft(skill=1.0).extend([1, 2], np.array([[0.0], [1.0]], np.float32))
    sure = float(np.exp(step.log_probs.max()))
    index = {int(t): i for i, t in enumerate(draft.draft_to_target_ids)}
    said = float(np.exp(step.log_probs[0, index[6]]))
    matched = blend(0.58, said)
    rest = sure * (1.0 - matched) / (1.0 - said)
    expected = 6 if matched > rest or alone.tokens[0] == 6 else alone.tokens[0]
    assert tree.tokens[0] == expected


def test_what_one_source_says_moves_the_other() -> None:
    assert blend(0.6, 0.5) > 0.7 > blend(0.6, 0.05) > blend(0.6, 0.0) > 0.2
    assert blend(0.98, 0.0) > 0.9
    assert 0.0 < blend(0.0, 0.0) < blend(1.0, 1.0) < 1.0


def test_nothing_observed() -> None:
    proposer, _ = proposer_with()
    with pytest.raises(ValueError, match="observed"):
        proposer.propose(Bounds(budget=1, depth=1, chain=True, proposals=("draft",)))


def test_a_draft_left_alone_is_tried_again() -> None:
    confidence = DraftConfidence()
    fresh = confidence.gain(1, 1.0, 0.3, instead=0.0)
    for _ in range(60):
        confidence.note(1, 0.05)
    assert confidence.gain(1, 1.0, 0.3, instead=0.0) < 0.2 * fresh
    for _ in range(200):
        confidence.fade()
    assert confidence.gain(1, 1.0, 0.3, instead=0.0) == pytest.approx(fresh, rel=0.05)
    assert confidence.gain(5, 1.0, 0.3, instead=0.99) < 0.01
    for shares in PRIOR:
        assert sum(shares) == pytest.approx(1.0, abs=0.01) and len(shares) == len(TOPS)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)) | st.none(), max_size=60))
@example([(1, 0.9), (2, 0.1), None] * 5000)
def test_shares_move_as_they_are_said_to(calls: list[tuple[int, float] | None]) -> None:
    """A call moves its depth's shares by a twentieth, a round (None) all of them back by a fiftieth."""
    confidence = DraftConfidence()
    wanted = [np.array(shares) for shares in PRIOR]
    for call in calls:
        if call is None:
            confidence.fade()
            wanted = [shares + 0.02 * (np.array(prior) - shares) for shares, prior in zip(wanted, PRIOR, strict=True)]
        else:
            confidence.note(*call)
            shares = wanted[min(call[0], 2) - 1]
            shares *= 0.95
            shares[next(place for place, top in enumerate(TOPS) if call[1] <= top)] += 0.05
    for depth, shares in enumerate(wanted, start=1):
        middles = np.array([0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.88, 0.98])
        gain = (shares * np.maximum(0.9 * middles - 0.2, 0.1)).sum() - 0.1
        assert confidence.gain(depth, 0.9, 0.2, instead=0.3 / 0.9) == pytest.approx(gain, abs=1e-12)


def test_a_tree_looks_no_deeper_than_it_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that repeats itself is sure of a hundred tokens; with room for three no more are looked for."""
    proposer, _ = proposer_with()
    proposer.observe([1, 2, 3, 4, 5] * 30, np.zeros((150, 1), np.float32))
    asked = 0
    matches = proposer._index.matches

    def counted(width: int = 1) -> list[Match]:
        nonlocal asked
        asked += 1
        return matches(width)

    monkeypatch.setattr(proposer._index, "matches", counted)
    tree = proposer.propose(Bounds(budget=3, depth=100, chain=False, proposals=("ngram",)))
    assert tree.tokens == (1, 2, 3) and tree.is_chain
    assert asked <= 6


# --- rows that wait ------------------------------------------------------------------------------------------------


def test_of_a_long_prompt_the_draft_reads_the_end() -> None:
    draft = ToyDraft()
    drafter = Drafter(draft, window=8)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, V, 100)]
    drafter.observe(tokens[1:41], np.array(tokens[:40], np.float32)[:, None])
    drafter.start()
    assert draft.entries == [(tokens[p], tokens[p + 1]) for p in range(32, 40)]
    for place in range(40, 60):  # rounds without the draft
        drafter.observe([tokens[place + 1]], np.array([[tokens[place]]], np.float32))
        assert len(drafter._tokens) <= 16
    drafter.start()
    assert draft.entries == [(tokens[p], tokens[p + 1]) for p in range(52, 60)]
    # Back to 56 rows, and from there another way.
    drafter.keep(56)
    assert draft.entries == [(tokens[p], tokens[p + 1]) for p in range(52, 56)]
    drafter.observe([5], np.array([[tokens[56]]], np.float32))
    drafter.start()
    assert draft.entries[-1] == (tokens[56], 5)
    drafter.keep(3)  # before all that was read
    assert draft.entries == []
    drafter.observe(tokens[4:6], np.array(tokens[3:5], np.float32)[:, None])
    drafter.start()
    assert draft.entries == [(tokens[3], tokens[4]), (tokens[4], tokens[5])]


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=12), st.integers(0, 80))
def test_rows_that_are_kept_are_those_that_were_observed(steps: list[tuple[int, bool]], kept: int) -> None:
    draft = ToyDraft()
    drafter = Drafter(draft, window=10)
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, V, 200)]
    rows = 0
    for count, asked in steps:
        drafter.observe(tokens[rows + 1 : rows + count + 1], np.array(tokens[rows : rows + count], np.float32)[:, None])
        rows += count
        if asked:
            drafter.start()
    kept = min(kept, rows)
    drafter.keep(kept)
    drafter.observe([tokens[kept + 1]], np.array([[tokens[kept]]], np.float32))
    drafter.start()
    assert draft.entries == [(tokens[p], tokens[p + 1]) for p in range(kept + 1 - len(draft.entries), kept + 1)]


# --- the same tokens -----------------------------------------------------------------------------------------------


class Erratic(Pace):
    """Switches speculation off and on, and prices at random."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)

    def price(self, cached: int) -> Price | None:
        return (None, FREE, DEAR, SHUT)[int(self.draw.integers(4))]


def costs() -> Costs:
    return typical("int4")


def answer_of(
    target: ToyTarget,
    proposer: MixedProposer | None,
    prompt: list[int],
    plan: Plan,
    options: GenerateOptions,
    pace: Pace,
) -> list[int]:
    loop = rounds(target, proposer, prompt, plan, partial(_choose, options), pace)
    return [token for one in loop for token in one.tokens]


def _choose(options: GenerateOptions, logits: NDArray[np.float32], index: int) -> int:
    return choose(logits, options, seed=options.seed or 0, index=index)


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=20),
    seed=st.integers(0, 3),
    skill=st.sampled_from([0.0, 0.5, 1.0]),
    budget=st.integers(1, 9),
    limit=st.integers(1, 40),
    chain=st.booleans(),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    pace=st.sampled_from(["free", "fixed", "live", "erratic"]),
    proposals=st.sampled_from([PROPOSALS, ("draft",), ("ngram",)]),
)
def test_lossless(
    prompt: list[int],
    seed: int,
    skill: float,
    budget: int,
    limit: int,
    chain: bool,
    temperature: float,
    pace: str,
    proposals: tuple[Proposal, ...],
) -> None:
    options = GenerateOptions(temperature=temperature, seed=seed)
    plan = Plan(budget=budget, chain=chain, limit=limit, context=80, proposals=proposals)
    expected = answer_of(toy_target(seed), None, prompt, replace(plan, budget=0), options, Pace())
    paces = {
        "free": Pace(),
        "fixed": FixedPace(costs(), 1.1),
        "live": LivePace(costs(), 1.1, Clock()),
        "erratic": Erratic(seed),
    }
    proposer, draft = proposer_with(skill, seed=seed)
    target = toy_target(seed)
    assert answer_of(target, proposer, prompt, plan, options, paces[pace]) == expected
    # Again on what is there: the next turn of a conversation begins with this one.
    longer = [*prompt, *expected[:-1], 3, 5]
    kept = len(prompt) + len(expected) - 2
    if kept > 0 and len(longer) < 70:
        turn = replace(plan, limit=10, kept=kept)
        fresh = answer_of(toy_target(seed), None, longer, replace(turn, budget=0, kept=0), options, Pace())
        assert answer_of(target, proposer, longer, turn, options, Pace()) == fresh
        assert draft.entries == [] or draft.entries[-1][1] in {*longer, *fresh}


def test_a_good_draft_and_loops_are_accepted() -> None:
    plan = Plan(budget=4, chain=True, limit=60, context=400)
    proposer, _ = proposer_with(1.0)
    loop = list(rounds(toy_target(0), proposer, [1, 2, 3], plan, partial(_choose, GenerateOptions())))
    tokens = sum(len(one.tokens) for one in loop)
    assert tokens / len(loop) > 2.5
    assert {source for one in loop for source in one.tree.sources} >= {"draft"}
    assert ROOT == -1
