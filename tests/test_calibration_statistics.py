"""Entropies against spectra that were planted, and as properties; what is summed up while states stream by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from numpy.typing import NDArray

from elsi_edge.calibration.accumulate import CovarianceAccumulator, Reservoir
from elsi_edge.calibration.parallel import threads
from elsi_edge.calibration.statistics import (
    NORMALISATIONS,
    Normalisation,
    SetEntropy,
    centre_in_place,
    centred,
    joint_entropy,
    keep_positions,
    normalise,
    random_positions,
    spectrum_entropy,
)
from elsi_edge.errors import ConfigError, SelectionError

Floats = NDArray[np.float64]


def planted(shares: list[float], rows: int = 64, width: int = 12, seed: int = 0) -> Floats:
    """Centred rows [rows, width] whose covariance has exactly these eigenvalues, in random directions."""
    draw = np.random.default_rng(seed)
    raw = draw.normal(size=(rows, len(shares)))
    left, _ = np.linalg.qr(raw - raw.mean(axis=0))
    right, _ = np.linalg.qr(draw.normal(size=(width, len(shares))))
    states: Floats = left * np.sqrt(np.array(shares)) @ right.T
    return states


def rotation(width: int, seed: int) -> Floats:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]


def names(count: int) -> tuple[str, ...]:
    return tuple(f"tap {tap}" for tap in range(count))


@pytest.mark.parametrize(
    ("shares", "nats"),
    [([1.0], 0.0), ([1.0] * 8, np.log(8)), ([0.5, 0.25, 0.25], 1.5 * np.log(2)), ([4.0, 4.0], np.log(2))],
)
def test_planted_spectrum_has_its_known_entropy(shares: list[float], nats: float) -> None:
    states = planted(shares)[None]
    for side in ("feature", "sample"):
        assert joint_entropy(states, "centered", side=side) == pytest.approx(nats, abs=1e-9)
    accumulator = CovarianceAccumulator(names(1), 12, "centered")
    accumulator.add(states)
    assert accumulator.entropies()[0] == pytest.approx(nats, abs=1e-9)


def test_spectrum_entropy_ignores_rounding_and_refuses_nothing() -> None:
    assert spectrum_entropy(np.array([1.0, 1.0, -1e-17, 0.0])) == pytest.approx(np.log(2))
    with pytest.raises(SelectionError, match="no entropy"):
        spectrum_entropy(np.zeros(3))


@budget(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    scale=st.floats(1e-3, 1e3),
    rows=st.integers(5, 40),
    width=st.integers(2, 10),
    normalisation=st.sampled_from(NORMALISATIONS),
)
def test_entropy_does_not_see_rotation_and_scale(
    seed: int, scale: float, rows: int, width: int, normalisation: Normalisation
) -> None:
    draw = np.random.default_rng(seed)
    states = draw.normal(size=(2, rows, width)) * np.linspace(1.0, 3.0, width)
    turned = np.stack([scale * tap @ rotation(width, seed + k) for k, tap in enumerate(states)])
    for taps in ([0], [1]):
        before, after = (joint_entropy(s[taps], normalisation) for s in (states, turned))
        assert after == pytest.approx(before, abs=1e-6)
        assert 0.0 <= before <= np.log(min(rows, width)) + 1e-9
    # every tap may be turned by itself; taps of different size weigh differently, unless their rows have unit norm
    before, after = (joint_entropy(s, normalisation) for s in (states, turned))
    assert after == pytest.approx(before, abs=1e-6)


@budget(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**20), rows=st.integers(3, 40), width=st.integers(2, 8), taps=st.integers(1, 4))
def test_feature_side_equals_sample_side(seed: int, rows: int, width: int, taps: int) -> None:
    states = np.random.default_rng(seed).normal(size=(taps, rows, width))
    for normalisation in ("unit", "centered", "raw"):
        kind: Normalisation = normalisation
        feature, sample = (joint_entropy(states, kind, side=side) for side in ("feature", "sample"))
        assert feature == pytest.approx(sample, abs=1e-8)
        assert SetEntropy(centred(states, kind))(tuple(range(taps))) == pytest.approx(feature, abs=1e-8)
        single = SetEntropy(centred(states, kind).astype(np.float32))
        assert single(tuple(range(taps))) == pytest.approx(feature, abs=1e-4)


def test_gram_matrix_of_a_concatenation_is_the_sum() -> None:
    # two taps that vary over disjoint rows' directions: the joint spectrum is both spectra together
    first, second = planted([1.0, 1.0], seed=1), planted([1.0, 1.0], seed=2)
    second -= first @ np.linalg.lstsq(first, second, rcond=None)[0]  # no shared sample direction
    u, _, v = np.linalg.svd(second, full_matrices=False)
    second = u[:, :2] @ v[:2]
    assert joint_entropy(np.stack([first, second]), "centered") == pytest.approx(np.log(4), abs=1e-9)
    assert joint_entropy(np.stack([first, first]), "centered") == pytest.approx(np.log(2), abs=1e-9)


@pytest.mark.parametrize("normalisation", ["unit", "centered", "raw"])
def test_streamed_covariance_equals_the_whole(normalisation: Normalisation) -> None:
    states = np.random.default_rng(5).normal(size=(3, 1500, 6)).astype(np.float32) * np.arange(1, 7, dtype=np.float32)
    whole, streamed = (CovarianceAccumulator(names(3), 6, normalisation) for _ in range(2))
    whole.add(states)
    for start in range(0, 1500, 37):
        streamed.add(states[:, start : start + 37])
    np.testing.assert_allclose(streamed.entropies(), whole.entropies(), atol=1e-10)
    batch = [joint_entropy(states[[tap]], normalisation) for tap in range(3)]
    np.testing.assert_allclose(streamed.entropies(), batch, atol=1e-8)
    assert streamed.count == 1500


def test_massive_activation_moves_raw_entropies_but_not_unit_ones() -> None:
    states = np.random.default_rng(6).normal(size=(3, 400, 16))
    states[1, :, 8:] *= 0.05  # tap 1 is poorer than tap 2
    spiked = states.copy()
    spiked[2, 7, 3] = 24_900.0

    def entropies(values: Floats, normalisation: Normalisation) -> Floats:
        accumulator = CovarianceAccumulator(names(3), 16, normalisation)
        accumulator.add(values)
        return accumulator.entropies()

    assert np.abs(entropies(spiked, "unit") - entropies(states, "unit")).max() < 0.02
    assert np.argmax(entropies(spiked, "unit")[1:]) == 1
    for normalisation in ("centered", "raw"):
        assert np.argmax(entropies(states, normalisation)[1:]) == 1
        assert np.argmax(entropies(spiked, normalisation)[1:]) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_states_name_their_tap(value: float) -> None:
    accumulator = CovarianceAccumulator(names(3), 4)
    states = np.ones((3, 5, 4))
    states[2, 3, 1] = value
    with pytest.raises(SelectionError, match=r"tap 2 has NaN or infinite"):
        accumulator.add(states)


@pytest.mark.parametrize("constant", [0.0, 2.5])
@pytest.mark.parametrize("normalisation", ["unit", "centered", "raw"])
def test_constant_states_name_their_tap(constant: float, normalisation: Normalisation) -> None:
    states = np.random.default_rng(7).normal(size=(3, 50, 4))
    states[1] = constant
    accumulator = CovarianceAccumulator(names(3), 4, normalisation)
    accumulator.add(states)
    with pytest.raises(SelectionError, match=r"tap 1 is constant over the 50 kept positions"):
        accumulator.entropies()


def test_too_few_rows_are_refused() -> None:
    accumulator = CovarianceAccumulator(names(1), 4)
    accumulator.add(np.ones((1, 1, 4)))
    with pytest.raises(SelectionError, match="at least two kept positions, there is 1"):
        accumulator.entropies()
    with pytest.raises(SelectionError, match="at least two positions, there is 1"):
        joint_entropy(np.ones((1, 1, 4)))
    with pytest.raises(ConfigError, match="normalisation is 'l2'"):
        joint_entropy(np.ones((1, 3, 4)), "l2")  # type: ignore[arg-type]


def test_keep_positions() -> None:
    entropy = np.array([9.0, 9.0, 0.1, 3.0, 2.0, 3.0, 0.5, 4.0])
    assert keep_positions(entropy, keep=1.0, skip=0).tolist() == list(range(8))
    assert keep_positions(entropy, keep=1.0, skip=6).tolist() == [6, 7]
    assert keep_positions(entropy, keep=0.5, skip=2).tolist() == [3, 5, 7]  # 3 of the 6 left
    assert keep_positions(entropy, keep=0.34, skip=2).tolist() == [3, 7]  # a tie goes to the earlier
    assert keep_positions(entropy, keep=0.01, skip=2).tolist() == [7]
    assert keep_positions(entropy, keep=0.3, skip=8).tolist() == []
    assert keep_positions(entropy, keep=0.3, skip=99).tolist() == []


def test_reservoir_is_the_same_in_any_order_and_uniform() -> None:
    rows = {prompt: np.full((2, 10, 3), prompt) + np.arange(10)[:, None] / 10 for prompt in range(40)}

    def filled(order: list[int], seed: int = 0) -> Reservoir:
        reservoir = Reservoir(2, 3, size=50, seed=seed)
        for prompt in order:
            reservoir.add(prompt, np.arange(0, 20, 2), rows[prompt])
        return reservoir

    forward, backward = (filled(order).sample() for order in (list(range(40)), list(range(39, -1, -1))))
    np.testing.assert_array_equal(forward.states, backward.states)
    assert forward.where == backward.where == tuple(sorted(forward.where))
    assert forward.where != filled(list(range(40)), seed=1).sample().where
    for slot, (prompt, position) in enumerate(forward.where):
        np.testing.assert_allclose(forward.states[:, slot], prompt + position / 20, rtol=1e-6)
    counts = np.zeros(4)
    for seed in range(40):
        for prompt, _ in filled(list(range(40)), seed=seed).sample().where:
            counts[prompt // 10] += 1
    assert np.abs(counts / counts.sum() - 0.25).max() < 0.04
    assert len(filled([0, 1]).sample().where) == 20  # fewer than its size: all of them


def filled(size: int, prompts: range, seed: int = 0) -> Reservoir:
    """A reservoir that was offered some prompts of 3 to 9 kept rows."""
    reservoir = Reservoir(2, 3, size=size, seed=seed)
    for prompt in prompts:
        draw = np.random.default_rng([99, prompt])
        rows = 3 + prompt % 7
        reservoir.add(prompt, np.arange(0, 2 * rows, 2), draw.normal(size=(2, rows, 3)))
    return reservoir


def test_first_rows_by_order_are_the_smaller_reservoir() -> None:
    large = filled(60, range(40)).sample()
    assert sorted(large.order.tolist()) == list(range(60))
    for size in (1, 7, 30, 59):
        small = filled(size, range(40)).sample()
        first = np.sort(large.order[:size])
        np.testing.assert_array_equal(large.states[:, first], small.states)
        assert tuple(large.where[i] for i in first) == small.where


@pytest.mark.parametrize("size", [20, 500])
def test_reservoirs_of_two_processes_are_one(size: int) -> None:
    one = filled(size, range(40)).sample()
    parts = [filled(size, range(start, 40, 2)) for start in (0, 1)]
    merged = Reservoir(2, 3, size=size)
    merged.merge([part.state() for part in parts])
    found = merged.sample()
    np.testing.assert_array_equal(found.states, one.states)
    np.testing.assert_array_equal(found.order, one.order)
    assert found.where == one.where
    # and one that was saved half-way goes on as if it had not been
    resumed = Reservoir(2, 3, size=size)
    resumed.merge([filled(size, range(17)).state()])
    for prompt in range(17, 40):
        resumed.merge([filled(size, range(prompt, prompt + 1)).state()])
    assert resumed.sample().where == one.where


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_sums_over_two_halves_are_the_whole(normalisation: Normalisation) -> None:
    states = np.random.default_rng(12).normal(size=(3, 200, 6)) + 0.5
    whole, first, second, both = (CovarianceAccumulator(names(3), 6, normalisation) for _ in range(4))
    whole.add(states)
    first.add(states[:, :70])
    second.add(states[:, 70:])
    both.load({name: array + second.state()[name] for name, array in first.state().items()})
    assert both.count == 200
    np.testing.assert_allclose(both.entropies(), whole.entropies(), atol=1e-12)
    for tap in range(3):
        np.testing.assert_allclose(both.mean(tap), whole.mean(tap), atol=1e-12)
        rows = centred(states[tap], normalisation)
        np.testing.assert_allclose(whole.covariance(tap), rows.T @ rows / 200, atol=1e-12)
        np.testing.assert_allclose(normalise(states[tap], normalisation) - whole.mean(tap), rows, atol=1e-12)


def test_accumulator_goes_on_from_its_state() -> None:
    states = np.random.default_rng(13).normal(size=(2, 90, 5))
    straight, before, after = (CovarianceAccumulator(names(2), 5) for _ in range(3))
    straight.add(states[:, :40])
    straight.add(states[:, 40:])
    before.add(states[:, :40])
    after.load({name: array.copy() for name, array in before.state().items()})
    after.add(states[:, 40:])
    assert [a.tobytes() for a in after.state().values()] == [a.tobytes() for a in straight.state().values()]


def test_random_positions_are_as_many_seeded_and_even() -> None:
    found = random_positions(5, length=30, skip=4, seed=3)
    assert found.tolist() == random_positions(5, length=30, skip=4, seed=3).tolist() == sorted(set(found.tolist()))
    assert len(found) == 5 and found.min() >= 4 and found.max() < 30
    assert random_positions(9, length=7, skip=4, seed=0).tolist() == [4, 5, 6]
    assert random_positions(0, length=2, skip=4, seed=0).tolist() == []
    counts = np.zeros(30)
    for seed in range(600):
        counts[random_positions(5, length=30, skip=4, seed=seed)] += 1
    assert counts[:4].sum() == 0 and np.abs(counts[4:] / 600 - 5 / 26).max() < 0.07


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_centring_in_place_is_centring(normalisation: Normalisation) -> None:
    states = np.random.default_rng(14).normal(size=(2, 30, 4)).astype(np.float32) + 2.0
    expected = centred(states, normalisation)
    centre_in_place(states, normalisation)
    np.testing.assert_allclose(states, expected, atol=1e-6)


def test_set_entropy_measures_each_set_once_and_the_same_on_several_threads() -> None:
    rows = centred(np.random.default_rng(15).normal(size=(4, 50, 6)), "unit").astype(np.float32)
    sets = [(0,), (1, 2), (0, 1, 3), (1, 2)]
    ahead, by_one = SetEntropy(rows), SetEntropy(rows)
    with threads(2):
        ahead.prepare(sets)
    assert ahead.measured == 3
    assert [ahead(s) for s in sets] == [by_one(s) for s in sets]
    assert ahead.measured == 3
