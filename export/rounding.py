"""Weights to symmetric blocks of 4 or 8 bits with one scale each: three ways to choose scales and roundings.

All yield the same format, which the same kernels run at the same speed; they differ in what the rounding costs. Blocks
with an offset each are made in `elsi_edge.export.offsets`, by the first and the last of these ways.

- nearest: ONNX Runtime's own quantiser: the weight of the largest magnitude lands on the lowest level, the others on
  the nearest one;
- least-squares: of several scales of both signs (the levels -8..7 are not symmetric, so the sign matters), each
  refitted by least squares, the one with the smallest squared error;
- compensated: least-squares scales, and the error of each rounded weight is made up for by the weights not rounded
  yet, as far as the layer's inputs correlate (GPTQ, arXiv 2210.17323, equations 2 and 3).
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import BLOCK

Rounding = Literal["nearest", "least-squares", "compensated"]
Floats = NDArray[np.float32]
Levels = NDArray[np.int16]
# Of one block [n, 32] of weights and the importance [32] of its inputs: scales [n] and offsets [n].
Fit = Callable[[Floats, Floats, int], tuple[Floats, Floats]]  # with the block's place in its row

# Of MatMulNBits: activations in 8 bits; with symmetric blocks of 32, a row's bits do not depend on its company.
ACCURACY_LEVEL = 4
ROWS = 2048  # output rows at a time: bounds the temporaries
_DIVISORS = (8.0, 7.6, 7.2, 6.8, 8.5, 9.2)  # candidates: the largest magnitude over the scale, at 4 bits
_DAMPING = 0.01  # of the Hessian's mean diagonal, added to it (GPTQ's 1 %)


def quantise(
    weight: Floats, bits: int, rounding: Rounding, hessian: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.uint8], Floats]:
    """A matrix [N, K] as packed levels [N, ceil(K / 32), 4 * bits] uint8 and scales [N, ceil(K / 32)].

    The layout is MatMulNBits': levels offset by half their number, at 4 bits the even weights in the low halves.
    `hessian` [K, K] is the mean outer product of the layer's inputs, which "compensated" needs.
    """
    if rounding == "nearest":
        return _nearest(weight, bits)
    rows, width = weight.shape
    blocks = -(-width // BLOCK)
    packed = np.empty((rows, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    root = None if rounding != "compensated" else inverse_root(hessian, width)

    def fit(block: Floats, importance: Floats, _: int) -> tuple[Floats, Floats]:
        scale = least_squares(block, bits, importance)[1]
        return scale, np.zeros_like(scale)

    for start in range(0, rows, ROWS):
        part = np.zeros((min(ROWS, rows - start), blocks * BLOCK), np.float32)  # shape: [n, K padded]
        part[:, :width] = weight[start : start + ROWS]
        if root is not None:
            levels, scale, _ = compensated(part, bits, root, fit)
        else:
            grouped = part.reshape(len(part), blocks, BLOCK)
            levels, scale = least_squares(grouped, bits)
        packed[start : start + ROWS] = pack(levels, bits)
        scales[start : start + ROWS] = scale
    return packed, scales


def least_squares(blocks: Floats, bits: int, importance: Floats | None = None) -> tuple[Levels, Floats]:
    """Levels and scales of the least squared error, each weight's error times its `importance` [..., 32]."""
    lowest = -(1 << (bits - 1))
    extreme = _extreme(blocks)
    best = np.full(extreme.shape, np.inf, np.float32)
    levels, scales = np.zeros(blocks.shape, np.int16), np.zeros_like(extreme)
    for divisor in [sign * d * (-lowest / 8.0) for sign in (-1.0, 1.0) for d in _DIVISORS]:
        tried = np.clip(np.rint(blocks * reciprocal(extreme / np.float32(divisor))), lowest, -lowest - 1)
        weighted = tried if importance is None else tried * importance
        along = (weighted * blocks).sum(-1, keepdims=True)
        length = (weighted * tried).sum(-1, keepdims=True)
        inverse = reciprocal(length)
        error = -along * along * inverse  # of the refitted scale, less the block's own sum of squares
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(scales, along * inverse, where=better)
        np.copyto(levels, tried.astype(np.int16), where=better)
    return levels, scales[..., 0]


