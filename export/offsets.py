"""Weights to 4-bit blocks with a scale and an offset each: w = scale * (level - 8) + offset.

A symmetric grid cannot hold what a Q4_1 file holds, nor blocks whose weights lie on one side of zero. MatMulNBits' own
zero points are whole levels, too coarse for that, and cost rows their independence. Here the offsets of a matrix
[N, K] are a small matrix of their own, [N, K / 32], which the sums of the blocks of the input go through:

    y = MatMulNBits(x, levels, scales) + MatMulNBits(sums of x over each block, offsets in 8 bits)

Both products are symmetric, so that rows stay independent on the stock kernels; the native operators do both in one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import BLOCK
from elsi_edge.export.rounding import ROWS, Floats, Levels, compensated, inverse_root, pack, quantise, reciprocal

BITS = 4
OFFSET_BITS = 8
_HIGHEST = np.float32(15)  # level, of 16
_MIDDLE = np.float32(1 << (BITS - 1))
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a block's range that the levels may span
_HALF_MOST = np.float32(np.finfo(np.float16).max)


@dataclass(frozen=True, kw_only=True)
class OffsetBlocks:
    """A matrix [N, K] as two products take it, see above; the layouts are MatMulNBits'."""

    levels: NDArray[np.uint8]  # [N, K / 32, 16]
    scales: Floats  # [N, K / 32], each a float16
    offsets: NDArray[np.uint8]  # [N, ceil(K / 1024), 32]
    offset_scales: Floats  # [N, ceil(K / 1024)]


def fits(weight: Floats) -> bool:
    """Whether a matrix [N, K] is whole blocks of finite weights, as small as float16 scales want them."""
    return weight.shape[1] % BLOCK == 0 and bool(np.abs(weight).max(initial=0.0) < _HALF_MOST)


def quantise_with_offsets(weight: Floats, hessian: NDArray[np.float64] | None = None) -> OffsetBlocks:
    """Nearest levels between the smallest and the largest weight of each block; a Q4_1 matrix keeps its levels. With
    `hessian` [K, K] levels make up for each other instead (GPTQ, see `elsi_edge.export.rounding`), and ranges are those
    of the least error that matters.

    Scales are float16 numbers, as in GGUF files: the native operators hold them in as many bits. Levels are chosen
    after scales and offsets have been rounded.
    """
    rows, width = weight.shape
    blocks = weight.reshape(rows, width // BLOCK, BLOCK)
    low, high = blocks.min(-1), blocks.max(-1)
    scales = _half((high - low) / _HIGHEST)
    packed, offset_scales = quantise(np.ascontiguousarray(low + _MIDDLE * scales), OFFSET_BITS, "nearest")
    if hessian is not None:
        return _compensated(weight, offset_scales, hessian)
    offsets = decode_offsets(packed, offset_scales, width // BLOCK)
    levels = np.rint((blocks - offsets[..., None]) * reciprocal(scales)[..., None])
    levels = np.clip(levels, -_MIDDLE, _MIDDLE - 1).astype(np.int16)
    return OffsetBlocks(levels=pack(levels, BITS), scales=scales, offsets=packed, offset_scales=offset_scales)


def _compensated(weight: Floats, offset_scales: Floats, hessian: NDArray[np.float64]) -> OffsetBlocks:
    """The same by GPTQ; `offset_scales` [N, ceil(K / 1024)] are those of the offsets before anything was rounded."""
    rows, width = weight.shape
    root = inverse_root(hessian, width)
    found: list[tuple[Levels, Floats, Floats]] = []
    for start in range(0, rows, ROWS):
        steps = offset_scales[start : start + ROWS]

        def fit(block: Floats, importance: Floats, index: int, steps: Floats = steps) -> tuple[Floats, Floats]:
            return _range(block, importance, steps[:, index // BLOCK])

        found.append(compensated(weight[start : start + ROWS].copy(), BITS, root, fit))
    levels, scales, offsets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    whole = np.zeros((rows, offset_scales.shape[1] * BLOCK), np.float32)
    whole[:, : width // BLOCK] = offsets
    steps = reciprocal(offset_scales)[..., None]
    places = np.rint(whole.reshape(rows, -1, BLOCK) * steps).astype(np.int16)
    return OffsetBlocks(
        levels=pack(levels, BITS), scales=scales, offsets=pack(places, OFFSET_BITS), offset_scales=offset_scales
    )


def _range(block: Floats, importance: Floats, step: Floats) -> tuple[Floats, Floats]:
    """Scales [n] and offsets [n], multiples of `step` [n], of the least weighted error of a block [n, 32]."""
    low, high = block.min(-1), block.max(-1)
    middle, half = (low + high) / 2, (high - low) / 2
    best = np.full(len(block), np.inf, np.float32)
    scales, offsets = np.zeros_like(best), np.zeros_like(best)
    furthest = np.float32(1 << (OFFSET_BITS - 1))
    for share in _SHARES:
        scale = _half(2 * half * share / _HIGHEST)
        place = np.rint((middle - half * share + _MIDDLE * scale) * reciprocal(step))
        offset = np.clip(place, -furthest, furthest - 1) * step
        levels = np.rint((block - offset[:, None]) * reciprocal(scale)[:, None])
        levels = np.clip(levels, -_MIDDLE, _MIDDLE - 1)
        error = (np.square(levels * scale[:, None] + offset[:, None] - block) * importance).sum(-1)
        better = error < best
        for kept, tried in ((best, error), (scales, scale), (offsets, offset)):
            np.copyto(kept, tried, where=better)
    return scales, offsets


def _half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def decode_offsets(packed: NDArray[np.uint8], scales: Floats, blocks: int) -> Floats:
    """Offsets [N, K / 32] as both products compute with them."""
    values = packed.astype(np.float32) - np.float32(1 << (OFFSET_BITS - 1))
    decoded: Floats = (values * scales[..., None]).reshape(len(packed), -1)[:, :blocks]
    return decoded
