"""The probe's regressions against least squares on whole matrices, and on a planted linear world."""

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.calibration import probe
from elsi_edge.calibration.capture import PromptStates
from elsi_edge.calibration.verdict import probe_text

Floats = NDArray[np.float32]
WIDTH, TAPS, VOCAB = 6, 4, 40  # states: taps 0..3 and, fifth, the one after the final norm


def prompt_of(length: int, seed: int, *, width: int = WIDTH) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """States [taps, T, E], final [T, E] and argmax [T] of nothing in particular."""
    draw = np.random.default_rng(seed)
    states = (draw.normal(size=(TAPS, length, width)) * draw.uniform(0.5, 40.0, size=(TAPS, 1, 1))).astype(np.float32)
    final = draw.normal(size=(length, width)).astype(np.float32) + 1.0
    return states, final, draw.integers(0, VOCAB, size=length)


def one(states: Floats, final: Floats, argmax: NDArray[np.int64], index: int = 0) -> PromptStates:
    """A prompt as capture gives it."""
    return PromptStates(
        index=index, states=states, final_norm=final, entropy=np.zeros(len(final), np.float32), argmax=argmax
    )


def pairs_of(lengths: tuple[int, ...], *, seed: int = 0, first: int = 2) -> probe.Pairs:
    prompts = [one(*prompt_of(n, seed + k), index=k) for k, n in enumerate(lengths)]
    return probe.Pairs.of(prompts, [first] * len(prompts))


def scaled(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    wide: NDArray[np.float64] = rows.astype(np.float64)
    unit: NDArray[np.float64] = wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True))
    return unit


def test_pairs_are_a_state_with_the_next_embedding_and_the_next_final_state() -> None:
    length, first = 7, 3
    stamp = np.arange(length, dtype=np.float32)[:, None]  # every row says its position
    states = np.stack([1000 * tap + stamp for tap in range(TAPS)])
    pairs = probe.Pairs.of([one(states, 9000 + stamp, 50 + np.arange(length))], [first])
    at = np.arange(first, length - 1)
    assert pairs.states.shape == (TAPS, len(at), 1)
    for tap in range(TAPS):
        assert pairs.state(tap)[:, 0].tolist() == (1000 * tap + at).tolist()
    assert pairs.state(TAPS)[:, 0].tolist() == (9000 + at).tolist()
    assert pairs.embedding[:, 0].tolist() == (at + 1).tolist()
    assert pairs.final[:, 0].tolist() == (9000 + at + 1).tolist()
    assert pairs.argmax.tolist() == (50 + at + 1).tolist()


def test_pairs_of_several_prompts_are_the_rows_one_after_the_other() -> None:
    alone, two, both = pairs_of((9,)), pairs_of((12,), seed=1), pairs_of((9, 12))
    assert len(both.final) == len(alone.final) + len(two.final) == 6 + 9
    np.testing.assert_array_equal(both.states[:, 6:], two.states)
    np.testing.assert_array_equal(both.state(TAPS)[6:], two.state(TAPS))
    np.testing.assert_array_equal(both.embedding[:6], alone.embedding)
    np.testing.assert_array_equal(both.argmax, [*alone.argmax, *two.argmax])


