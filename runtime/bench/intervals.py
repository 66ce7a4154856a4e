"""Spread of what was measured: percentiles, and percentile bootstrap over answers (Efron, Tibshirani, 1993). Pure."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# A figure of answers: float64 [..., answers, values of an answer] to [...].
Figure = Callable[[NDArray[np.float64]], NDArray[np.float64]]

_RESAMPLES = 2000
_LEVEL = 0.95
_SEED = 0  # of the resampling, so that a report of the same answers says the same


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the median over answers; None for fewer than two."""
    if len(values) < 2:
        return None
    drawn = np.asarray(values)[_draws(len(values))]  # [resamples, answers]
    return _bounds(np.median(drawn, axis=1))


def interval_of_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of sum(above) / sum(below) over answers; None for fewer than two, or where a sum may be 0."""
    if len(above) < 2:
        return None
    draws = _draws(len(above))
    sums = [np.asarray(values, np.float64)[draws].sum(axis=1) for values in (above, below)]
    return _bounds(sums[0] / sums[1]) if sums[1].min() > 0.0 else None


def interval_of_change(
    before: NDArray[np.float64], after: NDArray[np.float64], figure: Figure
) -> tuple[float, float] | None:
    """95 % interval of figure(after) / figure(before), the same answers drawn on both sides (paired).

    before, after: float64 [answers, values]. None for fewer than two answers, or where a draw has no figure.
    """
    if len(before) < 2:
        return None
    draws = _draws(len(before))
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = np.stack([figure(before[draws]), figure(after[draws])])  # [2, resamples]
    if not np.isfinite(figures).all() or figures[0].min() <= 0.0:
        return None
    return _bounds(figures[1] / figures[0])


def ratio_of_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A `Figure`: the sum of the first of two values over that of the second."""
    sums = values.sum(axis=-2)
    found: NDArray[np.float64] = sums[..., 0] / sums[..., 1]
    return found


def median_of_ratios(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A `Figure`: the median over answers of the first of two values over the second."""
    found: NDArray[np.float64] = np.median(values[..., 0] / values[..., 1], axis=-1)
    return found


def percentiles(values: Sequence[float], weights: Sequence[float], shares: Sequence[float]) -> list[float | None]:
    """The smallest values that at least so large a share of the weight does not exceed; None without any weight."""
    order = np.argsort(np.asarray(values, np.float64), kind="stable")
    mass = np.cumsum(np.asarray(weights, np.float64)[order])
    if not len(mass) or mass[-1] <= 0.0:
        return [None] * len(shares)
    places = np.searchsorted(mass, np.asarray(shares) * mass[-1] * (1.0 - 1e-12))
    return [float(np.asarray(values)[order[min(int(place), len(order) - 1)]]) for place in places]


def _draws(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(_SEED).integers(0, count, (_RESAMPLES, count))


def _bounds(values: NDArray[np.float64]) -> tuple[float, float]:
    tail = (1.0 - _LEVEL) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)
