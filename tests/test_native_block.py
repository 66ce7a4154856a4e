"""DecoderBlock: bit for bit what its operators give one after another, in any company."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.runtime import native_ops
from tests import test_native_matrix as matrix
from tests import test_native_shift as shift

REPORT = native_ops.report()
pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

Floats = NDArray[np.float32]
HEADS, KV_HEADS, HEAD, WIDTH, MLP, POSITIONS = 4, 2, 32, 96, 160, 400
QKV, ATTENDED = (HEADS + 2 * KV_HEADS) * HEAD, HEADS * HEAD
SIZES = ((QKV, WIDTH), (WIDTH, ATTENDED), (MLP, WIDTH), (MLP, WIDTH), (WIDTH, MLP))  # [N, K]
ATTENTION: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "window": -1, "scale": 0.0, "softcap": 0.0}
TREE = [-1, 0, 1, 1, 0, 4, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of one block: initializers by name, and the names of each matrix's tensors."""

    tensors: dict[str, Any]
    levels: list[list[str]]
    shifts: list[list[str]]  # empty where there are none
    bits: int


def weights(bits: int, *, shifted: bool) -> Weights:
    draw = np.random.default_rng(4)
    tensors: dict[str, Any] = {f"gamma{i}": draw.uniform(0.5, 2.0, WIDTH).astype(np.float32) for i in (1, 2)}
    levels: list[list[str]] = []
    shifts: list[list[str]] = []
    for index, (columns, inputs) in enumerate(SIZES):
        levels.append([f"w{index}", f"s{index}"])
        if shifted:
            part = shift.weights(columns, inputs // 32, seed=index)
            shifts.append([f"o{index}", f"t{index}"])
            tensors |= dict(zip(shifts[-1], (part.shift_values, part.shift_scales), strict=True))
            found = (part.packed, part.scales)
        else:
            found = matrix.weights(columns, inputs, bits, index)
        tensors |= dict(zip(levels[-1], found, strict=True))
    return Weights(tensors=tensors, levels=levels, shifts=shifts, bits=bits)


def block(given: Weights, **changed: Any) -> list[onnx.NodeProto]:
    numbers = {"width": WIDTH, "qkv": QKV, "attended": ATTENDED, "mlp": MLP, "bits": given.bits, "epsilon": 1e-5}
    names = [name for pair in given.levels for name in pair] + [name for pair in given.shifts for name in pair]
    wires = ["x", "past_key", "past_value", "cos", "sin", "cached", "parents", "gamma1", "gamma2", *names]
    node = helper.make_node(
        "DecoderBlock",
        wires,
        ["y", "key", "value"],
        domain=native_ops.DOMAIN,
        **(ATTENTION | numbers | changed),
    )
    return [node]


def parts(given: Weights) -> list[onnx.NodeProto]:
    """The same of operators that have each a hand-off of their own."""

    def product(op: str, inputs: list[str], which: list[int], outputs: list[str]) -> onnx.NodeProto:
        columns, width = SIZES[which[0]]
        sizes: dict[str, Any] = {"K": width, "N": columns, "bits": given.bits, "block_size": 32}
        if op.startswith("Norm"):
            sizes["epsilon"] = 1e-5
        levels = [name for index in which for name in given.levels[index]]
        shifts = [name for index in which for name in given.shifts[index]] if given.shifts else []
        return helper.make_node(op, [*inputs, *levels, *shifts], outputs, domain=native_ops.DOMAIN, **sizes)

    return [
        helper.make_node("Sub", ["x", "x"], ["zero"]),
        product("NormMatMulBlocks", ["x", "zero", "gamma1"], [0], ["rows", "stream"]),
        helper.make_node(
            "TreeAttention",
            ["rows", "past_key", "past_value", "cos", "sin", "cached", "parents"],
            ["attended", "key", "value"],
            domain=native_ops.DOMAIN,
            **ATTENTION,
        ),
        product("MatMulBlocks", ["attended"], [1], ["output"]),
        product("NormGatedBlocks", ["stream", "output", "gamma2"], [2, 3], ["gated", "middle"]),
        product("MatMulBlocks", ["gated"], [4], ["down"]),
        helper.make_node("Add", ["middle", "down"], ["y"]),
    ]


def opened(nodes: list[onnx.NodeProto], given: Weights, threads: int = 1) -> ort.InferenceSession:
    cache: list[int | str] = [1, KV_HEADS, "C", HEAD]
    floats = {"x": [1, "T", None], "past_key": cache, "past_value": cache, "cos": ["P", "A"], "sin": ["P", "A"]}
    graph = helper.make_graph(
        nodes,
        "g",
        [
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in floats.items()),
            helper.make_tensor_value_info("cached", TensorProto.INT32, [1]),
            helper.make_tensor_value_info("parents", TensorProto.INT64, ["W"]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "key", "value")],
        [numpy_helper.from_array(tensor, name) for name, tensor in given.tensors.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_ops.DOMAIN, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    native_ops.register(options)
    return ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])


