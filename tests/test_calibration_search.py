"""Searches over sets: a planted optimum that greedy misses, gains, sweeps and how often the best sets win."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.calibration import search, selection
from elsi_edge.calibration.cka import linear_cka
from elsi_edge.calibration.settings import no_progress
from elsi_edge.calibration.statistics import SetEntropy, centred, joint_entropy

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
ROWS, WIDTH = 400, 12


def orthonormal(columns: int, rows: int = ROWS) -> Floats:
    """Columns [rows, columns] that are centred and orthonormal."""
    raw = np.random.default_rng(0).normal(size=(rows, columns))
    return np.linalg.qr(raw - raw.mean(axis=0))[0]


def covering(*members: tuple[int, ...], rows: int = ROWS) -> Floats32:
    """Taps whose states are some of twelve directions each, so that joint entropies count directions covered."""
    columns = orthonormal(WIDTH, rows)
    states = np.zeros((len(members), rows, WIDTH))
    for tap, directions in enumerate(members):
        states[tap][:, list(directions)] = columns[:, list(directions)]
    return states.astype(np.float32)


# Taps 1, 2 and 3 cover everything together. From each of them greedy is lured away by a tap that adds one direction
# more than the other two do (5 against 4), after which everything cannot be covered any more.
MISLEADING = (
    (0, 1),
    (0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11),
    (4, 5, 6, 8, 9), (8, 9, 10, 0, 1), (0, 1, 2, 4, 5),
)  # fmt: skip


def sets_of(rows: Floats32, *, seed: int = 0) -> search.Sets:
    order = np.random.default_rng(seed).permutation(rows.shape[1])
    return search.Sets(rows, order, len(rows) - 1)


def random_rows(blocks: int, rows: int = 120, width: int = 6, seed: int = 1) -> Floats32:
    draw = np.random.default_rng(seed)
    states = draw.normal(size=(blocks + 1, rows, width)) * draw.uniform(0.1, 1.0, size=(blocks + 1, 1, width))
    return centred(states, "unit").astype(np.float32)


def test_what_greedy_misses_is_found_and_its_distance_told() -> None:
    sets = sets_of(covering(*MISLEADING))
    greedy = selection.elsi(6, 3, sets.full).taps
    assert greedy != (1, 2, 3)
    found = search.best_sets(sets, 3, greedy, no_progress)
    result = found.search
    assert (result.best, result.greedy, result.m) == ((1, 2, 3), greedy, 3)
    assert result.best_entropy == pytest.approx(math.log(12), abs=1e-5)
    assert result.greedy_entropy == pytest.approx(joint_entropy(sets.full.rows[list(greedy)], "raw"), abs=1e-5)
    assert result.best_entropy - result.greedy_entropy > 0.1
    assert result.total == result.compared == math.comb(6, 3) and result.rows == ROWS
    assert found.close[0] == (1, 2, 3) and len(found.close) == 20
    values = [sets.full(s) for s in found.close]
    assert values == sorted(values, reverse=True)


def test_greedy_from_every_seed_is_exhaustive_for_pairs() -> None:
    sets = sets_of(random_rows(7))
    greedy = selection.elsi(7, 2, sets.full).taps
    result = search.best_sets(sets, 2, greedy, no_progress).search
    assert result.best == result.greedy and result.compared == result.total == 21
    assert result.best == max(itertools.combinations(range(1, 8), 2), key=sets.full)


def test_a_set_of_taps_is_compared_even_when_the_screen_would_drop_it() -> None:
    sets = sets_of(random_rows(9))
    worst = min(itertools.combinations(range(1, 10), 3), key=sets.full)
    result = search.best_sets(sets, 3, worst, no_progress).search
    assert result.greedy == worst and result.greedy_entropy < result.best_entropy
    assert result.compared == search.CLOSE + 1 and result.total == 84


def test_a_greedy_set_that_the_screen_misjudges_may_still_be_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CLOSE", 1)
    sets = sets_of(random_rows(6, seed=1))
    sets.screen = SetEntropy(covering(*MISLEADING))  # of another world
    best = max(itertools.combinations(range(1, 7), 3), key=sets.full)
    assert best != max(itertools.combinations(range(1, 7), 3), key=sets.screen)
    result = search.best_sets(sets, 3, best, no_progress).search
    assert result.best == result.greedy == best and result.compared == 2


def test_large_pools_are_extended_from_smaller_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "ALL_SETS", 10)
    sets = sets_of(covering(*MISLEADING))
    greedy = selection.elsi(6, 3, sets.full).taps
    result = search.best_sets(sets, 3, greedy, no_progress).search
    assert result.best == (1, 2, 3) and result.compared <= result.total == 20
    four = search.best_sets(sets, 4, selection.elsi(6, 4, sets.full).taps, no_progress).search
    assert four.best == max(itertools.combinations(range(1, 7), 4), key=lambda s: (sets.full(s), [-t for t in s]))


def test_shown_pairs_and_triples_are_what_full_search_finds() -> None:
    sets = sets_of(random_rows(8, rows=400))
    pair = search.show_pairs(sets).search
    triple = search.show_triples(sets, pair.best).search
    assert pair.best == max(itertools.combinations(range(1, 9), 2), key=sets.full)
    assert sets.full(triple.best) >= sets.full(max(itertools.combinations(range(1, 9), 3), key=sets.full)) - 0.02
    assert (pair.m, triple.m, pair.total, triple.total) == (2, 3, 28, 56)
    assert pair.best_entropy >= pair.greedy_entropy and triple.best_entropy >= triple.greedy_entropy
    assert triple.best_entropy > pair.best_entropy


def test_screen_and_half_are_nested_samples() -> None:
    rows = random_rows(3, rows=200)
    order = np.random.default_rng(5).permutation(200)
    sets = search.Sets(rows, order, 3)
    assert (sets.rows, sets.screen_rows) == (200, 25)
    np.testing.assert_array_equal(sets.screen.rows, rows[:, np.sort(order[:25])])
    half = rows[[1, 3]][:, np.sort(order[:100])]
    assert sets.half((1, 3)) == pytest.approx(joint_entropy(half, "raw"), abs=1e-5)
    few = search.Sets(rows[:, :127], np.arange(127), 3)
    assert few.screen is few.full


def test_gains_are_what_a_partner_adds() -> None:
    sets = sets_of(random_rows(4))
    gains = sets.gains()
    assert gains.shape == (5, 5) and np.isnan(np.diag(gains)).all()
    assert np.isnan(gains[0]).all() and np.isnan(gains[:, 0]).all()
    for a, b in itertools.permutations(range(1, 5), 2):
        rows = sets.screen.rows[[a, b]]
        added = joint_entropy(rows, "raw") - joint_entropy(rows[:1], "raw")
        assert gains[a, b] == pytest.approx(added, abs=1e-5)
    # a tap adds nothing to its copy
    twins = covering((0,), (1, 2, 3), (1, 2, 3), (4, 5))
    gains = sets_of(twins).gains()
    assert gains[1, 2] == pytest.approx(0.0, abs=1e-5) and gains[1, 3] > 0.4


def test_sweep_starts_at_elsi_and_spreads() -> None:
    # 1 and 2 are richest together but alike; 3 is poorer and unlike both
    rows = covering((0,), (0, 1, 2, 3, 4), (3, 4, 5, 6, 7), (8, 9), (0, 1))
    sets = sets_of(rows)
    cka = linear_cka(rows)
    found = search.sweep(sets, 2, cka)
    assert [item["weight"] for item in found] == list(search.WEIGHTS)
    assert found[0]["taps"] == list(selection.elsi(4, 2, sets.screen).taps) == [1, 2]
    assert found[-1]["taps"] in ([1, 3], [2, 3])
    alike = [selection.mean_pairwise_cka(item["taps"], cka) for item in found]  # type: ignore[arg-type]
    assert alike == sorted(alike, reverse=True)


@pytest.mark.parametrize("rows", [300, 20])  # the feature side and the sample side
def test_influence_of_rows_on_a_sets_entropy_is_its_derivative(rows: int) -> None:
    wide = random_rows(3, rows=rows, width=12, seed=3)
    wide -= wide.mean(axis=1, keepdims=True)
    sets = sets_of(wide)
    found = search._influence(sets, (1, 3))
    assert found.mean() == pytest.approx(0.0, abs=1e-4)
    step = 1e-4
    for row in (0, rows // 2, rows - 1):
        ends = []
        for share in (step, -step):
            weights = np.full(rows, (1.0 - share) / rows)
            weights[row] += share
            both = wide[[1, 3]].astype(np.float64)
            both -= (weights[:, None] * both).sum(axis=1, keepdims=True)
            ends.append(joint_entropy(both * np.sqrt(weights)[:, None], "raw"))
        assert found[row] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=0.02, abs=0.01)


def test_the_chosen_set_is_listed_and_judged_by_its_own_rule() -> None:
    """Taps 1 and 2 hold most but are alike: joint entropy takes them, a penalty on likeness does not."""
    sets, prompt = sets_of(random_rows(5, rows=400)), np.repeat(np.arange(20), 20)
    best = max(search.pairs_of(4), key=sets.full)
    chosen = min(search.pairs_of(4), key=sets.full)
    lost = search.wins(sets, (best,), prompt, seed=0, chosen=chosen)
    assert {tuple(item["taps"]): item["share"] for item in lost} == {best: 1.0, chosen: 0.0}  # type: ignore[arg-type]

    def penalty(taps: tuple[int, ...]) -> float:
        return 0.0 if taps == chosen else 9.0

    won = search.wins(sets, (best,), prompt, seed=0, chosen=chosen, penalty=penalty)
    assert won == [{"taps": list(chosen), "share": 1.0}]
    near = search.rivals(sets, chosen, penalty)
    assert near and chosen not in near and all(len({*taps} & {*chosen}) == 1 for taps in near)


def test_sets_that_are_known_are_no_progress() -> None:
    sets, steps = sets_of(random_rows(5)), []

    class Bar:
        def advance(self, n: float) -> None:
            steps.append(n)

    pool = search.pairs_of(4)
    sets.full.prepare(pool[:4])
    search.measure(sets.full, pool, Bar())
    assert sum(steps) == len(pool) - 4


def test_wins_go_to_the_best_set_and_are_shared_by_equals() -> None:
    prompt = np.repeat(np.arange(40), 10)
    sets = sets_of(covering((0,), (1, 2, 3, 4), (5, 6, 7, 8), (5, 6, 7, 8), (1,)))
    clear = search.wins(sets, ((1, 2), (1, 4)), prompt, seed=0)
    assert clear == [{"taps": [1, 2], "share": 1.0}]
    level = search.wins(sets_of(random_rows(4, rows=400)), ((1, 2), (1, 3), (2, 3)), prompt, seed=0)
    assert sum(item["share"] for item in level) == pytest.approx(1.0)  # type: ignore[misc]
    assert level == search.wins(sets_of(random_rows(4, rows=400)), ((1, 2), (1, 3), (2, 3)), prompt, seed=0)


def test_a_model_of_one_block_has_no_pairs_and_of_two_no_triples() -> None:
    assert search.pairs_of(1) == [] and search.pairs_of(2) == [(1, 2)]
    pair = search.show_pairs(sets_of(random_rows(2))).search
    assert (pair.greedy, pair.best, pair.total, pair.compared) == ((1, 2), (1, 2), 1, 1)
    triple = search.show_triples(sets_of(random_rows(3)), (1, 3)).search
    assert triple.best == (1, 2, 3)
