"""Graphs of fixed shape for NPUs, written node by node in standard ONNX operators: T rows over a cache of C slots.

Every row brings one token; the runtime pads the rows that it does not need. For each block the graph takes the cached
keys [1, H, D, C] (transposed, as the product of queries and keys reads them) and values [1, H, C, D], slots that hold
no token being zero, and yields the new rows' [1, H, D, T] and [1, H, T, D]. Inside, the new rows are put into their
slots by the matrix `write` [1, 1, T, C] (1 at a row's slot, nothing in a padded row), so that a token's key lies in the
same column while it is drafted and after it was accepted: the sums over a chain are then the same sums. `mask`
[1, 1, T, C] is added to the scores: 0 at the slots that a row sees, `HIDDEN` elsewhere.

What needs integers stays outside: the runtime looks up the tokens' embeddings `embedded` [T, E] and the positions'
rotations `cos` and `sin` [1, 1, T, D] in tables beside the graphs. The QNN provider lists a Gather in an int8 table as
unsupported, and an embedding table is read a few rows at a time, which needs no NPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 21  # the first whose QuantizeLinear takes 16 bits
_IR = 10
_ALIGNMENT = 4096  # bytes in a weights file, so that tensors can be mapped
_SQUARABLE = 128.0  # magnitude up to which values are squared as they are; float16 ends at 256 squared
_INLINE = 1024  # bytes up to which a constant stays in the graph

Floats = NDArray[np.float32]
Ranges = Mapping[str, tuple[float, float]]  # by value: smallest and largest that calibration saw
Read = Callable[[str], Floats]  # a weight by name; matrices are [out, in]


class WeightFile:
    """One file of weights that several graphs name; each tensor is written when it is first named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, onnx.TensorProto] = {}
        path.write_bytes(b"")

    def tensor(self, name: str, make: Callable[[], NDArray[Any]]) -> onnx.TensorProto:
        """The initialiser `name`, which lies in this file, or inside the graph where it is small."""
        if name not in self._places:
            array = np.ascontiguousarray(make())
            proto = numpy_helper.from_array(array, name)
            if array.nbytes > _INLINE:
                proto.ClearField("raw_data")
                proto.data_location = TensorProto.EXTERNAL
                with self.path.open("ab") as handle:
                    handle.write(b"\0" * (-handle.tell() % _ALIGNMENT))
                    start = handle.tell()
                    handle.write(array.data)
                for key, value in (("location", self.path.name), ("offset", start), ("length", array.nbytes)):
                    proto.external_data.add(key=key, value=str(value))
            self._places[name] = proto
        return self._places[name]

    def adopt(self, name: str, file: Path) -> None:
        """Let the initialiser `name` be the array of an .npy file beside the graphs, so that it is stored once."""
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        proto = onnx.TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
        proto.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        start = file.stat().st_size - array.nbytes  # after numpy's header
        for key, value in (("location", file.name), ("offset", start), ("length", array.nbytes)):
            proto.external_data.add(key=key, value=str(value))
        self._places[name] = proto


class Matrices(Protocol):
    """How matrices are stored and multiplied: in float32, or quantised with their activations."""

    def write_table(self, table: Floats, name: str, stem: Path, weights: WeightFile) -> None:
        """Write an embedding table [V, E] for the runtime to look rows up in; a tied lm_head's `name` is the same."""
        ...

    def product(self, graph: "GraphWriter", source: str, weight: str, result: str) -> str:
        """[T, out] = [T, in] times the transpose of `weight` [out, in]."""
        ...


