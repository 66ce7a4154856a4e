"""Influences against derivatives, intervals against a bootstrap by brute force and against a known population."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from numpy.typing import NDArray

from elsi_edge.calibration import stability
from elsi_edge.calibration.analysis import Settling
from elsi_edge.calibration.statistics import centred, joint_entropy, spectrum_entropy

Floats = NDArray[np.float64]
WIDTH = 6


def population(prompts: int, rows: int, *, seed: int, clustered: float = 0.5) -> tuple[Floats, NDArray[np.intp]]:
    """States [3, prompts * rows, WIDTH] of three taps, and their prompts. Prompts stretch directions of their own."""
    draw = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(prompts), rows)
    stretch = np.exp(clustered * draw.normal(size=(prompts, WIDTH)))
    base = draw.normal(size=(len(prompt), WIDTH)) * stretch[prompt] * np.linspace(1.0, 2.0, WIDTH)
    mix = np.random.default_rng(1).normal(size=(3, WIDTH, WIDTH)) / np.sqrt(WIDTH) * 0.3 + np.eye(WIDTH)
    return np.stack([base @ m for m in mix]), prompt


def influences(states: Floats) -> tuple[list[float], Floats]:
    """Entropies and influences of every tap, centred."""
    found, each = [], []
    for rows in centred(states, "centered"):
        values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
        found.append(spectrum_entropy(values))
        each.append(stability.influence(rows, values, vectors))
    return found, np.array(each)


def weighted_entropy(rows: Floats, weights: Floats) -> float:
    shares = weights / weights.sum()
    away = rows - shares @ rows
    return spectrum_entropy(np.linalg.eigvalsh(away.T @ (away * shares[:, None])))


@budget(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**20), rows=st.integers(8, 40), width=st.integers(2, 7))
def test_influence_is_the_derivative_of_the_entropy(seed: int, rows: int, width: int) -> None:
    states = np.random.default_rng(seed).normal(size=(1, rows, width)) * np.linspace(0.5, 2.0, width)
    _, found = influences(states)
    assert found[0].mean() == pytest.approx(0.0, abs=1e-9)
    step = 1e-5
    for row in range(0, rows, 5):
        ends = []
        for share in (step, -step):  # the distribution moves towards this row, and away from it
            weights = np.full(rows, (1.0 - share) / rows)
            weights[row] += share
            ends.append(weighted_entropy(states[0], weights))
        assert found[0, row] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-4)


def test_directions_without_variance_have_no_influence() -> None:
    rows = centred(np.random.default_rng(0).normal(size=(50, 3)), "centered")
    flat = np.concatenate([rows, np.zeros((50, 4))], axis=1)
    values, vectors = np.linalg.eigh(flat.T @ flat / 50)
    _, expected = influences(rows[None])
    np.testing.assert_allclose(stability.influence(flat, values, vectors), expected[0], atol=1e-9)
    assert np.isfinite(stability.influence(flat.astype(np.float32), values, vectors)).all()


def test_intervals_agree_with_a_bootstrap_by_brute_force() -> None:
    states, prompt = population(40, 30, seed=2)
    entropy, each = influences(states)
    found = stability.resampled(entropy, each, prompt, total=len(prompt))
    draw = np.random.default_rng(3)
    again = np.empty((400, 3))
    for k in range(len(again)):
        counts = np.bincount(draw.integers(0, 40, size=40), minlength=40)[prompt].astype(np.float64)
        again[k] = [weighted_entropy(tap, counts) for tap in states]
    brute = np.cov(again.T)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), np.sqrt(np.diag(brute)), rtol=0.25)
    # differences between taps, on which wins rest, too
    for a, b in ((0, 1), (0, 2), (1, 2)):
        apart = [c[a, a] + c[b, b] - 2 * c[a, b] for c in (found.covariance, brute)]
        assert np.sqrt(apart[0]) == pytest.approx(np.sqrt(apart[1]), rel=0.25)
    for (low, high), value, spread in zip(found.intervals(), entropy, np.sqrt(np.diag(found.covariance)), strict=True):
        assert low + high == pytest.approx(2 * value) and high - low == pytest.approx(2 * 1.959964 * spread)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_intervals_cover_what_so_many_prompts_give_on_average(fraction: float) -> None:
    draws = [population(40, 30, seed=100 + k) for k in range(150)]
    truth = np.mean([influences(states)[0] for states, _ in draws], axis=0)
    inside = np.zeros(3)
    for k, (states, prompt) in enumerate(draws):
        entropy, each = influences(states)
        chosen = np.random.default_rng(k).permutation(len(prompt))[: round(fraction * len(prompt))]
        found = stability.resampled(entropy, each[:, chosen], prompt[chosen], total=len(prompt))
        inside += [low <= value <= high for (low, high), value in zip(found.intervals(), truth, strict=True)]
    # the spread estimated from a quarter of the rows is itself uncertain, which costs some points of coverage
    assert np.abs(inside / len(draws) - 0.95).max() < (0.07 if fraction == 1.0 else 0.12), inside / len(draws)


@pytest.mark.parametrize(("prompts", "clustered", "fraction"), [(60, 0.5, 0.25), (60, 0.0, 0.25), (10, 0.5, 0.5)])
def test_a_sample_of_the_rows_gives_the_same_spread_on_average(prompts: int, clustered: float, fraction: float) -> None:
    states, prompt = population(prompts, 40, seed=4, clustered=clustered)
    entropy, each = influences(states)
    whole = np.diag(stability.resampled(entropy, each, prompt, total=len(prompt)).covariance)
    draw = np.random.default_rng(5)
    found = []
    for _ in range(300):
        chosen = draw.permutation(len(prompt))[: round(fraction * len(prompt))]
        found.append(
            np.diag(stability.resampled(entropy, each[:, chosen], prompt[chosen], total=len(prompt)).covariance)
        )
    assert np.min(found) > 0.0  # never an interval of no width, though the estimate may fall below zero
    assert np.mean(found, axis=0) / whole == pytest.approx(1.0, abs=0.35 if clustered == 0.0 else 0.1)


def test_rows_that_hang_together_by_prompt_give_wider_intervals() -> None:
    states, prompt = population(40, 30, seed=6, clustered=0.8)
    entropy, each = influences(states)
    shuffled = np.random.default_rng(7).permutation(prompt)
    widths = [
        np.ptp(stability.resampled(entropy, each, names, total=len(prompt)).intervals(), axis=1)
        for names in (prompt, shuffled)
    ]
    assert (widths[0] > 2.0 * widths[1]).all()
    # and without prompts' effects the two agree
    states, prompt = population(40, 30, seed=6, clustered=0.0)
    entropy, each = influences(states)
    widths = [
        np.ptp(stability.resampled(entropy, each, names, total=len(prompt)).intervals(), axis=1)
        for names in (prompt, shuffled)
    ]
    np.testing.assert_allclose(widths[0], widths[1], rtol=0.4)


def known(entropy: list[float], spread: list[float], correlation: float) -> stability.Resampled:
    deviations = np.array(spread)
    matrix = np.full((len(spread), len(spread)), correlation)
    np.fill_diagonal(matrix, 1.0)
    return stability.Resampled(
        entropy=np.array(entropy), covariance=matrix * np.outer(deviations, deviations), prompts=9
    )


def test_wins_follow_the_normal_distribution() -> None:
    found = known([9.0, 5.0, 5.0, 4.0], [0.1] * 4, 0.0)
    eligible = np.array([False, True, True, True])
    wins = found.wins(seed=0, eligible=eligible)
    assert wins.sum() == pytest.approx(1.0) and wins[0] == 0.0 and wins[3] == 0.0
    assert wins[1] == pytest.approx(0.5, abs=0.06)
    np.testing.assert_array_equal(wins, found.wins(seed=0, eligible=eligible))
    assert found.wins(seed=0)[0] == 1.0
    # 0.1 nats apart with 0.1 each: the better wins with probability Phi(1 / sqrt 2); correlated, almost always
    apart = ([5.1, 5.0], [0.1, 0.1])
    assert known(*apart, 0.0).wins(seed=1)[0] == pytest.approx(0.7602, abs=0.05)
    assert known(*apart, 0.99).wins(seed=1)[0] > 0.99
    assert known([5.1, 5.0], [0.0, 0.0], 0.0).wins(seed=1).tolist() == [1.0, 0.0]


def test_wins_do_not_hang_on_rounding_of_the_covariance() -> None:
    found = known([5.0] * 6, [0.1] * 6, 0.0)  # all eigenvalues equal: any basis is one
    jitter = np.random.default_rng(0).normal(scale=1e-12, size=(6, 6))
    near = stability.Resampled(entropy=found.entropy, covariance=found.covariance + jitter + jitter.T, prompts=9)
    np.testing.assert_allclose(near.wins(seed=2), found.wins(seed=2), atol=2e-3)


def test_covariance_is_that_of_sums_over_prompts() -> None:
    each = np.array([[1.0, 2.0, -3.0, -1.0, 1.0], [0.5, 0.5, -1.0, -0.5, 0.5]])
    found = stability.resampled([5.0, 6.0], each, np.array([7, 7, 9, 9, 4]), total=5)
    sums = np.array([[3.0, -4.0, 1.0], [1.0, -1.5, 0.5]])
    np.testing.assert_allclose(found.covariance, 3 / 2 * sums @ sums.T / 25)
    assert found.prompts == 3 and found.entropy.tolist() == [5.0, 6.0]


def test_wins_agree_with_a_bootstrap_by_brute_force() -> None:
    states, prompt = population(30, 25, seed=10)
    entropy, each = influences(states)
    entropy = [entropy[0]] * 3  # level, so that every tap may win
    wins = stability.resampled(entropy, each, prompt, total=len(prompt)).wins(seed=0)
    base = [joint_entropy(tap[None], "centered") for tap in states]
    draw = np.random.default_rng(1)
    brute = np.zeros(3)
    for _ in range(400):
        counts = np.bincount(draw.integers(0, 30, size=30), minlength=30)[prompt].astype(np.float64)
        moved = np.array([weighted_entropy(tap, counts) for tap in states]) - base
        brute[np.argmax(moved)] += 1 / 400
    np.testing.assert_allclose(wins, brute, atol=0.15)


def test_one_prompt_is_no_spread_between_prompts_and_no_nan() -> None:
    states, _ = population(1, 30, seed=8)
    entropy, each = influences(states)
    found = stability.resampled(entropy, each, np.zeros(30, np.intp), total=30)
    assert found.prompts == 1 and np.isfinite(found.intervals()).all()
    assert found.wins(seed=0).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shares", "prompts", "settled", "stable", "parts"),
    [
        ({27: 0.9, 22: 0.1}, 7, True, False, ["7 prompts are too few", "tap 27", "at least 8"]),
        ({27: 0.9, 22: 0.1}, 64, True, True, ["Tap 27 is the highest in 90% of 1000", "tap 22 in 10%", "is stable."]),
        ({27: 1.0}, 64, True, True, ["in 100% of 1000 resamples of the 64 prompts. The pick is stable."]),
        ({27: 0.9, 22: 0.1}, 64, False, False, ["half of the prompts pick tap 6, so it is not", "--until-stable"]),
        ({27: 0.5, 26: 0.4, 22: 0.1}, 64, True, False, ["its neighbours win 90%", "little hangs on which"]),
        ({27: 0.5, 6: 0.5}, 64, True, False, ["tap 6 in 50%. Not stable: more prompts"]),
        ({1: 0.5, 2: 0.4}, 64, True, False, ["its neighbours win 90%"]),
        ({30: 0.5, 29: 0.4}, 64, True, False, ["its neighbours win 90%"]),
    ],
)
def test_words(shares: dict[int, float], prompts: int, settled: bool, stable: bool, parts: list[str]) -> None:
    wins = np.zeros(31)
    for tap, share in shares.items():
        wins[tap] = share
    pick = max(shares, key=lambda t: shares[t])
    look = None if settled else stability.Outlook(settled=False, earlier=6, limit=pick, entropy=())
    found, text = stability.describe(wins, pick, prompts, look)
    assert found is stable
    for part in parts:
        assert part in text, text
    assert stable == ("is stable." in text)


def looks(*entropies: tuple[float, ...], tokens: tuple[int, ...]) -> list[Settling]:
    return [
        Settling(prompts=n, tokens=n, tap=1 + int(np.argmax(e[1:])), entropy=e, win_share=1.0)
        for e, n in zip(entropies, tokens, strict=True)
    ]


def test_outlook_takes_off_the_bias_of_few_positions() -> None:
    # H(n) = H - c / n: tap 1 leads at both looks, tap 2 in the limit
    def at(n: int) -> tuple[float, ...]:
        return (9.0, 5.00 - 10 / n, 5.05 - 60 / n)

    found = stability.outlook(looks(at(100), at(400), at(800), tokens=(100, 400, 800)))
    assert found is not None and not found.settled and (found.earlier, found.limit) == (1, 2)
    assert found.entropy == pytest.approx((9.0, 5.00, 5.05), abs=1e-4)
    wins = np.array([0.0, 1.0, 0.0])
    assert "Extrapolated to many positions tap 2 would lead" in stability.describe(wins, 1, 64, found)[1]
    settled = stability.outlook(looks(at(2000), at(4000), tokens=(2000, 4000)))
    assert settled is not None and settled.settled and settled.limit == 2
    stable, text = stability.describe(np.array([0.0, 0.0, 1.0]), 2, 64, settled)
    assert stable and "half of the prompts alone give the same pick" in text
    assert stability.outlook(looks(at(100), tokens=(100,))) is None


def test_rivals_are_three_at_most_and_no_trifles() -> None:
    wins = np.full(31, 0.005)
    wins[[5, 7, 9, 11, 13]] = 0.3, 0.2, 0.2, 0.1, 0.1
    _, text = stability.describe(wins, 5, 64, None)
    assert [f"tap {t} " in text for t in (7, 9, 11, 13, 1)] == [True, True, True, False, False]


def test_set_shares_are_sorted_and_leave_out_the_hopeless() -> None:
    shares = stability.set_shares([(1, 2), (3, 4), (5, 6)], np.array([0.25, 0.75, 0.0]))
    assert shares == [{"taps": [3, 4], "share": 0.75}, {"taps": [1, 2], "share": 0.25}]
