"""The native matrix product: against a double-precision reference, and bit for bit over rows, paths and threads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.runtime import native_ops

REPORT = native_ops.report()
pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

Floats = NDArray[np.float32]


def weights(columns: int, inputs: int, bits: int, seed: int = 0) -> tuple[NDArray[np.uint8], Floats]:
    """Packed values [N, blocks, 4 * bits] and scales [N, blocks] that 16-bit floats hold, all values drawn alike."""
    draw = np.random.default_rng(seed)
    blocks = -(-inputs // 32)
    packed = draw.integers(0, 256, (columns, blocks, 4 * bits), dtype=np.uint8)
    return packed, draw.uniform(-0.02, 0.02, (columns, blocks)).astype(np.float16).astype(np.float32)


def model(inputs: int, columns: int, bits: int, packed: Any, scales: Any, /, **changed: Any) -> bytes:
    """A graph of one node; `changed` replaces attributes."""
    attributes = {"K": inputs, "N": columns, "bits": bits, "block_size": 32} | changed
    node = helper.make_node("MatMulBlocks", ["x", "w", "s"], ["y"], domain=native_ops.DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales, "s")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_ops.DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def session(graph: bytes, threads: int = 1) -> ort.InferenceSession:
    """A session with the native operators."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.enable_cpu_mem_arena = False  # so that a sanitizer sees the ends of tensors
    native_ops.register(options)
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def rows_of(count: int, inputs: int, seed: int = 1) -> Floats:
    """Activations [count, K] with a few large coordinates, as real ones have."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((count, inputs)) * np.exp(draw.standard_normal((1, inputs)))
    return rows.astype(np.float32)


def in_blocks(rows: Floats) -> Floats:
    """[T, K] as blocks [T, ceil(K / 32), 32], zeros at the end."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32))).reshape(len(rows), -1, 32)