def _nearest(weight: Floats, bits: int) -> tuple[NDArray[np.uint8], Floats]:
    """ONNX Runtime's own quantiser."""
    from onnxruntime.quantization import matmul_nbits_quantizer as stock

    config = stock.DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=True, bits=bits)
    packed, scales, _ = stock.DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.T))
    return packed, scales


def compensated(weight: Floats, bits: int, root: tuple[Floats, Floats], fit: Fit) -> tuple[Levels, Floats, Floats]:
    """GPTQ over one group of output rows [n, K]: levels [n, K / 32, 32], scales and offsets [n, K / 32].

    `root` is what `inverse_root` found. Scale and offset of a block are fitted when its turn comes, to weights that
    make up for the blocks before it already. `weight` is written over.
    """
    correction, importance = root
    rows, width = weight.shape
    levels = np.empty((rows, width // BLOCK, BLOCK), np.int16)
    scales, offsets = (np.empty((rows, width // BLOCK), np.float32) for _ in range(2))
    lowest = -(1 << (bits - 1))
    for index, start in enumerate(range(0, width, BLOCK)):
        end = start + BLOCK
        block, own = weight[:, start:end], correction[start:end, start:end]
        scale, offset = fit(block, importance[start:end], index)
        inverse = reciprocal(scale)
        errors = np.empty_like(block)
        for column in range(BLOCK):
            level = np.clip(np.rint((block[:, column] - offset) * inverse), lowest, -lowest - 1)
            levels[:, index, column] = level
            errors[:, column] = (block[:, column] - (level * scale + offset)) / own[column, column]
            block[:, column + 1 :] -= errors[:, column : column + 1] * own[column, column + 1 :]
        weight[:, end:] -= errors @ correction[start:end, end:]
        scales[:, index], offsets[:, index] = scale, offset
    return levels, scales, offsets


def inverse_root(hessian: NDArray[np.float64] | None, width: int) -> tuple[Floats, Floats]:
    """U [K, K] of inverse(H) = transpose(U) U, upper triangular, damped, and H's diagonal [K]; both padded to whole
    blocks.

    Inputs that were never seen stay by themselves, and so do the zero weights beyond the last input.
    """
    if hessian is None or hessian.shape != (width, width):
        raise ValueError(f"compensated rounding of {width} inputs needs a Hessian [{width}, {width}]")
    damped = np.array(hessian, np.float64)
    unseen = np.diag(damped) <= 0
    damped[unseen, unseen] = 1.0
    diagonal = np.diag(damped).copy()
    damped[np.diag_indices(width)] += _DAMPING * float(diagonal.mean())
    whole = -(-width // BLOCK) * BLOCK
    root, importance = np.eye(whole, dtype=np.float32), np.ones(whole, np.float32)
    root[:width, :width] = np.linalg.cholesky(np.linalg.inv(damped)).T
    importance[:width] = diagonal
    return root, importance


def _extreme(blocks: Floats) -> Floats:
    """The value of the largest magnitude of each block [..., 1], the negative one of two."""
    largest, smallest = blocks.max(-1, keepdims=True), blocks.min(-1, keepdims=True)
    result: Floats = np.where(largest > -smallest, largest, smallest)
    return result


def reciprocal(values: Floats) -> Floats:
    """1 / x, and 0 of 0."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)


def pack(levels: Levels, bits: int) -> NDArray[np.uint8]:
    """Signed levels [..., 32] in MatMulNBits' bytes [..., 4 * bits]."""
    unsigned = np.add(levels, 1 << (bits - 1)).astype(np.uint8)
    if bits == 8:
        return unsigned
    low, high = unsigned[..., ::2], np.left_shift(unsigned[..., 1::2], 4, dtype=np.uint8)
    return np.bitwise_or(low, high)