def feed(cached: int, parents_of: list[int], seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    by = np.arange(POSITIONS)[:, None] / 10000.0 ** (np.arange(HEAD // 2)[None] / (HEAD // 2))
    caches = [draw.standard_normal((1, KV_HEADS, POSITIONS, HEAD)).astype(np.float32) for _ in range(2)]
    return {
        "x": draw.standard_normal((1, len(parents_of), WIDTH)).astype(np.float32),
        "past_key": caches[0],
        "past_value": caches[1],
        "cos": np.cos(by).astype(np.float32),
        "sin": np.sin(by).astype(np.float32),
        "cached": np.array([cached], np.int32),
        "parents": np.array(parents_of, np.int64),
    }


def same_bits(got: Any, wanted: Any) -> bool:
    return np.array_equal(np.asarray(got).view(np.uint32), np.asarray(wanted).view(np.uint32))


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize(("bits", "shifted"), [(4, True), (4, False), (8, False)])
def test_the_bits_are_those_of_its_parts(path: str, bits: int, shifted: bool) -> None:
    given = weights(bits, shifted=shifted)
    with native_ops.forced_path(path):
        whole = opened(block(given), given, threads=2)
        apart = opened(parts(given), given)
    for tree, cached in (([-1], 0), ([-1], 270), (TREE, 130), ([-1, *range(12)], 3), ([-1, *range(29)], 150)):
        asked = feed(cached, tree)
        for name, got, wanted in zip(
            ("y", "key", "value"), whole.run(None, asked), apart.run(None, asked), strict=True
        ):
            end = cached + len(tree)
            part = (slice(None), slice(None), slice(end)) if name != "y" else ()
            assert same_bits(got[part], wanted[part]), (name, tree, cached)


def test_a_row_has_its_own_bits_whatever_is_beside_it() -> None:
    given = weights(4, shifted=True)
    run, asked = opened(block(given), given, threads=2), feed(133, TREE)
    whole = run.run(None, asked)[0][0]
    for row in range(len(TREE)):
        lineage = [row]
        while TREE[lineage[0]] >= 0:
            lineage.insert(0, TREE[lineage[0]])
        alone = asked | {"x": asked["x"][:, lineage], "parents": np.arange(-1, len(lineage) - 1)}
        assert same_bits(run.run(None, alone)[0][0, -1], whole[row]), row


def test_threads_and_repetition_change_nothing() -> None:
    given = weights(8, shifted=False)
    asked = feed(40, TREE)
    wanted = opened(block(given), given).run(None, asked)[0]
    for threads in (2, 3, 8):
        run = opened(block(given), given, threads)
        assert all(same_bits(run.run(None, asked)[0], wanted) for _ in range(20))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 64}, "gamma is"),
        ({"mlp": 128}, "K, N and bits say"),
        ({"bits": 8}, "K, N and bits say"),
        ({"bits": 5}, "bits is 5"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"kv_num_heads": 3}, "cannot share"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    given = weights(4, shifted=False)
    with pytest.raises(Exception, match=message):
        opened(block(given, **changed), given)


def test_shifts_of_some_matrices_alone_are_refused() -> None:
    given = weights(4, shifted=True)
    some = Weights(tensors=given.tensors, levels=given.levels, shifts=given.shifts[:3], bits=4)
    with pytest.raises(Exception, match="there are 25 inputs, it must be 19, or 29 with shifts"):
        opened(block(some), given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": np.zeros((1, 2, 64), np.float32)}, r"x is \[1, 2, 64\], it must be \[1, T, 96\]"),
        ({"cached": np.array([399], np.int32)}, "do not fit the cache's 400 slots"),
        ({"parents": np.array([-1, 1])}, "it must be an earlier row or -1"),
        ({"cos": np.zeros((9, 16), np.float32), "sin": np.zeros((9, 16), np.float32)}, "beyond the 9"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    given = weights(4, shifted=False)
    run = opened(block(given), given)
    with pytest.raises(Exception, match=message):
        run.run(None, feed(20, [-1, 0]) | changed)
