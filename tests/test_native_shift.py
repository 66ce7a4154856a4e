"""Native products of 4-bit weights with a shift a block: double precision, bits over rows, paths, threads; refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.runtime import native_ops
from tests import test_native_matrix as matrix
from tests.test_native_matrix import REPORT, Floats, quantised, rows_of, session

pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

EPSILON = 1e-5
OPS = ("MatMulBlocks", "GatedBlocks", "NormMatMulBlocks", "NormGatedBlocks")


@dataclass(frozen=True, kw_only=True)
class Shifted:
    """weight = scale * (value - 8) + shift, the shifts themselves in 8 bits."""

    packed: NDArray[np.uint8]  # [N, blocks, 16]
    scales: Floats  # [N, blocks]
    shift_values: NDArray[np.uint8]  # [N, ceil(blocks / 32), 32]
    shift_scales: Floats  # [N, ceil(blocks / 32)]

    def shifts(self) -> Floats:
        """[N, blocks]."""
        wide = (self.shift_values.astype(np.float32) - 128) * self.shift_scales[:, :, None]
        return wide.reshape(len(wide), -1)[:, : self.scales.shape[1]]


def shifts_of(wanted: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Values and scales of shifts [N, blocks] in 8 bits; what lies beyond them is 255."""
    columns, blocks = wanted.shape
    parts = matrix.in_blocks(wanted)
    scales = (np.abs(parts).max(axis=2) / 127 + 1e-30).astype(np.float32)
    values = (np.rint(parts / scales[:, :, None]) + 128).astype(np.uint8)
    values.reshape(columns, -1)[:, blocks:] = 255
    return values, scales


def weights(columns: int, blocks: int, seed: int = 0, size: float = 0.02) -> Shifted:
    """All values drawn alike, scales and shifts up to `size` and 8 `size`."""
    packed, scales = matrix.weights(columns, 32 * blocks, 4, seed)
    scales = (scales * (size / 0.02)).astype(np.float16).astype(np.float32)
    draw = np.random.default_rng(seed + 1000)
    values, by = shifts_of((draw.uniform(-8, 8, (columns, blocks)) * size).astype(np.float32))
    return Shifted(packed=packed, scales=scales, shift_values=values, shift_scales=by)


