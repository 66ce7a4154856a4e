"""Whether a model fits a device, how fast it will be and what limits it: from numbers alone. Pure, no I/O.

A call of n rows after S cached tokens takes

    sum over matrices: weights * curve(n)  +  operators * overhead  +  attended bytes * attention(n)

with the curves of `elsi_edge.runtime.device`: measured on matrices larger than the last cache, or, for a projection,
the roofline (Williams, Waterman, Patterson 2009). Attended bytes are the cached keys and values times the query heads
that share a key head. A round of drafting is one verification, the draft's first call and one call for each further
level; it brings tau tokens, so it breaks even with plain decoding at tau = milliseconds of a round / of a plain step.
The loop's own time between calls (0.2 ms a round on two server cores) is not counted, nor that a model smaller than
the last cache need not be read from memory.

What tau a shape reaches is not arithmetic. From one figure the others follow by a rule of thumb, fitted to the packaged
draft (1.81 tokens for a chain of 4, 2.08 for a tree of 8, 2.7 for one of 30): every level accepts with one probability,
1 - (1 - a) ** (k ** 0.3) with k nodes a level, and a the first guess's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elsi_edge.artifacts import BYTES_PER_WEIGHT, ModelShape, Precision
from elsi_edge.errors import UsageError
from elsi_edge.runtime.device import Device, Kernels
from elsi_edge.runtime.plan_sizes import DraftSizes, Matrix, block_matrices, head_matrix
from elsi_edge.tree_shape import TreeShape

Bound = Literal["memory", "compute", "attention", "operators"]

MOST_ROWS = 64
_FREE = 1.10  # times one row: what a further row may cost and be called free
_WIDTH_GAIN = 0.3  # exponent of the rule for tau
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
class Drafting:
    """What a round drafts: a chain of N, or a tree of N nodes."""

    kind: Literal["chain", "tree"]
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "Drafting":
        """From "chain-4" or "tree-60". Raises UsageError."""
        kind, _, nodes = text.partition("-")
        if kind not in ("chain", "tree") or not nodes.isascii() or not nodes.isdigit() or not 1 <= int(nodes) <= 256:
            raise UsageError(f"{text!r} is no shape; shapes are chain-N and tree-N with 1 to 256 nodes")
        return cls(kind=kind, nodes=int(nodes))  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.kind}-{self.nodes}"

    @property
    def shape(self) -> TreeShape:
        """Levels and nodes expanded on each."""
        return TreeShape.for_budget(self.nodes, chain=self.kind == "chain")

    @property
    def most(self) -> int:
        """Tokens that a round can bring."""
        return self.shape.depth + 1


DRAFTINGS = (
    *(Drafting(kind="chain", nodes=nodes) for nodes in (1, 2, 3, 4, 8)),
    *(Drafting(kind="tree", nodes=nodes) for nodes in (8, 30, 60)),
)


@dataclass(frozen=True, kw_only=True)
class Tau:
    """Tokens a round, the bonus token counted: of one shape, from which others follow, or of whatever shape."""

    tau: float
    drafting: Drafting | None = None  # None: of every shape alike

    def __post_init__(self) -> None:
        most = math.inf if self.drafting is None else self.drafting.most
        if not 1.0 <= self.tau <= most or not math.isfinite(self.tau):
            whose = "any shape" if self.drafting is None else f"{self.drafting.name}, which has so many levels and one"
            limit = "at least 1" if self.drafting is None else f"from 1 to {most}"
            raise UsageError(f"tau is {self.tau:g} for {whose}; it must be {limit}")

    def of(self, drafting: Drafting) -> float | None:
        """Of another shape; None where it cannot bring so many tokens."""
        if self.drafting is None:
            return self.tau if self.tau <= drafting.most else None
        if self.drafting == drafting:
            return self.tau
        level = _level_acceptance(self.tau, self.drafting.shape.depth)
        guess = 1.0 - (1.0 - level) ** (1.0 / _gain(self.drafting))
        return _tokens(1.0 - (1.0 - guess) ** _gain(drafting), drafting.shape.depth)

    @property
    def name(self) -> str:
        """As --tau reads it."""
        return f"{self.tau:g}" if self.drafting is None else f"{self.drafting.name}={self.tau:g}"


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
        self._shape, self._device, self._precision, self._kernels = shape, device, precision, kernels
        self._draft, self._draft_precision = draft, draft_precision or precision
        # The draft's own products run on the kernels of its precision: int8 beside a float32 target.
        self._draft_kernels: Kernels = device.best_kernels(self._draft_precision)
        self._matrices = (*block_matrices(shape), head_matrix(shape))

    @property
    def nodes(self) -> int:
        """Operators of the target's graph, as overhead counts them."""
        if self._kernels == "native" and self._shape.family in _WHOLE_BLOCKS:
            return self._shape.blocks + _OUTER_NODES
        extra = _QK_NORM_NODES if self._shape.family == "qwen3" else 0
        if self._precision == "int4" and self._kernels == "stock":
            extra += _OFFSET_NODES
        return self._shape.blocks * (_NODES[self._kernels] + extra) + _OUTER_NODES

    def attended_bytes(self, past: int) -> int:
        """Keys and values that the query heads of one row read after `past` tokens, over all blocks."""
        return past * self._shape.kv_bytes_per_token() * self._group

    def call(self, rows: int, past: int) -> Call:
        """One call of `rows` rows after `past` tokens, logits of all of them."""
        shape, device = self._shape, self._device
        matrices = self._products_ms(self._matrices, rows, self._precision, self._kernels)
        attention = self.attended_bytes(past) * device.attention_ps(self._kernels, rows, self._group) * 1e-9
        operators = self.nodes * device.node_us.get(self._kernels, 0.0) * 1e-3
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
        draft = self._draft
        if draft is None:
            return 0.0
        precision, kernels = self._draft_precision, self._draft_kernels
        overhead = _DRAFT_NODES * self._device.node_us.get(kernels, 0.0) * 1e-3
        accepted = max(1, math.ceil(tau))
        first = self._products_ms((*draft.projection, *draft.block), accepted, precision, kernels)
        first += self._products_ms((draft.head,), 1, precision, kernels) + overhead
        shape = drafting.shape
        level = self._products_ms((*draft.block, draft.head), shape.beam, precision, kernels) + overhead
        return first + (shape.depth - 1) * level

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

    def _products_ms(self, matrices: Sequence[Matrix], rows: int, precision: Precision, kernels: Kernels) -> float:
        picoseconds = sum(
            matrix.padded(precision) * self._weight_ps(matrix.precision(precision), rows, precision, kernels)
            for matrix in matrices
        )
        return picoseconds * 1e-9

    def _weight_ps(self, own: Precision, rows: int, precision: Precision, kernels: Kernels) -> float:
        """Of a weight of its own precision in an export of `precision`; by its bytes where that was not measured."""
        if self._device.knows(own, kernels):
            return self._device.weight_ps(own, kernels, rows)
        ratio = BYTES_PER_WEIGHT[own] / BYTES_PER_WEIGHT[precision]
        return ratio * self._device.weight_ps(precision, kernels, rows)


def _gain(drafting: Drafting) -> float:
    """How many guesses a level is worth."""
    return math.pow(max(1.0, drafting.nodes / drafting.shape.depth), _WIDTH_GAIN)


def _tokens(level: float, depth: int) -> float:
    """Tokens of a round when every one of `depth` levels accepts with probability `level`."""
    return math.fsum(level**accepted for accepted in range(depth + 1))


def _level_acceptance(tau: float, depth: int) -> float:
    """The probability at which `_tokens` is `tau`: bisection, since it rises with it."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(middle, depth) < tau else (low, middle)
    return high
