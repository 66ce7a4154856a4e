"""Entropies of single prompts, the paper's bands, agreement on the order of taps, and the filter's random control."""

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from elsi_edge.calibration import variance
from elsi_edge.calibration.statistics import NORMALISATIONS, Normalisation, joint_entropy

Floats = NDArray[np.float64]


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("rows", [4, 17, 60])
def test_prompt_entropies_are_joint_entropies_of_single_taps(normalisation: Normalisation, rows: int) -> None:
    states = np.random.default_rng(rows).normal(size=(3, rows, 24)) * np.linspace(0.3, 2.0, 24) + 0.3
    states[2] *= 1e4  # squares of which float32 holds badly
    expected = [joint_entropy(states[[tap]], normalisation) for tap in range(3)]
    found = variance.prompt_entropies(states.astype(np.float32), normalisation)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_massive_activation_does_not_break_the_precision() -> None:
    states = np.random.default_rng(0).normal(size=(1, 30, 24))
    states[0, 2, 3] = 25_000.0
    found = variance.prompt_entropies(states.astype(np.float32), "unit")
    assert found[0] == pytest.approx(joint_entropy(states, "unit"), abs=2e-4)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_what_has_no_entropy_is_nan(normalisation: Normalisation) -> None:
    states = np.random.default_rng(1).normal(size=(4, 12, 8)).astype(np.float32)
    assert np.isnan(variance.prompt_entropies(states[:, :3], normalisation)).all()
    assert np.isnan(variance.prompt_entropies(states[:, :0], normalisation)).all()
    states[1] = 0.0
    states[2] = states[2, :1]  # the same token over and over: no direction, not all of them
    states[3] = 1e5 * states[3, :1]
    assert np.isnan(variance.prompt_entropies(states, normalisation)).tolist() == [False, True, True, True]


def test_long_prompts_are_thinned_evenly() -> None:
    positions = np.arange(10, 1500)
    found = variance.thinned(positions)
    assert len(found) == variance.MOST_POSITIONS and (found[0], found[-1]) == (10, 1499)
    steps = np.diff(found)
    assert steps.min() >= 11 and steps.max() <= 12
    assert variance.thinned(positions[:128]).tolist() == positions[:128].tolist()


def test_bands_are_the_papers_in_proportion() -> None:
    assert variance.bands(36) == ((0, 6), (7, 28), (29, 35))
    assert variance.bands(30) == ((0, 5), (6, 23), (24, 29))


@pytest.mark.parametrize("blocks", [*range(1, 13), 24, 48, 80])
def test_bands_of_any_depth_are_taps_in_order(blocks: int) -> None:
    found = variance.bands(blocks)
    assert len(found) == 3
    for first, last in found:
        assert 0 <= first <= last <= blocks
    assert [first for first, _ in found] == sorted(first for first, _ in found)
    if blocks >= 3:  # from here on they tile taps 0..L-1
        assert [tap for a, b in found for tap in range(a, b + 1)] == list(range(blocks))
    entropies = {choice: np.random.default_rng(blocks).random((5, blocks + 1)) for choice in variance.CHOICES}
    report = variance.report(entropies, blocks)
    assert [row["taps"] for row in report["bands"]] == [list(band) for band in found]


@pytest.mark.parametrize("ties", [False, True])
def test_order_agreement_is_the_mean_spearman_correlation(ties: bool) -> None:
    values = np.random.default_rng(2).random((7, 9)) + np.linspace(0.0, 0.5, 9)
    if ties:
        values = values.round(1)
    expected = np.mean([scipy.stats.spearmanr(values[i], values[j])[0] for i in range(7) for j in range(i)])
    assert variance.order_agreement(values) == pytest.approx(expected, abs=1e-12)
    np.testing.assert_array_equal(variance.ranked(values), scipy.stats.rankdata(values, axis=1) - 1)
    assert variance.spearman(values[0].tolist(), values[1].tolist()) == pytest.approx(
        scipy.stats.spearmanr(values[0], values[1])[0]
    )


def test_order_agreement_at_its_ends() -> None:
    rising = np.arange(6.0)
    assert variance.order_agreement(np.stack([rising, 2 * rising, rising**2])) == pytest.approx(1.0)
    assert variance.spearman(rising.tolist(), (-rising).tolist()) == pytest.approx(-1.0)
    assert variance.spearman([1.0, 1.0], [1.0, 2.0]) == 0.0  # no order, no agreement, no NaN
    draw = np.random.default_rng(3)
    assert abs(variance.order_agreement(draw.random((200, 20)))) < 0.02


def planted(blocks: int, prompts: int = 40, *, seed: int = 4, equal: bool = False) -> dict[str, Floats]:
    """Entropies whose standard deviation between prompts is 0.4 unfiltered, 0.2 filtered, 0.3 at random."""
    draw = np.random.default_rng(seed)
    spread = {"unfiltered": 0.4, "filtered": 0.2, "random": 0.3}
    if equal:
        spread |= {"equal_filtered": 0.1, "equal_random": 0.2}
    order = np.linspace(0.0, 1.0, blocks + 1)
    unit = draw.normal(size=(prompts, blocks + 1))
    unit = (unit - unit.mean(axis=0)) / unit.std(axis=0, ddof=1)
    return {choice: 4.0 + order + size * unit for choice, size in spread.items()}


