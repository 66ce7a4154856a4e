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
from elsi_edge.export.rounding import Floats, pack, quantise

BITS = 4
OFFSET_BITS = 8
_HIGHEST = 15  # level, of 16
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


def quantise_with_offsets(weight: Floats) -> OffsetBlocks:
    """Nearest levels between the smallest and the largest weight of each block; a Q4_1 matrix keeps its levels.

    Scales are float16 numbers, as in GGUF files: the native operators hold them in as many bits. Levels are chosen
    after scales and offsets have been rounded.
    """
    rows, width = weight.shape
    blocks = weight.reshape(rows, width // BLOCK, BLOCK)
    low, high = blocks.min(-1), blocks.max(-1)
    scales = ((high - low) / np.float32(_HIGHEST)).astype(np.float16).astype(np.float32)
    middle = np.float32(1 << (BITS - 1))
    packed, offset_scales = quantise(np.ascontiguousarray(low + middle * scales), OFFSET_BITS, "nearest")
    offsets = decode_offsets(packed, offset_scales, width // BLOCK)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    levels = np.rint((blocks - offsets[..., None]) * inverse[..., None])
    levels = np.clip(levels, -middle, middle - 1).astype(np.int16)
    return OffsetBlocks(levels=pack(levels, BITS), scales=scales, offsets=packed, offset_scales=offset_scales)


def decode_offsets(packed: NDArray[np.uint8], scales: Floats, blocks: int) -> Floats:
    """Offsets [N, K / 32] as both products compute with them."""
    values = packed.astype(np.float32) - np.float32(1 << (OFFSET_BITS - 1))
    decoded: Floats = (values * scales[..., None]).reshape(len(packed), -1)[:, :blocks]
    return decoded
