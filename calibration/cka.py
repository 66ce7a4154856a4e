"""Likeness of taps (linear CKA) and the compartments that it shows. Pure numpy, no I/O."""

import itertools

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration.parallel import spread
from elsi_edge.calibration.statistics import FloatArray
from elsi_edge.errors import SelectionError

GAP = 0.10
"""CKA by which taps of a compartment must be more like each other than like those of the compartment beside it.

Adjacent taps of a deep stack are alike almost by construction (a block adds little to the residual stream); 0.10 is
several times what CKA on 2,048 positions moves when half of them are taken, and well under the drops of 0.3 and more
that SmolLM2 shows at its ends.
"""

_GRAM_ROWS = 64  # rows of all Gram matrices alive at a time in linear_cka
LEAST_ROWS = 4  # positions


def linear_cka(rows: NDArray[np.floating], *, debiased: bool = False) -> FloatArray:
    """Linear CKA between all taps of centred rows [taps, n, E], as [taps, taps] in 0..1 with ones on the diagonal.

    HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) on centred linear kernels (Kornblith et al. 2019). `debiased` uses the
    unbiased HSIC estimator (Song et al. 2012), which does not see likeness between independent taps when n is small;
    it can fall below zero, where it is set to zero. Gram matrices are made a few rows at a time, in the precision of
    `rows`; memory beside them is 2 * taps * 64 * n for each thread. Raises SelectionError for fewer than four rows.
    """
    taps, count, _ = rows.shape
    if count < LEAST_ROWS:
        raise SelectionError(f"CKA needs at least {LEAST_ROWS} positions, there are {count}; give more prompts")
    inner = np.zeros((taps, taps))  # sums of products of Gram entries
    row_sums = np.zeros((taps, count))
    square = np.array([np.mean(np.square(tap), dtype=np.float64) for tap in rows]) * rows.shape[2]
    unit = 1.0 / np.where(square > 0.0, square, 1.0)  # keeps float32 sums of squares in range

    def part(start: int) -> NDArray[np.floating]:
        left = rows[:, start : start + _GRAM_ROWS] * unit[:, None, None].astype(rows.dtype)
        block = np.matmul(left, rows.transpose(0, 2, 1))  # shape: [taps, rows, n]
        if debiased:
            local = np.arange(block.shape[1])
            block[:, local, start + local] = 0.0
            row_sums[:, start : start + block.shape[1]] = block.sum(axis=2, dtype=np.float64)
        flat = block.reshape(taps, -1)
        product: NDArray[np.floating] = flat @ flat.T
        return product

    for product in spread(part, range(0, count, _GRAM_ROWS)):
        inner += product
    if debiased:
        totals = row_sums.sum(axis=1)
        inner += np.outer(totals, totals) / ((count - 1) * (count - 2)) - 2.0 / (count - 2) * row_sums @ row_sums.T
    return _cosine(np.clip(inner, 0.0, None))


def _cosine(hsic: FloatArray) -> FloatArray:
    own = np.sqrt(np.diag(hsic))
    scale = np.outer(own, own)
    cka = np.divide(hsic, scale, out=np.zeros_like(hsic), where=scale > 0.0)
    np.fill_diagonal(cka, 1.0)
    bounded: FloatArray = np.clip(cka, 0.0, 1.0)
    return bounded


def compartments(cka: NDArray[np.floating], *, gap: float = GAP) -> tuple[tuple[int, int], ...]:
    """Regions of like taps, as (first, last) taps in order, from a CKA map [taps, taps].

    For every number of regions the split with the least scatter sum over regions of (size - sum of CKA / size) is
    found exactly, by dynamic programming: CKA is a kernel between taps, so this is kernel change-point detection
    (Harchaoui and Cappé 2007). Taken is the finest split in which every two neighbours are more alike within than
    across, by at least `gap` of mean CKA (a tap's likeness to itself left out).
    """
    taps = len(cka)
    sums = np.zeros((taps + 1, taps + 1))  # shape: [taps + 1, taps + 1], sums over all upper left corners
    sums[1:, 1:] = np.cumsum(np.cumsum(cka, axis=0), axis=1)
    best = [(0, taps - 1)]
    for ends in _best_splits(sums, taps):
        regions = [(a, b - 1) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        pairs = itertools.pairwise(regions)
        if all(_gap(sums, left, right) >= gap for left, right in pairs):
            best = regions
    return tuple(best)


def _best_splits(sums: FloatArray, taps: int) -> list[list[int]]:
    """For 1..taps regions the ends (exclusive) of the split with the least scatter. sums is as in `compartments`."""
    start, end = np.arange(taps)[:, None], np.arange(1, taps + 1)[None, :]
    inside = sums[end, end] - sums[start, end] - sums[end, start] + sums[start, start]
    cost = np.where(end > start, (end - start) - inside / np.maximum(end - start, 1), np.inf)  # of start..end-1
    least = cost[0].copy()  # by end - 1
    came: list[NDArray[np.intp]] = []
    splits = [[taps]]
    for _ in range(2, taps + 1):
        ahead = np.full((taps, taps), np.inf)  # by start of the last region, end - 1
        ahead[1:] = least[:-1, None] + cost[1:]
        came.append(np.argmin(ahead, axis=0))
        least = np.min(ahead, axis=0)
        ends = [taps]
        for step in came[::-1]:
            ends.append(int(step[ends[-1] - 1]))
        splits.append(ends[::-1])
    return splits


def _gap(sums: FloatArray, left: tuple[int, int], right: tuple[int, int]) -> float:
    """How much more alike two neighbouring regions are within than across, in mean CKA, by the less alike of them."""

    def total(rows: tuple[int, int], columns: tuple[int, int]) -> float:
        a, b, c, d = rows[0], rows[1] + 1, columns[0], columns[1] + 1
        return float(sums[b, d] - sums[a, d] - sums[b, c] + sums[a, c])

    def within(region: tuple[int, int]) -> float:
        size = region[1] - region[0] + 1
        return (total(region, region) - size) / (size * (size - 1)) if size > 1 else 1.0

    across = total(left, right) / ((left[1] - left[0] + 1) * (right[1] - right[0] + 1))
    return min(within(left), within(right)) - across