def quantised(rows: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Activations in 8 bits per block of 32: values [T, blocks, 32] and the blocks' scales [T, blocks]."""
    x = in_blocks(rows)
    most = np.abs(x).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(most > 0, np.float32(127) / most, np.float32(0)).astype(np.float32)
    return np.rint(x * inverse).astype(np.int64), most[:, :, 0] / np.float32(127)


def reference(rows: Floats, packed: NDArray[np.uint8], scales: Floats, bits: int) -> NDArray[np.float64]:
    """The documented semantics in double precision: exact integer sums of quantised activations."""
    q, by_row = quantised(rows)
    values = packed.astype(np.int64)
    if bits == 4:
        values = np.stack([values & 15, values >> 4], axis=-1).reshape(*packed.shape[:2], 32)
    values = values - (8 if bits == 4 else 128)
    values.reshape(len(values), -1)[:, rows.shape[1] :] = 0
    dots = np.einsum("tbi,nbi->tnb", q, values).astype(np.float64)
    by = by_row[:, None].astype(np.float64) * scales[None].astype(np.float64)
    return np.asarray((dots * by).sum(axis=2))


SHAPES = ((32, 16), (576, 960), (33, 17), (64, 100), (31, 1), (96, 1), (1000, 48), (1, 40))


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(("inputs", "columns"), SHAPES)
def test_against_double_precision(inputs: int, columns: int, bits: int, path: str) -> None:
    packed, scales = weights(columns, inputs, bits)
    rows = rows_of(13, inputs)
    with native_ops.forced_path(path):
        run = session(model(inputs, columns, bits, packed, scales))
    wanted = reference(rows, packed, scales, bits)
    got = run.run(None, {"x": rows})[0]
    assert got.shape == (13, columns)
    # Rounding of float32 sums of at most 32 blocks: relative to the sum of magnitudes, not to the result.
    size = np.abs(rows).max() * np.abs(scales).max() * 2 ** (bits - 1) * inputs
    assert np.abs(got - wanted).max() <= 2e-7 * size


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize("bits", (4, 8))
def test_a_row_has_its_own_bits(bits: int, path: str) -> None:
    """In calls of 1 to 64 rows, at every place, on one thread and two."""
    inputs, columns = 320, 500
    packed, scales = weights(columns, inputs, bits)
    rows = rows_of(native_ops.EXACT_ROWS, inputs)
    with native_ops.forced_path(path):
        runs = [session(model(inputs, columns, bits, packed, scales), threads) for threads in (1, 2)]
    alone = np.concatenate([runs[0].run(None, {"x": rows[i : i + 1]})[0] for i in range(len(rows))])
    for count in range(1, len(rows) + 1):
        for run in runs:
            got = run.run(None, {"x": rows[-count:]})[0]
            assert np.array_equal(got.view(np.uint32), alone[-count:].view(np.uint32)), count


@pytest.mark.parametrize("bits", (4, 8))
def test_paths_agree_bit_for_bit(bits: int) -> None:
    packed, scales = weights(333, 200, bits)
    rows = rows_of(17, 200)
    rows[3] = 0
    rows[4] *= np.float32(1e-38)
    rows[5] *= np.float32(1e30)
    results = []
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            run = session(model(200, 333, bits, packed, scales))
        results.append(run.run(None, {"x": rows})[0].view(np.uint32))
    for path, result in zip(REPORT.paths, results, strict=True):
        assert np.array_equal(result, results[-1]), path


@pytest.mark.parametrize("path", REPORT.paths)
def test_not_a_number_stays_in_its_row(path: str) -> None:
    packed, scales = weights(40, 64, 4)
    rows = rows_of(4, 64)
    with native_ops.forced_path(path):
        run = session(model(64, 40, 4, packed, scales))
    clean = run.run(None, {"x": rows})[0]
    rows[1, 5], rows[2, 40] = np.nan, -np.inf
    got = run.run(None, {"x": rows})[0]
    assert np.isnan(got[1:3]).all()
    assert np.array_equal(got[[0, 3]], clean[[0, 3]])


def test_close_to_the_stock_operator() -> None:
    """MatMulNBits at accuracy level 4 quantises activations alike: what differs is the order of a sum."""
    packed, scales = weights(128, 576, 4)
    rows = rows_of(4, 576)
    attributes = {"K": 576, "N": 128, "bits": 4, "block_size": 32, "accuracy_level": 4}
    graph = onnx.load_from_string(model(576, 128, 4, packed, scales))
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    graph.graph.node[0].CopyFrom(node)
    graph.opset_import[1].domain = "com.microsoft"
    stock = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session(model(576, 128, 4, packed, scales)).run(None, {"x": rows})[0]
    wanted = stock.run(None, {"x": rows})[0]
    assert np.abs(got - wanted).max() <= 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("bits", (4, 8))
def test_scales_are_held_in_16_bits(bits: int) -> None:
    """Rounded to the nearest; what has no finite one is refused."""
    packed, scales = weights(48, 96, bits)
    rows = rows_of(3, 96)
    fine = scales * np.float32(1 + 2e-4)
    rounded = fine.astype(np.float16).astype(np.float32)
    assert not np.array_equal(rounded, fine)
    got, wanted = (session(model(96, 48, bits, packed, by)).run(None, {"x": rows})[0] for by in (fine, rounded))
    assert np.array_equal(got, wanted)
    for scale, name in ((np.inf, "inf"), (np.nan, "nan"), (65520.0, "65520"), (-1e30, "-10000000")):
        scales[-1, -1] = scale
        with pytest.raises(Exception, match=f"a scale is {name}.*holds up to 65504"):
            session(model(96, 48, bits, packed, scales))
    scales[-1, -1] = 65519.0
    session(model(96, 48, bits, packed, scales))


def test_any_rank_and_no_rows() -> None:
    packed, scales = weights(48, 64, 4)
    graph = onnx.load_from_string(model(64, 48, 4, packed, scales))
    graph.graph.input[0].type.tensor_type.ClearField("shape")
    run = session(graph.SerializeToString())
    rows = rows_of(6, 64)
    flat = run.run(None, {"x": rows})[0]
    assert np.array_equal(run.run(None, {"x": rows.reshape(2, 3, 64)})[0], flat.reshape(2, 3, 48))
    assert run.run(None, {"x": rows[:0]})[0].shape == (0, 48)
    with pytest.raises(Exception, match="last axis must be K = 64"):
        run.run(None, {"x": rows[:, :63]})


HOSTILE: Sequence[dict[str, Any]] = (
    {"K": 0},
    {"K": -1},
    {"K": 1 << 40},
    {"K": 96},
    {"K": 65},
    {"N": 0},
    {"N": 49},
    {"N": 47},
    {"N": (1 << 63) - 1},
    {"bits": 8},
    {"bits": 5},
    {"bits": 2},
    {"block_size": 0},
    {"block_size": 16},
    {"block_size": 128},
)


@pytest.mark.parametrize("changed", HOSTILE, ids=str)
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    packed, scales = weights(48, 64, 4)
    with pytest.raises(Exception, match="MatMulBlocks: "):
        session(model(64, 48, 4, packed, scales, **changed))


def test_missing_attributes_and_wrong_tensors_are_refused() -> None:
    packed, scales = weights(48, 64, 4)
    for attribute in ("K", "N", "bits", "block_size"):
        graph = onnx.load_from_string(model(64, 48, 4, packed, scales))
        node = graph.graph.node[0]
        kept = [a for a in node.attribute if a.name != attribute]
        del node.attribute[:]
        node.attribute.extend(kept)
        with pytest.raises(Exception, match=f"attribute {attribute} is missing"):
            session(graph.SerializeToString())
    for wrong in (packed[:-1], packed[:, :1], packed[:, :, :-1]):
        with pytest.raises(Exception, match="the weights are"):
            session(model(64, 48, 4, np.ascontiguousarray(wrong), scales))
    with pytest.raises(Exception, match="the scales are"):
        session(model(64, 48, 4, packed, scales[:-1]))
    graph = onnx.load_from_string(model(64, 48, 4, packed, scales))
    graph.graph.input.append(helper.make_tensor_value_info("w", TensorProto.UINT8, list(packed.shape)))
    with pytest.raises(Exception, match="must be an initializer"):
        session(graph.SerializeToString())


def test_a_path_nobody_knows() -> None:
    with pytest.raises(Exception, match="cannot run here; those that can"), native_ops.forced_path("sse17"):
        pass


def gated(inputs: int, columns: int, bits: int, tensors: Sequence[Any]) -> bytes:
    """A graph of one GatedBlocks node over (gate, its scales, up, its scales)."""
    sizes = {"K": inputs, "N": columns, "bits": bits, "block_size": 32}
    names = ["gw", "gs", "uw", "us"]
    node = helper.make_node("GatedBlocks", ["x", *names], ["y"], domain=native_ops.DOMAIN, **sizes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(tensor, name) for tensor, name in zip(tensors, names, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_ops.DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize(("inputs", "columns", "bits"), ((96, 64, 4), (70, 43, 8), (320, 500, 4)))
def test_gated_products(inputs: int, columns: int, bits: int, path: str) -> None:
    """SiLU of one product times the other, from the two products' own bits; a row's own bits in any company."""
    parts = [weights(columns, inputs, bits, seed) for seed in (3, 4)]
    rows = rows_of(29, inputs)
    rows[2] *= 1e4  # far out on both sides of the sigmoid
    with native_ops.forced_path(path):
        run = session(gated(inputs, columns, bits, [*parts[0], *parts[1]]), 2)
        gate, up = (
            session(model(inputs, columns, bits, *part)).run(None, {"x": rows})[0].astype(np.float64) for part in parts
        )
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    got = run.run(None, {"x": rows})[0]
    assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()
    close = np.abs(got - wanted) <= 1e-6 * np.abs(wanted) + 1e-30
    assert close.all()
    for count in (1, 2, 12, 13, 29):
        assert np.array_equal(run.run(None, {"x": rows[:count]})[0].view(np.uint32), got[:count].view(np.uint32))
