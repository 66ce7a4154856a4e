"""Quantisation-aware training: the loss is that of the weights as a bundle will hold them.

Matrices are rounded before a step's forward pass, as `elsi_edge.export` rounds a draft's, and put back before the
optimiser moves them. So the gradient is taken at the rounded weights and applied to the exact ones: the rounding passes
it on as if it were not there (straight-through estimator, Bengio et al., arXiv 1308.3432).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsi_edge.artifacts import BITS, BLOCK, Precision


@contextmanager
def rounded(network: nn.Module, precision: Precision) -> Iterator[None]:
    """The network's matrices rounded to `precision` inside the context, as they were after it; "fp32" changes none."""
    matrices = [weight for weight in network.parameters() if weight.ndim == 2 and precision != "fp32"]
    exact = [weight.data for weight in matrices]
    try:
        for weight in matrices:
            weight.data = round_blocks(weight.data, BITS[precision])
        yield
    finally:
        for weight, values in zip(matrices, exact, strict=True):
            weight.data = values


def round_blocks(weight: Tensor, bits: int) -> Tensor:
    """A matrix [N, K] on the grid of MatMulNBits' symmetric blocks: in each the weight of the largest magnitude lies on
    the lowest level, the others on the nearest one (what "nearest" is in `elsi_edge.export.rounding`)."""
    rows, width = weight.shape
    blocks = functional.pad(weight, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    lowest = -(1 << (bits - 1))
    least, most = torch.aminmax(blocks, dim=-1, keepdim=True)
    scale = torch.where(most > -least, most, least) / lowest
    inverse = torch.where(scale != 0, scale.reciprocal(), 0.0)
    levels = torch.mul(blocks, inverse).round_().clamp_(lowest, -lowest - 1)
    return levels.mul_(scale).view(rows, -1)[:, :width]
