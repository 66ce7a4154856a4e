"""Whether a model fits a device, how fast it will be and what limits it: from numbers alone. Pure, no I/O.

A call of n rows after S cached tokens takes

    sum over matrices: weights * curve(n)  +  operators * overhead  +  attended bytes * attention(n)

with the curves of `elsi_edge.runtime.device`: measured on matrices larger than the last cache, or, for a projection,
the roofline (Williams, Waterman, Patterson 2009). Attended bytes are the cached keys and values times the query heads
that share a key head. A round of drafting is one verification, the draft's first call and one call for each further
level; it brings tau tokens, so it breaks even with plain decoding at tau = milliseconds of a round / of a plain step.
The loop's own time between calls (0.2 ms a round on two server cores) is not counted, nor that a model smaller than
the last cache need not be read from memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elsi_edge.artifacts import BYTES_PER_WEIGHT, ModelShape, Precision
from elsi_edge.runtime.device import Device, Kernels
from elsi_edge.runtime.plan_sizes import DraftSizes, Matrix, block_matrices, head_matrix
from elsi_edge.runtime.plan_tau import Drafting, Tau

Bound = Literal["memory", "compute", "attention", "operators"]

MOST_ROWS = 64
_FREE = 1.10  # times one row: what a further row may cost and be called free
_MEMORY_BOUND = 0.75  # share of a product's time that reading its weights explains
# Small operators of a block beside the gated product's parts: products, attention, norms, and elementwise ones.
_NODES = {"stock": 11, "native": 5}
_WHOLE_BLOCKS = ("llama", "mistral")  # families whose native blocks are one operator
# Of the stock graph's blocks at int4: a second product and a sum for each of 5, and sums of blocks of 4 inputs.
_OFFSET_NODES = 18
_QK_NORM_NODES = 7  # of a family that norms queries and keys
_OUTER_NODES = 4  # lookup, last norm, choice of rows, lm_head
_DRAFT_NODES = 16  # of a draft's call


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the target, milliseconds by part."""

    rows: int
    matrices_ms: float
    attention_ms: float
    operators_ms: float
    read_bytes: int  # weights and cached keys and values
    operations: int  # 2 per multiply-add
    bound: Bound  # by what takes longest; of matrices, whether reading or computing

    @property
    def ms(self) -> float:
        """Of the whole call."""
        return self.matrices_ms + self.attention_ms + self.operators_ms


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens a second at one tau."""

    tau: float
    tokens_per_s: float
    speedup: float  # over plain decoding


@dataclass(frozen=True, kw_only=True)
class Round:
    """What drafting in one shape costs and brings."""

    drafting: Drafting
    verify_ms: float
    draft_ms: float
    break_even_tau: float  # above it drafting pays
    speeds: tuple[Speed | None, ...]  # by given tau; None where the shape cannot bring so many

    @property
    def ms(self) -> float:
        """Of a round."""
        return self.verify_ms + self.draft_ms

    @property
    def can_pay(self) -> bool:
        """Whether all of its candidates accepted would beat plain decoding."""
        return self.break_even_tau < self.drafting.most


class CostModel:
    """A model on a device at one precision."""

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        precision: Precision,
        kernels: Kernels,
        draft: DraftSizes | None = None,
        draft_precision: Precision | None = None,
    ) -> None:
        self._shape, self._device, self._precision = shape, device, precision
        self.kernels: Kernels = kernels
        self._draft, self._draft_precision = draft, draft_precision or precision
        # The draft's own products run on the kernels of its precision: int8 beside a float32 target.
        self._draft_kernels: Kernels = device.best_kernels(self._draft_precision)
        self._matrices = (*block_matrices(shape), head_matrix(shape))

    @property
    def nodes(self) -> int:
        """Operators of the target's graph, as overhead counts them."""
        if self.kernels == "native" and self._shape.family in _WHOLE_BLOCKS:
            return self._shape.blocks + _OUTER_NODES
        extra = _QK_NORM_NODES if self._shape.family == "qwen3" else 0
        if self._precision == "int4" and self.kernels == "stock":
            extra += _OFFSET_NODES
        return self._shape.blocks * (_NODES[self.kernels] + extra) + _OUTER_NODES

    def attended_bytes(self, past: int) -> int:
        """Keys and values that the query heads of one row read after `past` tokens, over all blocks."""
        return past * self._shape.kv_bytes_per_token() * self._group

    def call(self, rows: int, past: int) -> Call:
        """One call of `rows` rows after `past` tokens, logits of all of them."""
        shape, device = self._shape, self._device
        matrices = self._products_ms(self._matrices, rows, self._precision, self.kernels)
        attention = self.attended_bytes(past) * device.attention_ps(self.kernels, rows, self._group) * 1e-9
        operators = self.nodes * device.node_us.get(self.kernels, 0.0) * 1e-3
        weights = sum(matrix.bytes(self._precision) for matrix in self._matrices)
        bound: Bound = max(
            ((matrices, "matrices"), (attention, "attention"), (operators, "operators")), key=lambda part: part[0]
        )[1]  # type: ignore[assignment]
        if bound not in ("attention", "operators"):
            reading = weights / device.bandwidth() * 1e-6
            bound = "memory" if reading >= _MEMORY_BOUND * matrices else "compute"
        return Call(
            rows=rows,
            matrices_ms=matrices,
            attention_ms=attention,
            operators_ms=operators,
            read_bytes=weights + past * shape.kv_bytes_per_token(),
            operations=rows
            * (2 * sum(m.weights for m in self._matrices) + 4 * past * shape.blocks * shape.heads * shape.head_width),
            bound=bound,
        )

    def free_rows(self, past: int) -> int:
        """Rows that cost at most a tenth more than one."""
        limit = _FREE * self.call(1, past).ms
        return max(rows for rows in range(1, MOST_ROWS + 1) if rows == 1 or self.call(rows, past).ms <= limit)

    def draft_ms(self, drafting: Drafting, tau: float) -> float:
        """Of drafting in one round: the first call reads the states of what was accepted, `tau` rows about."""
        shape = drafting.shape
        first = self._draft_call_ms(max(1, math.ceil(tau)), first=True)
        return first + (shape.depth - 1) * self._draft_call_ms(shape.beam, first=False)

    def round(self, drafting: Drafting, past: int, taus: Sequence[Tau]) -> Round:
        """A shape's costs and its speed at each tau."""
        plain = self.call(1, past).ms
        verify = self.call(drafting.nodes + 1, past).ms
        reached = [tau.of(drafting) for tau in taus]
        typical = max((tau for tau in reached if tau is not None), default=1.0)
        draft = self.draft_ms(drafting, typical)
        whole = verify + draft
        speeds = [
            None if tau is None else Speed(tau=tau, tokens_per_s=1e3 * tau / whole, speedup=tau * plain / whole)
            for tau in reached
        ]
        return Round(
            drafting=drafting,
            verify_ms=verify,
            draft_ms=draft,
            break_even_tau=whole / plain,
            speeds=tuple(speeds),
        )

    @property
    def _group(self) -> int:
        return max(1, self._shape.heads // self._shape.kv_heads)

    def _draft_call_ms(self, rows: int, *, first: bool) -> float:
        """Of a draft's call of `rows` rows: a round's first projects taps and needs the logits of one row alone."""
        draft, precision, kernels = self._draft, self._draft_precision, self._draft_kernels
        if draft is None:
            return 0.0
        block = (*draft.projection, *draft.block) if first else draft.block
        products = self._products_ms(block, rows, precision, kernels)
        products += self._products_ms((draft.head,), 1 if first else rows, precision, kernels)
        return products + _DRAFT_NODES * self._device.node_us.get(kernels, 0.0) * 1e-3

    def _products_ms(self, matrices: Sequence[Matrix], rows: int, precision: Precision, kernels: Kernels) -> float:
        return 1e-9 * sum(
            matrix.padded(precision) * self._weight_ps(matrix, rows, precision, kernels) for matrix in matrices
        )

    def _weight_ps(self, matrix: Matrix, rows: int, precision: Precision, kernels: Kernels) -> float:
        """Of a weight of its own precision in an export of `precision`; by its bytes where that was not measured."""
        own = matrix.precision(precision)
        if self._device.knows(own, kernels):
            each = matrix.bytes(precision) / matrix.padded(precision)
            return self._device.weight_ps(own, kernels, rows, bytes_per_weight=each)
        ratio = BYTES_PER_WEIGHT[own] / BYTES_PER_WEIGHT[precision]
        return ratio * self._device.weight_ps(precision, kernels, rows)
