"""How large a bundle and its running take, from numbers alone: what `export` writes, before it is written. Pure.

Matrices are [K inputs, N outputs]. Quantised ones come in blocks of 32 inputs with a float32 scale, at 4 bits with an
offset too where a row is whole blocks; a row's last block is padded. Biases (a few kilobytes a block) and alignment
(below one percent) are not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elsi_edge.artifacts import BLOCK, BYTES_PER_WEIGHT, SLACK, DraftConfig, ModelShape, Precision
from elsi_edge.runtime.kv_cache import PAGE
from elsi_edge.runtime.target import PREFILL_ROWS

_SANDWICH = "gemma3_text"  # norms after each half of a block too, and angles by kind of block
_PER_OUTPUT = 5  # bytes: a float32 scale and an int8 zero point
_GRAPH_BYTES: Mapping[Precision, int] = {"fp32": 5_450, "int8": 20_300, "int4": 37_000}  # of all graphs, a block
_TOKENIZER_BYTES = 40  # of a token in tokenizer.json, about
PROGRAM = 100_000_000  # bytes of Python, numpy and ONNX Runtime before a graph is opened, measured
# Bytes in memory of those in the file, at the peak while packing: fitted to SmolLM2's peak resident set (within 5 %).
_RESIDENT: Mapping[str, float] = {"native": 2.0, "stock": 1.35, "fp32": 1.5}
_DRAFT_RESIDENT = 2.0
_MOST_ROWS = 64  # rows verified in one call, whose logits are held


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Products of one size in a graph."""

    name: str
    inputs: int  # K
    outputs: int  # N
    count: int = 1  # in the whole graph
    least: Precision = "int4"  # the fewest bits that an export gives it unless told
    offsets: bool = False  # at 4 bits, where a row is whole blocks
    per_output: bool = False  # at 8 bits a scale and a zero point for each output, no blocks: in static graphs

    @property
    def weights(self) -> int:
        """Of all of them, the padding of the blocks not counted."""
        return self.count * self.inputs * self.outputs

    def precision(self, of_export: Precision) -> Precision:
        """Its own, in an export of some precision."""
        return self.least if of_export == "int4" else of_export

    def padded(self, of_export: Precision) -> int:
        """Weights that are stored and computed with."""
        whole = of_export == "fp32" or self.per_output
        inputs = self.inputs if whole else -(-self.inputs // BLOCK) * BLOCK
        return self.count * inputs * self.outputs

    def bytes(self, of_export: Precision) -> int:
        """That a call reads, as they lie in the bundle; the native operators' copy is 3 to 10 % smaller."""
        if self.per_output and of_export == "int8":
            return self.weights + self.count * self.outputs * _PER_OUTPUT
        return round(self.padded(of_export) * BYTES_PER_WEIGHT[self.precision(of_export)])

    def stored(self, of_export: Precision) -> int:
        """Bytes in the bundle."""
        offsets = self.offsets and self.precision(of_export) == "int4" and self.inputs % BLOCK == 0
        of_a_row = -(-self.inputs // BLOCK // BLOCK) * (BLOCK + 4) if offsets else 0  # in 8 bits
        return self.bytes(of_export) + self.count * self.outputs * of_a_row


@dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """Bytes of a draft in the bundle by component, and what a call of it multiplies."""

    m: int
    bytes: Mapping[str, int]
    projection: tuple[Matrix, ...]
    block: tuple[Matrix, ...]
    head: Matrix
    kv_bytes_per_token: int
    context: int  # longest sequence that the draft was made for, tokens

    @property
    def total(self) -> int:
        """Bytes together."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes at the peak of a session at some context."""

    parts: Mapping[str, int]

    @property
    def peak(self) -> int:
        """All together."""
        return sum(self.parts.values())


def block_matrices(shape: ModelShape) -> tuple[Matrix, ...]:
    """The products of the target's blocks; queries, keys and values are one."""
    queries, pairs = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    width, mlp, blocks = shape.width, shape.mlp_width, shape.blocks
    return tuple(
        Matrix(name=name, inputs=inputs, outputs=outputs, count=blocks, offsets=True)
        for name, inputs, outputs in (
            ("qkv", width, queries + 2 * pairs),
            ("o", queries, width),
            ("gate", width, mlp),
            ("up", width, mlp),
            ("down", mlp, width),
        )
    )


def head_matrix(shape: ModelShape) -> Matrix:
    """The target's lm_head, which 4 bits would cost too much (`elsi_edge.export.recipe`)."""
    return Matrix(name="lm_head", inputs=shape.width, outputs=shape.vocab_size, least="int8")


def target_bytes(shape: ModelShape, precision: Precision, context: int) -> dict[str, int]:
    """Bytes of the target's weights by component, exported for a context of so many tokens.

    A tied table is read by the lookup from the lm_head's own blocks; one of its own is stored in 8 bits. Where
    a row is no whole number of blocks it stays float32.
    """
    head = head_matrix(shape)
    whole = shape.width % BLOCK == 0
    shared = shape.tied_embeddings and (precision == "fp32" or whole)
    table = head.bytes("int8" if whole and not shape.tied_embeddings and precision != "fp32" else "fp32")
    angles = _rotary_bytes(min(context + SLACK, shape.context), shape.head_width)
    return {
        "block matrices": sum(matrix.stored(precision) for matrix in block_matrices(shape)),
        "lm_head": head.bytes(precision),
        "embedding table": 0 if shared else table,
        "norms": 4 * norm_weights(shape),
        "rotary tables": 2 * angles if shape.family == _SANDWICH else angles,
    }


def norm_weights(shape: ModelShape) -> int:
    """Weights of the target's norms, of queries and keys too where a family has those."""
    norms = ((4 if shape.family == _SANDWICH else 2) * shape.blocks + 1) * shape.width
    if shape.family in (_SANDWICH, "qwen3"):
        norms += 2 * shape.blocks * shape.head_width
    return norms


def other_bytes(shape: ModelShape, precision: Precision, tokenizer: int | None = None) -> dict[str, int]:
    """Bytes of graphs and tokenizer; `tokenizer` is the file's own size where it is known."""
    return {
        "graphs": _GRAPH_BYTES[precision] * shape.blocks,
        "tokenizer": _TOKENIZER_BYTES * shape.vocab_size if tokenizer is None else tokenizer,
    }


def draft_sizes(
    config: DraftConfig,
    tensors: Mapping[str, tuple[int, ...]],
    precision: Precision,
    context: int,
    *,
    static: bool = False,
) -> DraftSizes:
    """A draft with these tensors, [out, in] by name (as `elsi_edge.draft.shapes` has them), at `precision`, exported
    for a context of so many tokens, `static` in graphs of fixed size."""
    matrices = {
        (stem := name.removesuffix(".weight")): Matrix(name=stem, inputs=shape[1], outputs=shape[0], per_output=static)
        for name, shape in tensors.items()
        if len(shape) == 2
    }
    norms = sum(math.prod(shape) for shape in tensors.values() if len(shape) == 1)
    projection, head = matrices.pop("projection"), matrices.pop("head")
    block = tuple(matrices.values())
    angles = _rotary_bytes(min(context + SLACK, config.context), config.head_width)
    return DraftSizes(
        m=config.m,
        bytes={
            "draft block": sum(matrix.bytes(precision) for matrix in block),
            "draft head": head.bytes(precision) + 8 * config.draft_vocab_size,
            "projection": projection.bytes(precision),
            "draft norms": 4 * norms,
            "draft rotary tables": 2 * angles if static else angles,  # a static draft's have whole heads
        },
        projection=(projection,),
        block=block,
        head=head,
        kv_bytes_per_token=config.depth * 2 * config.kv_heads * config.head_width * 4,
        context=config.context,
    )


def memory_needed(
    shape: ModelShape, precision: Precision, draft: DraftSizes, *, context: int, native: bool, weights: int
) -> Memory:
    """Bytes at the peak with `context` tokens in both caches; `weights` are the bytes of the target's file.

    A part of it is the mapped file, whose pages the system takes back when memory is short.
    """
    kind = "fp32" if precision == "fp32" else "native" if native else "stock"
    slots = -(-(context + _MOST_ROWS) // PAGE) * PAGE
    inner = 2 * shape.width + (shape.heads + 2 * shape.kv_heads) * shape.head_width + 4 * shape.mlp_width
    return Memory(
        parts={
            "target weights, packed": round(weights * _RESIDENT[kind]),
            "draft": round(draft.total * _DRAFT_RESIDENT),
            "keys and values": slots * shape.kv_bytes_per_token(),
            "keys and values of the draft": slots * draft.kv_bytes_per_token,
            "activations": 4 * (PREFILL_ROWS * inner + _MOST_ROWS * shape.vocab_size),
            "interpreter": PROGRAM,
        }
    )


def _rotary_bytes(context: int, head_width: int) -> int:
    """Cosines and sines for so many positions, float32."""
    return context * head_width * 4