def model(op: str, parts: Sequence[Shifted], **changed: Any) -> bytes:
    """A graph of one node; `changed` replaces attributes."""
    columns, blocks = parts[0].scales.shape
    normed = op.startswith("Norm")
    tensors = [np.random.default_rng(9).uniform(0.5, 2.0, 32 * blocks).astype(np.float32)] if normed else []
    tensors += [tensor for part in parts for tensor in (part.packed, part.scales)]
    tensors += [tensor for part in parts for tensor in (part.shift_values, part.shift_scales)]
    names = [f"w{i}" for i in range(len(tensors))]
    sizes: dict[str, Any] = {"K": 32 * blocks, "N": columns, "bits": 4, "block_size": 32} | changed
    if normed:
        sizes["epsilon"] = EPSILON
    rows, outputs = (["x", "skip"], ["y", "sum"]) if normed else (["x"], ["y"])
    graph = helper.make_graph(
        [helper.make_node(op, [*rows, *names], outputs, domain=native_ops.DOMAIN, **sizes)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", None]) for name in rows],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(tensor, name) for tensor, name in zip(tensors, names, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_ops.DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def reference(rows: Floats, weights: Shifted) -> NDArray[np.float64]:
    """In double precision: the symmetric product, and that of the shifts with each block's sum(q) * row scale, those
    sums being quantised as a row of their own."""
    q, by_row = quantised(rows)
    sums = q.sum(axis=2).astype(np.float32) * by_row  # shape: [T, blocks]
    symmetric = matrix.reference(rows, weights.packed, weights.scales, 4)
    return np.asarray(symmetric + matrix.reference(sums, weights.shift_values, weights.shift_scales, 8))


def bound(rows: Floats, weights: Shifted) -> float:
    """Of rounding in float32, relative to the sum of magnitudes."""
    largest = 8 * np.abs(weights.scales).max() + np.abs(weights.shifts()).max()
    return float(2e-7 * np.abs(rows).max() * largest * rows.shape[1])


def bits_of(values: Floats) -> NDArray[np.uint32]:
    """For comparisons bit for bit."""
    return np.ascontiguousarray(values).view(np.uint32)


SHAPES = ((1, 16), (1, 1), (18, 960), (2, 100), (32, 17), (33, 17), (65, 40))


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize(("blocks", "columns"), SHAPES)
def test_against_double_precision(blocks: int, columns: int, path: str) -> None:
    part, rows = weights(columns, blocks), rows_of(13, 32 * blocks)
    with native_ops.forced_path(path):
        run = session(model("MatMulBlocks", [part]))
    got = run.run(None, {"x": rows})[0]
    assert got.shape == (13, columns)
    assert np.abs(got - reference(rows, part)).max() <= bound(rows, part)


@pytest.mark.parametrize("path", REPORT.paths)
def test_weights_that_are_not_around_zero(path: str) -> None:
    """Q4_1's grid, w = d * q + m: nearer to the weights than 4 bits around zero are, by far where they are skewed."""
    draw = np.random.default_rng(5)
    wide = draw.normal(1.0, 0.2, (48, 4, 32)).astype(np.float32)  # shape: [N, blocks, 32]
    least = wide.min(axis=2)
    steps = ((wide.max(axis=2) - least) / 15).astype(np.float16).astype(np.float32)
    q = np.clip(np.rint((wide - least[:, :, None]) / steps[:, :, None]), 0, 15).astype(np.uint8)
    values, by = shifts_of(least + 8 * steps)
    packed = q[:, :, ::2] | q[:, :, 1::2] << 4
    part = Shifted(packed=packed, scales=steps, shift_values=values, shift_scales=by)
    rows = draw.standard_normal((5, 128)).astype(np.float32)
    with native_ops.forced_path(path):
        got = session(model("MatMulBlocks", [part])).run(None, {"x": rows})[0]
    assert np.abs(got - reference(rows, part)).max() <= bound(rows, part)
    exact = rows.astype(np.float64) @ wide.reshape(48, -1).T.astype(np.float64)
    largest = np.abs(wide).max(axis=2, keepdims=True)
    around_zero = np.clip(np.rint(wide / (largest / 8)), -8, 7) * (largest / 8)
    errors = [np.abs(y - exact).mean() for y in (got, rows.astype(np.float64) @ around_zero.reshape(48, -1).T)]
    assert errors[0] <= 0.6 * errors[1]


@pytest.mark.parametrize("path", REPORT.paths)
def test_a_row_has_its_own_bits(path: str) -> None:
    """In calls of 1 to 64 rows, at every place, on one thread and two."""
    part, rows = weights(500, 10), rows_of(native_ops.EXACT_ROWS, 320)
    with native_ops.forced_path(path):
        runs = [session(model("MatMulBlocks", [part]), threads) for threads in (1, 2)]
    alone = np.concatenate([runs[0].run(None, {"x": rows[i : i + 1]})[0] for i in range(len(rows))])
    for count in range(1, len(rows) + 1):
        for run in runs:
            assert np.array_equal(bits_of(run.run(None, {"x": rows[-count:]})[0]), bits_of(alone[-count:])), count


@pytest.mark.parametrize("size", (0.02, 3e-6, 8000.0))
def test_paths_agree_bit_for_bit(size: float) -> None:
    """With scales among the subnormal 16-bit floats, and up to the largest ones."""
    part, rows = weights(333, 7, size=size), rows_of(17, 224)
    rows[3] = 0
    rows[4] *= np.float32(1e-38)
    rows[5] *= np.float32(1e30)
    results = []
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            results.append(session(model("MatMulBlocks", [part])).run(None, {"x": rows})[0])
    for path, result in zip(REPORT.paths, results, strict=True):
        assert np.array_equal(bits_of(result), bits_of(results[-1])), path
    assert np.abs(results[0][:3] - reference(rows[:3], part)).max() <= bound(rows[:3], part)


def test_no_shift_is_the_symmetric_product() -> None:
    part = weights(40, 3)
    part = replace(part, shift_values=np.full_like(part.shift_values, 128))
    rows = rows_of(4, 96)
    wanted = session(matrix.model(96, 40, 4, part.packed, part.scales)).run(None, {"x": rows})[0]
    assert np.array_equal(session(model("MatMulBlocks", [part])).run(None, {"x": rows})[0], wanted)


@pytest.mark.parametrize("path", REPORT.paths)
def test_not_a_number_stays_in_its_row(path: str) -> None:
    part, rows = weights(40, 2), rows_of(4, 64)
    with native_ops.forced_path(path):
        run = session(model("MatMulBlocks", [part]))
    clean = run.run(None, {"x": rows})[0]
    rows[1, 5], rows[2, 40] = np.nan, -np.inf
    got = run.run(None, {"x": rows})[0]
    assert np.isnan(got[1:3]).all()
    assert np.array_equal(got[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("path", REPORT.paths)
def test_gated_products(path: str) -> None:
    """SiLU of one product times the other, from the two products' own bits: each has shifts of its own."""
    parts, rows = [weights(43, 3, seed) for seed in (3, 4)], rows_of(29, 96)
    with native_ops.forced_path(path):
        run = session(model("GatedBlocks", parts), 2)
        gate, up = (
            session(model("MatMulBlocks", [part])).run(None, {"x": rows})[0].astype(np.float64) for part in parts
        )
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    got = run.run(None, {"x": rows})[0]
    assert (np.abs(got - wanted) <= 1e-6 * np.abs(wanted) + 1e-30).all()


@pytest.mark.parametrize("op", ("NormMatMulBlocks", "NormGatedBlocks"))
def test_normed_products(op: str) -> None:
    """The product of the normed rows; a row's own bits in any company and, but for the sigmoid, on every path."""
    parts = [weights(43, 3, seed) for seed in ((3, 4) if "Gated" in op else (3,))]
    feed = {"x": rows_of(29, 96), "skip": rows_of(29, 96, seed=2)}
    total = (feed["x"] + feed["skip"]).astype(np.float64)
    gamma = np.random.default_rng(9).uniform(0.5, 2.0, 96).astype(np.float32)
    normed = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + EPSILON) * gamma
    results = []
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            run = session(model(op, parts), 2)
            plain = session(model(op.removeprefix("Norm"), parts))
        got, summed = run.run(None, feed)
        assert np.array_equal(summed, feed["x"] + feed["skip"])
        wanted = plain.run(None, {"x": normed.astype(np.float32)})[0]
        # A last bit of the norm may turn an activation's rounding to 8 bits.
        assert np.abs(got - wanted).max() <= 0.02 * np.abs(wanted).max()
        assert np.median(np.abs(got - wanted)) <= 1e-5 * np.abs(wanted).max()
        for count in (1, 2, 12, 13, 28):
            few = run.run(None, {name: rows[-count:] for name, rows in feed.items()})[0]
            assert np.array_equal(bits_of(few), bits_of(got[-count:])), (path, count)
        results.append(got)
    if "Gated" not in op:
        assert all(np.array_equal(bits_of(result), bits_of(results[0])) for result in results)


def with_inputs(op: str, count: int, empty: int | None = None) -> bytes:
    """The graph of that operator with its first `count` inputs, one of them left out."""
    graph = onnx.load_from_string(model(op, [weights(48, 2, seed) for seed in range(1 + ("Gated" in op))]))
    node = graph.graph.node[0]
    names = ["" if index == empty else name for index, name in enumerate(node.input[:count])]
    del node.input[:]
    node.input.extend(names)
    return bytes(graph.SerializeToString())


@pytest.mark.parametrize("op", OPS)
def test_shifts_are_there_for_all_matrices_or_for_none(op: str) -> None:
    plain = ("Norm" in op) * 2 + 1 + (4 if "Gated" in op else 2)
    whole = plain + (4 if "Gated" in op else 2)
    session(with_inputs(op, plain))
    for count in range(plain + 1, whole):
        with pytest.raises(Exception, match=f"there are {count} inputs, it must be {plain}, or {whole} with shifts"):
            session(with_inputs(op, count))
    for empty in range(plain, whole):
        with pytest.raises(Exception, match=f"input {empty} must be an initializer"):
            session(with_inputs(op, whole, empty))


HOSTILE: Sequence[tuple[dict[str, Any], str]] = (
    ({"bits": 8}, "attribute bits is 8, a product with shifts takes 4"),
    ({"K": 63}, "K is 63, a product with shifts takes a multiple of 32"),
    ({"K": 96}, "the weights are"),
    ({"K": 33 * 32}, r"the shift values are \[48, 1, 32\] of type 2, K, N and bits say uint8 \[48, 2, 32\]"),
    ({"N": 47}, r"the shift values are \[48, 1, 32\] of type 2, K, N and bits say uint8 \[47, 1, 32\]"),
)


@pytest.mark.parametrize(("changed", "message"), HOSTILE, ids=str)
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"MatMulBlocks: {message}"):
        session(model("MatMulBlocks", [weights(48, 2)], **changed))


def changed_at(array: Any, value: float) -> Any:
    """A copy with one element replaced."""
    copy = array.copy()
    copy.reshape(-1)[-1] = value
    return copy


def test_tensors_that_do_not_fit_are_refused() -> None:
    good = weights(48, 2)
    last = {"shift_values": changed_at(good.shift_values, 255)}  # padding: of no account
    session(model("MatMulBlocks", [replace(good, **last)]))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"shift_values": good.shift_values[:, :, :31].copy()}, r"the shift values are \[48, 1, 31\]"),
        ({"shift_values": good.shift_values[:47]}, r"the shift values are \[47, 1, 32\]"),
        ({"shift_scales": good.shift_scales[:47]}, r"the shift scales are \[47, 1\] of type 1, K and N say 48"),
        ({"shift_values": good.shift_values.astype(np.float32)}, "(?i)type"),
        ({"shift_scales": good.shift_scales.astype(np.float16)}, "(?i)type"),
    ]
    for scale, name in ((np.inf, "inf"), (np.nan, "nan"), (65520.0, "65520"), (-1e30, "-10000000")):
        cases.append(({"scales": changed_at(good.scales, scale)}, f"a scale is {name}.*holds up to 65504"))
    for scale in (np.inf, np.nan):
        by = changed_at(good.shift_scales, scale)
        cases.append(({"shift_scales": by}, f"a scale of shifts is {scale}, it must be finite"))
    for changed, message in cases:
        with pytest.raises(Exception, match=message):
            session(model("MatMulBlocks", [replace(good, **changed)]))
    session(model("MatMulBlocks", [replace(good, scales=changed_at(good.scales, 65519.0))]))
    graph = onnx.load_from_string(model("MatMulBlocks", [good]))
    graph.graph.input.append(helper.make_tensor_value_info("w3", TensorProto.FLOAT, list(good.shift_scales.shape)))
    with pytest.raises(Exception, match="input 4 must be an initializer"):
        session(graph.SerializeToString())
