"""What `export --for npu` writes, by numbers alone: graphs of fixed size, whose calls all cost the same. Pure, no I/O.

A plain step runs the verify graph too, so it takes the verify graph's n rows over all C slots of the cache, and so does
each verification: n - 1 drafted nodes cost the target nothing. The draft's first call takes n rows, each further level
the level graph's. How many operators an NPU's compiler leaves is not known: as many as ONNX Runtime keeps of a dynamic
graph are assumed.
"""

from collections.abc import Mapping
from dataclasses import replace

from elsi_edge.artifacts import ModelShape, Precision
from elsi_edge.bundle import StaticForm
from elsi_edge.errors import UsageError
from elsi_edge.runtime.device import Device
from elsi_edge.runtime.plan import Call, CostModel
from elsi_edge.runtime.plan_sizes import PROGRAM, DraftSizes, Matrix, Memory, block_matrices, head_matrix, norm_weights
from elsi_edge.runtime.plan_tau import Drafting
from elsi_edge.runtime.policy import EXACT_CHAIN_ROWS

# The export's own (`elsi_edge.export.static_export` and `static_models`, which need torch), held equal by a test.
STATIC_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
STATIC_PRECISIONS: tuple[Precision, ...] = ("int8", "fp32")
DEFAULT_SLOTS = 1024
_PREFILL_ROWS, _VERIFY_ROWS, _LEVEL_ROWS = 64, 8, 4

_FLOAT, _NARROW = 32, 8  # activation bits: of a bundle that is not quantised, and of one that the CPU has products for
_GRAPH_BYTES: Mapping[Precision, int] = {"fp32": 18_900, "int8": 43_700}  # of all graphs, a block; measured
_LENGTHS = (1, 2, 3, 4, 8)  # of chains that are planned, beside the longest


def default_form(precision: Precision) -> StaticForm:
    """The sizes that an export has unless told. Raises UsageError for a precision that has no static form."""
    require_static_precision(precision)
    bits = _FLOAT if precision == "fp32" else 16
    return StaticForm(
        prefill_rows=_PREFILL_ROWS, verify_rows=_VERIFY_ROWS, level_rows=_LEVEL_ROWS, activation_bits=bits
    )


def require_static_precision(precision: Precision) -> None:
    """Raise UsageError for a precision that `export --for npu` does not write."""
    if precision not in STATIC_PRECISIONS:
        raise UsageError(
            f"--precision is {precision}, but an NPU runs what `elsi-edge export MODEL --for npu` writes, which takes "
            f"{' and '.join(STATIC_PRECISIONS)}; choose one of them"
        )


def require_static_family(shape: ModelShape) -> None:
    """Raise UsageError for a family that `export --for npu` does not write."""
    if shape.family not in STATIC_FAMILIES:
        raise UsageError(
            f"models of type {shape.family!r} have no static form for NPUs; `elsi-edge export MODEL --for npu` takes "
            f"{', '.join(STATIC_FAMILIES)}"
        )


def static_draftings(form: StaticForm, precision: Precision) -> tuple[Drafting, ...]:
    """Shapes that a verification has rows for: chains, and at fp32, where trees are exact too, a tree of them all."""
    most = min(form.verify_rows, EXACT_CHAIN_ROWS) - 1
    lengths = sorted({length for length in (*_LENGTHS, most) if 1 <= length <= most})
    chains = tuple(Drafting(kind="chain", nodes=length) for length in lengths)
    trees = (Drafting(kind="tree", nodes=most),) if precision == "fp32" and most > 2 else ()
    return chains + trees


def static_matrices(shape: ModelShape) -> tuple[Matrix, ...]:
    """The products of the target, the lm_head last."""
    return tuple(replace(matrix, per_output=True) for matrix in (*block_matrices(shape), head_matrix(shape)))


def static_target_bytes(shape: ModelShape, precision: Precision, slots: int) -> dict[str, int]:
    """Bytes of the target's weights by component, with a cache of so many slots.

    The table that the runtime looks tokens up in is the lm_head's own where embeddings are tied.
    """
    *blocks, head = static_matrices(shape)
    return {
        "block matrices": sum(matrix.bytes(precision) for matrix in blocks),
        "lm_head": head.bytes(precision),
        "embedding table": 0 if shape.tied_embeddings else head.bytes(precision),
        "norms": 4 * norm_weights(shape),
        "rotary tables": 2 * 4 * slots * shape.head_width,  # [2, C, D]
    }


def static_graph_bytes(shape: ModelShape, precision: Precision) -> int:
    """Bytes of all graphs."""
    return _GRAPH_BYTES[precision] * shape.blocks


def computed_precision(device: Device, precision: Precision, form: StaticForm) -> Precision:
    """What products are computed in: ONNX Runtime's CPU provider has none for 16-bit activations, and takes float32."""
    return "fp32" if not device.static_only and form.activation_bits == 16 else precision


def static_memory(
    shape: ModelShape, draft: DraftSizes, form: StaticForm, *, slots: int, weights: int, on_cpu: bool
) -> Memory:
    """Bytes at the peak with a cache of so many slots, allocated whole; `weights` are the bytes of the target's files.

    An NPU is taken to hold them once. The CPU provider holds its own for each of the target's two graphs, in float32
    but with 8-bit activations, and the mapped files beside quantised ones (SmolLM2's peak resident set, within 5 %).
    """
    copies = 0
    if on_cpu:
        held = 2 * sum(matrix.weights for matrix in static_matrices(shape))
        copies = held * (1 if form.activation_bits == _NARROW else 4) - (
            weights if form.activation_bits == _FLOAT else 0
        )
    inner = 2 * shape.width + (shape.heads + 2 * shape.kv_heads) * shape.head_width + 4 * shape.mlp_width
    rows = form.prefill_rows
    return Memory(
        parts={
            "target weights": weights + copies,
            "draft": draft.total,
            "keys and values": slots * shape.kv_bytes_per_token(),
            "keys and values of the draft": min(slots, draft.context) * draft.kv_bytes_per_token,
            "activations": 4 * (rows * inner + rows * shape.heads * slots + form.verify_rows * shape.vocab_size),
            "interpreter": PROGRAM,
        }
    )


class StaticCostModel(CostModel):
    """A static bundle on a device: a call takes the rows that its graph has, whatever is asked of it."""

    def __init__(
        self,
        shape: ModelShape,
        device: Device,
        precision: Precision,
        form: StaticForm,
        slots: int,
        draft: DraftSizes | None = None,
    ) -> None:
        """`precision` is what products are computed in. Raises ConfigError where the device was not measured at it."""
        super().__init__(shape, device, precision, device.best_kernels(precision), draft, precision)
        self.kernels = self._draft_kernels = "stock"  # static graphs name no native operators
        self._matrices = static_matrices(shape)
        self._form, self._slots = form, slots

    def call(self, rows: int, past: int) -> Call:
        """One call of the verify graph: its own rows over all slots."""
        return super().call(self._form.verify_rows, self._slots)

    def free_rows(self, past: int) -> int:
        """All rows of the verify graph."""
        return self._form.verify_rows

    def draft_ms(self, drafting: Drafting, tau: float) -> float:
        """Of drafting in one round: the entry graph has the verify graph's rows, a level's graph its own."""
        levels = drafting.shape.depth - 1
        return self._draft_call_ms(self._form.verify_rows, first=True) + levels * self._draft_call_ms(
            self._form.level_rows, first=False
        )