class GraphWriter:
    """One graph in the making; a value's name says what it is, and is the same in graphs of other row counts."""

    def __init__(self, name: str, weights: WeightFile, read: Read, matrices: Matrices, ranges: Ranges) -> None:
        self.name, self.weights, self.read, self.matrices, self.ranges = name, weights, read, matrices, ranges
        self.observed: list[str] = []  # activations whose ranges calibration is to see
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initialisers: dict[str, onnx.TensorProto] = {}
        self._made: set[str] = set()

    def node(self, operator: str, inputs: Sequence[str], result: str | Sequence[str], **attributes: Any) -> str:
        """Add a node; returns its first result. One that is there under this name is not made again."""
        results = [result] if isinstance(result, str) else list(result)
        if results[0] not in self._made:
            self._nodes.append(helper.make_node(operator, inputs, results, name=f"/{results[0]}", **attributes))
            self._made.update(results)
        return results[0]

    def input(self, name: str, shape: Sequence[int], kind: int = TensorProto.FLOAT) -> str:
        """An input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, shape: Sequence[int]) -> None:
        """An output of the graph: the value of that name."""
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def weight(self, name: str, make: Callable[[], NDArray[Any]] | None = None) -> str:
        """A weight by its name, from the source or as `make` gives it."""
        if name not in self._initialisers:
            self._initialisers[name] = self.weights.tensor(name, make or (lambda: self.read(name)))
        return name

    def constant(self, value: Any, dtype: type[np.generic] = np.float32) -> str:
        """A small constant, stored in the graph."""
        array = np.asarray(value, dtype)
        name = f"constant.{np.dtype(dtype).name}.{'_'.join(map(str, array.ravel().tolist()))}.{array.ndim}"
        if name not in self._initialisers:
            self._initialisers[name] = numpy_helper.from_array(array, name)
        return name

    def reshape(self, source: str, shape: Sequence[int], result: str) -> str:
        """The same values in another shape."""
        return self.node("Reshape", [source, self.constant(shape, np.int64)], result)

    def model(self, extra: Mapping[str, Sequence[int]] | None = None) -> onnx.ModelProto:
        """The graph as it stands; `extra` names further float values to yield."""
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in (extra or {}).items()]
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, [*self._outputs, *outputs], list(self._initialisers.values())
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="elsi-edge")


class FloatMatrices:
    """Matrices in float32, as they are."""

    def write_table(self, table: Floats, name: str, stem: Path, weights: WeightFile) -> None:
        """STEM.npy, float32."""
        file = stem.with_suffix(".npy")
        np.save(file, table, allow_pickle=False)
        weights.adopt(name, file)

    def product(self, graph: GraphWriter, source: str, weight: str, result: str) -> str:
        """One Gemm; the weight is read as it is stored, [out, in]."""
        graph.observed += [source, result]
        return graph.node("Gemm", [source, graph.weight(weight)], result, transB=1)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Numbers and options of one transformer block."""

    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    rotary: bool = True
    biases: frozenset[str] = frozenset()  # of q, k, v, o, gate, up, down: those with a bias
    head_norms: bool = False  # Qwen3's norms of queries and keys


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The shape of a graph: rows, and slots of its caches."""

    count: int  # T
    slots: int  # C


def begin(graph: GraphWriter, rows: Rows, *, width: int, head_width: int) -> str:
    """The inputs that every graph has, and what all its blocks share; yields the rows' embeddings [T, width]."""
    for name in ("cos", "sin"):
        graph.input(name, [1, 1, rows.count, head_width])
    graph.input("mask", [1, 1, rows.count, rows.slots])
    graph.input("write", [1, 1, rows.count, rows.slots])
    graph.node("Transpose", ["write"], "write.transposed", perm=[0, 1, 3, 2])
    return graph.input("embedded", [rows.count, width])


def selected_row(graph: GraphWriter, source: str, rows: Rows, result: str) -> str:
    """The row [1, E] of `source` [T, E] at which the input `select` [1, T] is 1."""
    return graph.node("MatMul", [graph.input("select", [1, rows.count]), source], result)


def rms_norm(graph: GraphWriter, source: str, weight: str, eps: float, result: str, *, like: str | None = None) -> str:
    """Root-mean-square norm over the last axis, times `weight`.

    Squares of massive activations (24,900 in SmolLM2) would overflow the float16 that NPUs compute in, so a source that
    calibration saw beyond _SQUARABLE is first scaled by a power of two, which the norm undoes: exact in floating point.
    `like` names the value whose range counts, where it is not the source's own.
    """

    def own(name: str) -> str:
        return f"{result}.{name}"

    graph.observed.append(source)
    largest = max((abs(limit) for limit in graph.ranges.get(like or source, ())), default=0.0)
    scale = 2.0 ** -max(0, math.ceil(math.log2(max(largest, 1.0) / _SQUARABLE)))
    if scale < 1.0:
        source = graph.node("Mul", [source, graph.constant(scale)], own("scaled"))
    graph.node("Mul", [source, source], own("squared"))
    graph.node("ReduceMean", [own("squared"), graph.constant([-1], np.int64)], own("mean"), keepdims=1)
    graph.node("Add", [own("mean"), graph.constant(eps * scale**2)], own("sum"))
    graph.node("Sqrt", [own("sum")], own("root"))
    graph.node("Div", [source, own("root")], own("normed"))
    return graph.node("Mul", [own("normed"), graph.weight(weight)], result)


def rotary_table(cos: Floats, sin: Floats) -> Floats:
    """The runtime's table [2, context, D] from halves [context, D / 2]; the sines carry the sign of the first half."""
    return np.stack([np.concatenate([cos, cos], axis=-1), np.concatenate([-sin, sin], axis=-1)])