@pytest.mark.parametrize("members", [(), (0,), (2,), (4,), (1, 3), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_solve_is_ridge_regression_on_the_concatenation(members: probe.Members) -> None:
    rows = pairs_of((30, 41, 25, 60))
    statistics = probe.ProbeStatistics(TAPS + 1, WIDTH, [(1, 3), (0, 2, 4), (0, 1, 2, 3, 4)])
    statistics.add(pairs_of((30,)))
    statistics.add(pairs_of((41, 25, 60), seed=1))
    features = np.concatenate(
        [*(scaled(rows.state(t)) for t in members), scaled(rows.embedding), np.ones((len(rows.final), 1))], axis=1
    )
    assert statistics.count == len(features)
    # ridge as least squares with rows of its own for the penalty
    size = features.shape[1]
    penalty = np.sqrt(probe.RIDGE * np.square(features).sum() / size)
    expected, *_ = np.linalg.lstsq(
        np.concatenate([features, penalty * np.eye(size)]),
        np.concatenate([rows.final.astype(np.float64), np.zeros((size, WIDTH))]),
        rcond=None,
    )
    np.testing.assert_allclose(statistics.solve(members), expected, atol=2e-4)


def test_only_sets_named_ahead_are_covered() -> None:
    statistics = probe.ProbeStatistics(TAPS + 1, WIDTH, [(0, 2, 3)])
    assert all(statistics.covers(s) for s in ((), (1,), (0, 2), (2, 3), (0, 2, 3)))
    assert not statistics.covers((0, 1)) and not statistics.covers((0, 1, 2))


def test_sums_over_two_processes_and_over_an_interruption_are_the_whole() -> None:
    parts = [pairs_of((length,), seed=k) for k, length in enumerate((20, 30, 40))]
    whole, first, second, both, resumed = (probe.ProbeStatistics(TAPS + 1, WIDTH, [(1, 2)]) for _ in range(5))
    for part in parts:
        whole.add(part)
    first.add(parts[0])
    resumed.load({name: array.copy() for name, array in first.state().items()})
    for part in parts[1:]:
        second.add(part)
        resumed.add(part)
    both.load({name: array + second.state()[name] for name, array in first.state().items()})
    assert both.count == resumed.count == whole.count
    for members in ((), (3,), (1, 2)):
        np.testing.assert_allclose(both.solve(members), whole.solve(members), atol=1e-5)
        np.testing.assert_array_equal(resumed.solve(members), whole.solve(members))


class World:
    """A target whose final state is a linear map of tap `seen` one position before and of the embedding beside it."""

    def __init__(self, seen: int, *, width: int = 16, vocab: int = 64) -> None:
        draw = np.random.default_rng(42)
        self.seen, self.width = seen, width
        self.from_state = draw.normal(size=(width, width)) / np.sqrt(width)
        self.from_embedding = 0.5 * draw.normal(size=(width, width)) / np.sqrt(width)
        self.head = draw.normal(size=(vocab, width)).astype(np.float32)

    def prompt(self, length: int, seed: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
        draw = np.random.default_rng(seed)
        states = draw.normal(size=(TAPS, length, self.width))
        final = np.zeros((length, self.width))
        final[1:] = scaled(states[self.seen, :-1]) @ self.from_state + scaled(states[0, 1:]) @ self.from_embedding
        argmax = np.argmax(final.astype(np.float32) @ self.head.T, axis=1)
        return states.astype(np.float32), final.astype(np.float32), argmax

    def agreement(self, *, lag: int = 0) -> dict[probe.Members, float]:
        """Fitted on 40 prompts and scored on 10; with a lag the final states are a position too early or too late."""

        def pairs(seed: int) -> probe.Pairs:
            states, final, argmax = self.prompt(40, seed)
            found = probe.Pairs.of([one(states, final, argmax)], [2])
            moved = {"final": np.roll(found.final, lag, axis=0), "argmax": np.roll(found.argmax, lag)}
            return dataclasses.replace(found, **moved)  # type: ignore[arg-type]

        statistics = probe.ProbeStatistics(TAPS + 1, self.width, [(1, 2)])
        for seed in range(40):
            statistics.add(pairs(seed))
        members = [(), *((t,) for t in range(TAPS + 1)), (1, 2)]
        score = probe.ProbeScore({m: statistics.solve(m) for m in members}, self.head, np.arange(len(self.head)))
        for seed in range(40, 50):
            score.add(pairs(seed))
        assert score.rows == 10 * 37 and score.sayable == score.rows
        return score.agreement()


@pytest.mark.parametrize("seen", [1, 2, 3])
def test_the_tap_that_foresees_everything_is_found(seen: int) -> None:
    found = World(seen).agreement()
    best = max(range(1, TAPS), key=lambda t: found[(t,)])
    assert best == seen and found[(seen,)] > 0.85
    others = [found[(t,)] for t in range(TAPS + 1) if t != seen]
    assert max(others) < 0.5
    assert (found[(1, 2)] > 0.85) == (seen in (1, 2))
    assert found[()] < 0.5 and found[()] == pytest.approx(found[(0,)], abs=0.1)


@pytest.mark.parametrize("lag", [-1, 1])
def test_pairs_that_are_off_by_one_foresee_nothing(lag: int) -> None:
    found = World(2).agreement(lag=lag)  # but for the state after the final norm, which may then be the answer itself
    assert max(found[members] for members in ((), (0,), (1,), (2,), (3,), (1, 2))) < 0.2


def test_tokens_outside_the_vocabulary_are_misses() -> None:
    world = World(1)
    states, final, argmax = world.prompt(60, seed=3)
    pairs = probe.Pairs.of([one(states, final, argmax)], [0])
    perfect = np.zeros((2 * world.width + 1, world.width), np.float32)
    perfect[: world.width], perfect[world.width : -1] = world.from_state, world.from_embedding
    for ids in (np.arange(64), np.unique(pairs.argmax)[::2], np.array([pairs.argmax[0]])):
        score = probe.ProbeScore({(1,): perfect}, world.head[ids], ids)
        score.add(pairs)
        inside = int(np.isin(pairs.argmax, ids).sum())
        assert score.sayable == score.right[(1,)] == inside and score.rows == 59
        assert score.agreement()[(1,)] == pytest.approx(inside / 59)


def test_scoring_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = World(2).agreement()
    monkeypatch.setattr(probe, "_SCORE_ROWS", 7)
    assert World(2).agreement() == before


def test_vocabulary_is_the_most_preferred_then_the_lowest_ids() -> None:
    counts = np.zeros(20, np.int64)
    counts[[17, 3, 9]] = 5, 2, 2
    assert probe.vocabulary(counts, 1).tolist() == [17]
    assert probe.vocabulary(counts, 2).tolist() == [3, 17]
    assert probe.vocabulary(counts, 5).tolist() == [0, 1, 3, 9, 17]
    assert probe.vocabulary(counts, 99).tolist() == list(range(20))


@pytest.mark.parametrize(("prompts", "count"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (12, 3), (256, 64)])
def test_held_out_prompts_are_a_seeded_quarter(prompts: int, count: int) -> None:
    found = probe.held_out(prompts, seed=0)
    assert len(found) == count and found <= set(range(prompts))
    assert found == probe.held_out(prompts, seed=0)
    if prompts > 100:
        assert found != probe.held_out(prompts, seed=1)


def test_standard_errors_know_that_rows_of_one_prompt_are_alike() -> None:
    def score(right: list[list[int]], rows: list[int]) -> probe.ProbeScore:
        found = probe.ProbeScore({(0,): W, (1,): W}, np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
        found._rows = rows
        found._right = {(0,): right[0], (1,): right[1]}
        return found

    W = np.zeros((1, 1), np.float32)
    draw = np.random.default_rng(0)
    alone = score([draw.binomial(20, 0.3, 400).tolist(), [6] * 400], [20] * 400)
    assert alone.error((0,)) == pytest.approx(np.sqrt(0.3 * 0.7 / 8000), rel=0.1)  # independent rows: the binomial one
    assert alone.error((1,)) == 0.0
    together = score([(20 * draw.binomial(1, 0.3, 400)).tolist(), [6] * 400], [20] * 400)
    assert together.error((0,)) == pytest.approx(np.sqrt(0.3 * 0.7 / 400), rel=0.1)
    base = draw.binomial(20, 0.3, 400)
    lead = score([(base + 1).tolist(), base.tolist()], [20] * 400)
    assert lead.error((0,), (1,)) < 1e-9 < lead.error((0,))  # always one better: the lead is sure
    assert score([[5], [5]], [20]).error((0,)) == 0.0


ONE = dict.fromkeys(range(5), 1.0).__getitem__
AGREEMENT = (0.40, 0.20, 0.30, 0.25)  # tap 0 is best and does not count


@pytest.mark.parametrize(
    ("pick", "picked", "flagged", "parts"),
    [
        ((2,), 0.30, False, ["tap 2 foresees", "0.300", "which is the best of all taps"]),
        ((3,), 0.25, True, ["FLAGGED: tap 2 does better by itself (0.300)", "16.7% behind", "--taps 2"]),
        ((3,), 0.2911, False, ["the pick is within 3% of the best tap (2)"]),
        ((3,), 0.2909, True, ["3.0% behind"]),
        ((1, 3), 0.33, False, ["taps 1, 3 foresee", "within 3%"]),
    ],
)
def test_a_pick_that_is_more_than_three_percent_behind_is_flagged(
    pick: tuple[int, ...], picked: float, flagged: bool, parts: list[str]
) -> None:
    found, best, text = probe_text(pick, picked, AGREEMENT, {}, 0.1, error=0.01, lead_error=lambda tap: 0.004)
    assert (found, best) == (flagged, 2)
    for part in parts:
        assert part in text
    assert "EAGLE-3" not in text and "no tap at all in 0.100" in text and "standard error 0.010" in text


def test_the_probe_says_what_one_tap_gives_of_three() -> None:
    _, _, text = probe_text((2,), 0.30, AGREEMENT, {"eagle3": 0.32}, 0.1, error=0.01, lead_error=ONE)
    assert "EAGLE-3's three in 0.320: one tap gives 94% of three" in text
    _, _, text = probe_text((1, 2), 0.30, AGREEMENT, {"eagle3": 0.32}, 0.1, error=0.01, lead_error=ONE)
    assert "one tap gives" not in text
    flagged, _, text = probe_text(
        (4,), 0.1, AGREEMENT, {}, 0.1, error=0.01, lead_error=ONE, name="the state after the final norm"
    )
    assert flagged and "which so few positions do not prove" in text
    _, _, sure = probe_text((3,), 0.25, AGREEMENT, {}, 0.1, error=0.01, lead_error=lambda tap: 0.004)
    assert "lead 0.050, standard error 0.004)" in sure and "the state after the final norm foresees" in text
