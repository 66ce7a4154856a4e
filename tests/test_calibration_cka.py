"""CKA against its definition and as a property; boundaries of compartments against planted ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from numpy.typing import NDArray

from elsi_edge.calibration.cka import GAP, compartments, linear_cka
from elsi_edge.calibration.statistics import NORMALISATIONS, Normalisation, centred
from elsi_edge.errors import SelectionError

Floats = NDArray[np.float64]


def rotation(width: int, seed: int) -> Floats:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]


def unbiased_hsic(k: Floats, ell: Floats) -> float:
    """Song et al. 2012, equation 5, term by term as printed."""
    n = len(k)
    k, ell = k - np.diag(np.diag(k)), ell - np.diag(np.diag(ell))
    one = np.ones(n)
    terms = np.trace(k @ ell) + (one @ k @ one) * (one @ ell @ one) / ((n - 1) * (n - 2))
    return float((terms - 2.0 / (n - 2) * (one @ k @ ell @ one)) / (n * (n - 3)))


def test_cka_agrees_with_its_definition() -> None:
    states = np.random.default_rng(10).normal(size=(2, 150, 5)) * np.arange(1, 6)
    x, y = rows = centred(states, "centered")
    expected = np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert linear_cka(rows)[0, 1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("count", [4, 9, 64, 131])  # under, at and past the rows of a block
def test_debiased_cka_agrees_with_its_definition(count: int) -> None:
    draw = np.random.default_rng(count)
    states = draw.normal(size=(3, count, 4)) + 0.5
    states[1] += 2.0 * states[0]
    grams = [tap @ tap.T for tap in states]  # not centred: the estimator does not see the mean
    hsic = np.array([[unbiased_hsic(a, b) for b in grams] for a in grams])
    own = np.sqrt(np.clip(np.diag(hsic), 0.0, None))
    expected = np.clip(np.divide(hsic, np.outer(own, own), where=np.outer(own, own) > 0, out=np.zeros((3, 3))), 0, 1)
    np.fill_diagonal(expected, 1.0)
    np.testing.assert_allclose(linear_cka(centred(states, "centered"), debiased=True), expected, atol=1e-9)


@budget(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    scale=st.floats(1e-3, 1e3),
    rows=st.integers(5, 40),
    width=st.integers(2, 10),
    normalisation=st.sampled_from(NORMALISATIONS),
    debiased=st.booleans(),
)
def test_cka_does_not_see_rotation_and_scale(
    seed: int, scale: float, rows: int, width: int, normalisation: Normalisation, debiased: bool
) -> None:
    states = np.random.default_rng(seed).normal(size=(2, rows, width)) * np.linspace(1.0, 3.0, width)
    turned = states.copy()
    turned[1] = scale * states[1] @ rotation(width, seed + 1)
    before, after = (linear_cka(centred(s, normalisation), debiased=debiased) for s in (states, turned))
    np.testing.assert_allclose(after, before, atol=1e-6)
    assert np.isfinite(before).all() and before.min() >= 0.0 and before.max() <= 1.0
    np.testing.assert_allclose(before, before.T, atol=1e-12)
    np.testing.assert_array_equal(np.diag(before), 1.0)
    same = np.stack([states[0], scale * states[0] @ rotation(width, seed)])
    likeness = linear_cka(centred(same, "centered"))[0, 1]
    assert likeness == pytest.approx(1.0, abs=1e-6)


def test_debiased_cka_sees_no_likeness_between_independent_taps() -> None:
    # n far below the width: the biased estimator calls everything alike
    rows = centred(np.random.default_rng(8).normal(size=(4, 32, 576)), "unit").astype(np.float32)
    off = ~np.eye(4, dtype=bool)
    assert linear_cka(rows)[off].min() > 0.9
    debiased = linear_cka(rows, debiased=True)
    assert debiased[off].max() < 0.15
    assert np.isfinite(debiased).all() and debiased.min() >= 0.0


@pytest.mark.parametrize("debiased", [False, True])
def test_a_constant_tap_is_like_nothing_and_no_nan(debiased: bool) -> None:
    rows = centred(np.random.default_rng(1).normal(size=(3, 20, 6)), "unit")
    rows[1] = 0.0
    cka = linear_cka(rows, debiased=debiased)
    assert np.isfinite(cka).all()
    np.testing.assert_array_equal(cka[1], [0.0, 1.0, 0.0])


@pytest.mark.parametrize("debiased", [False, True])
def test_float32_states_of_massive_size_do_not_overflow(debiased: bool) -> None:
    rows = centred(np.random.default_rng(2).normal(size=(3, 90, 8)), "centered")
    rows[2] = rows[1] @ rotation(8, 0)
    expected = linear_cka(rows, debiased=debiased)
    huge = (rows * np.array([1e-9, 1.0, 1e9])[:, None, None]).astype(np.float32)
    np.testing.assert_allclose(linear_cka(huge, debiased=debiased), expected, atol=1e-5)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(SelectionError, match="at least 4 positions, there are 3"):
        linear_cka(np.ones((1, 3, 4)))


def test_cka_of_planted_compartments() -> None:
    draw = np.random.default_rng(9)
    low, high = draw.normal(size=(2, 400, 8))
    near = [
        low,
        low @ rotation(8, 1) + 0.1 * draw.normal(size=low.shape),
        high,
        high + 0.1 * draw.normal(size=low.shape),
    ]
    for debiased in (False, True):
        cka = linear_cka(centred(np.stack(near), "centered"), debiased=debiased)
        assert min(cka[0, 1], cka[2, 3]) > 0.95 and cka[:2, 2:].max() < 0.1
        assert compartments(cka) == ((0, 1), (2, 3))


def blocks(sizes: tuple[int, ...], *, across: float, noise: float = 0.0, seed: int = 0) -> Floats:
    """A CKA map whose taps are 0.95 alike within regions of these sizes and `across` alike between them."""
    region = np.repeat(np.arange(len(sizes)), sizes)
    cka: Floats = np.where(region[:, None] == region[None, :], 0.95, across)
    jitter = np.random.default_rng(seed).normal(scale=noise, size=cka.shape)
    cka = np.clip(cka + (jitter + jitter.T) / np.sqrt(2.0), 0.0, 1.0)
    np.fill_diagonal(cka, 1.0)
    return cka


def regions(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    ends = np.cumsum(sizes)
    return tuple((int(end - size), int(end - 1)) for size, end in zip(sizes, ends, strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("across", [0.1, 0.5, 0.75])
@pytest.mark.parametrize(
    "sizes", [(6, 18, 7), (1, 28, 2), (10, 10, 11), (31,), (2, 2), (1, 1), (1, 1, 1, 28), (3, 1, 5, 1, 3, 20, 4), (1,)]
)
def test_planted_boundaries_are_found_exactly(sizes: tuple[int, ...], across: float, seed: int) -> None:
    assert compartments(blocks(sizes, across=across, noise=0.02, seed=seed)) == regions(sizes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", [0.91, 0.95, 1.0])
def test_one_broad_region_is_one_compartment(seed: int, level: float) -> None:
    cka = np.where(np.eye(31, dtype=bool), 1.0, level)
    jitter = np.random.default_rng(seed).normal(scale=0.02, size=cka.shape)
    cka = np.clip(cka + np.triu(jitter, 1) + np.triu(jitter, 1).T, 0.0, 1.0)
    assert compartments(cka) == ((0, 30),)


def drift(taps: int, far: float) -> Floats:
    """Likeness that falls evenly with distance, to `far` between the first and the last tap."""
    apart: Floats = np.abs(np.subtract.outer(np.arange(taps), np.arange(taps))) / (taps - 1)
    found: Floats = 1.0 - (1.0 - far) * apart
    return found


def test_slow_drift_is_no_boundary_and_does_not_move_one() -> None:
    assert compartments(drift(31, 0.9)) == ((0, 30),)
    cka = np.where(blocks((9, 22), across=0.3) < 0.5, 0.3, drift(31, 0.85))
    assert compartments(cka) == ((0, 8), (9, 30))


def test_taps_that_are_all_unlike_are_compartments_of_one() -> None:
    assert compartments(np.where(np.eye(6, dtype=bool), 1.0, 0.6)) == tuple((tap, tap) for tap in range(6))


@budget(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**20), taps=st.integers(2, 12), gaps=st.tuples(st.floats(0.01, 0.5), st.floats(0.01, 0.5)))
def test_compartments_tile_the_taps_and_fall_with_the_gap(seed: int, taps: int, gaps: tuple[float, float]) -> None:
    draw = np.random.default_rng(seed)
    states = np.cumsum(draw.normal(size=(taps, 40, 4)) * draw.choice([0.1, 2.0], size=(taps, 1, 1)), axis=0)
    cka = linear_cka(centred(states, "centered"))
    fine, coarse = (compartments(cka, gap=gap) for gap in sorted(gaps))
    assert len(coarse) <= len(fine)
    for found in (fine, coarse):
        assert [tap for a, b in found for tap in range(a, b + 1)] == list(range(taps))


@pytest.mark.parametrize(("gap", "count"), [(0.05, 2), (0.3, 2), (0.44, 2), (0.46, 1), (1.0, 1)])
def test_the_gap_is_what_separates(gap: float, count: int) -> None:
    assert len(compartments(blocks((5, 5), across=0.5), gap=gap)) == count
    assert 0.05 < GAP < 0.3