def _rotate(graph: GraphWriter, source: str, block: Block, result: str) -> str:
    """Llama's half-split rotary embedding of [1, heads, T, D]."""
    if not block.rotary:
        return source
    half = graph.constant([block.head_width // 2] * 2, np.int64)
    graph.node("Split", [source, half], [f"{result}.first", f"{result}.second"], axis=-1)
    graph.node("Concat", [f"{result}.second", f"{result}.first"], f"{result}.swapped", axis=-1)
    graph.node("Mul", [source, "cos"], f"{result}.cos")
    graph.node("Mul", [f"{result}.swapped", "sin"], f"{result}.sin")
    return graph.node("Add", [f"{result}.cos", f"{result}.sin"], result)


def linear(graph: GraphWriter, source: str, weight: str, block: Block, result: str) -> str:
    """A product, and its bias where the block has one. `weight` is the name without ".weight"."""
    kind = weight.rsplit(".", 1)[-1].removesuffix("_proj")
    if kind not in block.biases:
        return graph.matrices.product(graph, source, f"{weight}.weight", result)
    product = graph.matrices.product(graph, source, f"{weight}.weight", f"{result}.product")
    return graph.node("Add", [product, graph.weight(f"{weight}.bias")], result)


def attention(graph: GraphWriter, index: int, prefix: str, sources: Sequence[str], block: Block, rows: Rows) -> str:
    """Attention of one block over queries, keys and values [T, heads * D]; yields [T, heads * D].

    Its cache is an input, the rows' own keys and values are outputs.
    """
    count, heads, kv_heads, width = rows.count, block.heads, block.kv_heads, block.head_width

    def own(name: str) -> str:
        return f"{prefix}attention.{name}"

    def split(source: str, number: int, name: str, result: str) -> str:
        """[T, heads * D] to [1, heads, T, D]."""
        value = graph.reshape(source, [1, count, number, width], own(f"{name}.split"))
        if block.head_norms and name != "v":
            weight = f"{prefix}self_attn.{name}_norm.weight"
            value = rms_norm(graph, value, weight, block.norm_eps, own(f"{name}.normed"))
        return graph.node("Transpose", [value], result, perm=[0, 2, 1, 3])

    new_key, new_value = f"new.{index}.key", f"new.{index}.value"
    queries = _rotate(graph, split(sources[0], heads, "q", own("q.heads")), block, own("q"))
    keys = _rotate(graph, split(sources[1], kv_heads, "k", own("k.heads")), block, own("k"))
    split(sources[2], kv_heads, "v", new_value)
    graph.node("Transpose", [keys], new_key, perm=[0, 1, 3, 2])
    graph.output(new_key, [1, kv_heads, width, count])
    graph.output(new_value, [1, kv_heads, count, width])
    past_key = graph.input(f"past.{index}.key", [1, kv_heads, width, rows.slots])
    past_value = graph.input(f"past.{index}.value", [1, kv_heads, rows.slots, width])
    graph.node("MatMul", ["write.transposed", new_value], own("value.placed"))
    graph.node("Add", [past_value, own("value.placed")], own("values"))
    # Heads that share keys lie side by side, so that one product per kv head serves them all.
    graph.node("Mul", [queries, graph.constant(width**-0.5)], own("scaled"))
    grouped = graph.reshape(own("scaled"), [1, kv_heads, heads // kv_heads * count, width], own("grouped"))
    # Scores of new keys are put into their columns, rather than the keys: the cache is then read as it is, not summed.
    graph.node("MatMul", [grouped, past_key], own("scores.past"))
    graph.node("MatMul", [grouped, new_key], own("scores.new"))
    graph.node("MatMul", [own("scores.new"), "write"], own("scores.placed"))
    graph.node("Add", [own("scores.past"), own("scores.placed")], own("scores.grouped"))
    scores = graph.reshape(own("scores.grouped"), [1, heads, count, rows.slots], own("scores"))
    graph.node("Add", [scores, "mask"], own("masked"))
    graph.node("Softmax", [own("masked")], own("weights"), axis=-1)
    grouped = graph.reshape(
        own("weights"), [1, kv_heads, heads // kv_heads * count, rows.slots], own("weights.grouped")
    )
    graph.node("MatMul", [grouped, own("values")], own("mixed.grouped"))
    mixed = graph.reshape(own("mixed.grouped"), [1, heads, count, width], own("mixed"))
    graph.node("Transpose", [mixed], own("mixed.rows"), perm=[0, 2, 1, 3])
    return graph.reshape(own("mixed.rows"), [count, heads * width], own("out"))


def mlp(graph: GraphWriter, source: str, prefix: str, block: Block) -> str:
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    gate = linear(graph, source, f"{prefix}mlp.gate_proj", block, f"{prefix}mlp.gate")
    up = linear(graph, source, f"{prefix}mlp.up_proj", block, f"{prefix}mlp.up")
    graph.node("Sigmoid", [gate], f"{prefix}mlp.sigmoid")
    graph.node("Mul", [gate, f"{prefix}mlp.sigmoid"], f"{prefix}mlp.silu")
    graph.node("Mul", [f"{prefix}mlp.silu", up], f"{prefix}mlp.swiglu")
    return linear(graph, f"{prefix}mlp.swiglu", f"{prefix}mlp.down_proj", block, f"{prefix}mlp.down")