def test_report_of_planted_variances() -> None:
    report = variance.report(planted(30), 30)
    assert report["prompts"] == 40 and "equal" not in report
    for row, paper in zip(report["bands"], (0.484, 0.458, 0.356), strict=True):
        assert (row["unfiltered"], row["filtered"], row["random"]) == pytest.approx((0.16, 0.04, 0.09), abs=1e-6)
        assert row["reduction"] == pytest.approx(0.75, abs=1e-5)
        assert row["reduction_random"] == pytest.approx(1 - 9 / 16, abs=1e-5)
        assert row["paper"] == paper
    assert len(report["by_tap"]["filtered"]) == 31
    order = report["order"]
    assert order["filtered"] > order["random"] > order["unfiltered"]  # the same signal in less noise
    assert "by -75% / -75% / -75%" in report["text"] and "(paper: -48.4% / -45.8% / -35.6%)" in report["text"]
    assert "as many positions drawn at random change it by -44% / -44% / -44%" in report["text"]
    assert "agree more" in report["text"]


def test_tap_0_has_no_say_in_the_order() -> None:
    entropies = planted(8)
    moved = {choice: values.copy() for choice, values in entropies.items()}
    for values in moved.values():
        values[:, 0] = np.random.default_rng(0).normal(size=len(values)) * 100
    assert variance.report(moved, 8)["order"] == variance.report(entropies, 8)["order"]


def test_prompts_with_nan_are_left_out_of_all_three() -> None:
    entropies = planted(8)
    holed = {choice: values.copy() for choice, values in entropies.items()}
    holed["filtered"][5] = np.nan
    holed["random"][7, 3] = np.nan
    rest = np.delete(np.arange(40), [5, 7])
    assert variance.report(holed, 8) == variance.report({c: v[rest] for c, v in entropies.items()}, 8)
    assert variance.report(holed, 8)["prompts"] == 38


def test_under_three_prompts_nothing_is_said() -> None:
    entropies = planted(8, prompts=3)
    assert variance.report(entropies, 8)["prompts"] == 3
    entropies["unfiltered"][1, 4] = np.nan
    assert variance.report(entropies, 8) == {}


def test_equal_positions_are_reported_for_the_prompts_that_have_them() -> None:
    entropies = planted(30, equal=True)
    entropies["equal_random"][3:] = np.where(np.arange(37)[:, None] < 17, np.nan, entropies["equal_random"][3:])
    entropies["equal_filtered"][3:20] = np.nan
    report = variance.report(entropies, 30)
    assert report["prompts"] == 40  # the first comparison does not lose them
    equal = report["equal"]
    assert (equal["positions"], equal["prompts"]) == (16, 23)
    for row, band in zip(equal["bands"], variance.bands(30), strict=True):
        kept = np.r_[0:3, 20:40]
        part = slice(band[0], band[1] + 1)
        expected = entropies["equal_filtered"][kept][:, part].var(axis=0, ddof=1).mean()
        assert row["filtered"] == pytest.approx(expected, abs=1e-6)
        assert row["reduction_over_random"] == pytest.approx(0.75, abs=1e-4)
        assert set(row) == {"name", "taps", "filtered", "random", "reduction_over_random"}
    assert set(equal["order"]) == {"filtered", "random"}
    assert "On exactly 16 positions of each of 23 prompts" in report["text"] and "-75% / -75% / -75%" in report["text"]
    entropies["equal_random"][2:] = np.nan
    assert "equal" not in variance.report(entropies, 30)


def test_lengths_move_entropies_of_whole_prompts_and_not_those_of_equal_positions() -> None:
    """Why there is a second comparison: prompts that say the same at different lengths."""
    draw = np.random.default_rng(5)
    lengths = draw.integers(34, 160, size=60)
    gathered = variance.PromptEntropies.empty(60, 1)
    for prompt, length in enumerate(lengths):
        states = draw.normal(size=(1, length, 48))
        chosen = {
            "unfiltered": np.arange(length),
            "filtered": np.arange(round(0.3 * length)),
            "random": np.sort(draw.choice(length, round(0.3 * length), replace=False)),
            "equal_filtered": np.arange(16),
            "equal_random": np.sort(draw.choice(length, 16, replace=False)),
        }
        gathered.add([variance.ByItself(index=prompt, states=states, chosen=chosen)], "unit")
    spread = {choice: values.var() for choice, values in gathered.values.items()}
    assert scipy.stats.spearmanr(lengths, gathered.values["filtered"][:, 0])[0] > 0.95
    assert spread["filtered"] > 50 * spread["equal_filtered"]
    assert spread["random"] > 50 * spread["equal_random"]


def test_gathering_thins_and_leaves_the_unmeasured_nan() -> None:
    states = np.random.default_rng(6).normal(size=(2, 700, 4)).astype(np.float32)
    gathered = variance.PromptEntropies.empty(3, 2)
    assert set(gathered.values) == {*variance.CHOICES, *variance.EQUAL_CHOICES}
    chosen = {"unfiltered": np.arange(700), "filtered": np.arange(0)}
    gathered.add([variance.ByItself(index=1, states=states, chosen=chosen)], "unit")
    expected = variance.prompt_entropies(states[:, variance.thinned(np.arange(700))], "unit")
    np.testing.assert_array_equal(gathered.values["unfiltered"][1], expected)
    assert np.isnan(gathered.values["filtered"]).all() and np.isnan(gathered.values["unfiltered"][[0, 2]]).all()
