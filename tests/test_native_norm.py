"""Products that read the norm of a residual sum: against the parts alone, and bit for bit over rows and paths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.export import native_graph
from elsi_edge.runtime import native_ops
from tests.test_native_matrix import REPORT, Floats, gated, model, rows_of, session, weights

pytestmark = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)

EPSILON = 1e-5
CASES = (("NormMatMulBlocks", 96, 64, 4), ("NormGatedBlocks", 70, 43, 8), ("NormMatMulBlocks", 576, 100, 8))


def gamma_of(inputs: int) -> Floats:
    return np.random.default_rng(9).uniform(0.5, 2.0, inputs).astype(np.float32)


def parts_of(op: str, inputs: int, columns: int, bits: int) -> list[Any]:
    """The node's weights and scales."""
    count = 2 if "Gated" in op else 1
    return [tensor for seed in range(count) for tensor in weights(columns, inputs, bits, seed + 3)]


def normed(op: str, inputs: int, columns: int, bits: int, gamma: Any, parts: Sequence[Any], **changed: Any) -> bytes:
    """A graph of one node; `changed` replaces attributes."""
    attributes = {"K": inputs, "N": columns, "bits": bits, "block_size": 32, "epsilon": EPSILON} | changed
    names = ["gamma", *(f"w{i}" for i in range(len(parts)))]
    node = helper.make_node(op, ["x", "skip", *names], ["y", "sum"], domain=native_ops.DOMAIN, **attributes)
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", None]) for name in ("x", "skip")]
    graph = helper.make_graph(
        [node],
        "g",
        floats,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "sum")],
        [numpy_helper.from_array(tensor, name) for tensor, name in zip((gamma, *parts), names, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_ops.DOMAIN, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def double_norm(total: Floats, gamma: Floats) -> Floats:
    wide = total.astype(np.float64)
    result: Floats = (wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON) * gamma).astype(np.float32)
    return result


@pytest.mark.parametrize("path", REPORT.paths)
@pytest.mark.parametrize(("op", "inputs", "columns", "bits"), CASES)
def test_against_the_parts_by_themselves(op: str, inputs: int, columns: int, bits: int, path: str) -> None:
    parts, gamma = parts_of(op, inputs, columns, bits), gamma_of(inputs)
    x, skip = rows_of(29, inputs), rows_of(29, inputs, seed=2)
    total = x + skip
    plain = gated(inputs, columns, bits, parts) if "Gated" in op else model(inputs, columns, bits, *parts)
    with native_ops.forced_path(path):
        run, alone = session(normed(op, inputs, columns, bits, gamma, parts), 2), session(plain)
    got, summed = run.run(None, {"x": x, "skip": skip})
    assert np.array_equal(summed, total)
    wanted = alone.run(None, {"x": double_norm(total, gamma)})[0]
    # A last bit of the norm may turn an activation's rounding to 8 bits: one level of 127 in a few of K inputs.
    assert np.abs(got - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert np.median(np.abs(got - wanted)) <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("op", "inputs", "columns", "bits"), CASES)
def test_a_row_has_its_own_bits_on_every_path(op: str, inputs: int, columns: int, bits: int) -> None:
    parts, gamma = parts_of(op, inputs, columns, bits), gamma_of(inputs)
    x, skip = rows_of(64, inputs), rows_of(64, inputs, seed=2)
    results = []
    for path in REPORT.paths:
        with native_ops.forced_path(path):
            run = session(normed(op, inputs, columns, bits, gamma, parts), 2)
        everything = run.run(None, {"x": x, "skip": skip})[0]
        for count in (1, 2, 12, 13, 63):
            few = run.run(None, {"x": x[-count:], "skip": skip[-count:]})[0]
            assert np.array_equal(few.view(np.uint32), everything[-count:].view(np.uint32)), (path, count)
        results.append(everything)
    if "Gated" not in op:  # the sigmoid's exponential has a rounding of its own on each path
        assert all(np.array_equal(result.view(np.uint32), results[0].view(np.uint32)) for result in results)


def test_a_long_prompt_is_shared_out_with_the_same_bits() -> None:
    inputs = 96
    parts, gamma = parts_of("NormMatMulBlocks", inputs, 64, 4), gamma_of(inputs)
    x, skip = rows_of(700, inputs), rows_of(700, inputs, seed=2)
    one, two = (session(normed("NormMatMulBlocks", inputs, 64, 4, gamma, parts), threads) for threads in (1, 2))
    for got, wanted in zip(*(run.run(None, {"x": x, "skip": skip}) for run in (two, one)), strict=True):
        assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32))
    assert np.array_equal(
        two.run(None, {"x": x[5:6], "skip": skip[5:6]})[0][0], one.run(None, {"x": x, "skip": skip})[0][5]
    )


@pytest.mark.parametrize("changed", [{"epsilon": -1.0}, {"epsilon": 2.0}, {"K": 95}, {"bits": 3}])
def test_attributes_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    parts = parts_of("NormMatMulBlocks", 96, 64, 4)
    with pytest.raises(Exception, match=r"epsilon|K, N|says|bits|gamma"):
        session(normed("NormMatMulBlocks", 96, 64, 4, gamma_of(96), parts, **changed))


def test_tensors_that_do_not_fit_are_refused() -> None:
    parts = parts_of("NormMatMulBlocks", 96, 64, 4)
    with pytest.raises(Exception, match=r"gamma is \[95\]"):
        session(normed("NormMatMulBlocks", 96, 64, 4, gamma_of(95), parts))
    run = session(normed("NormMatMulBlocks", 96, 64, 4, gamma_of(96), parts))
    x = rows_of(3, 96)
    with pytest.raises(Exception, match=r"skip is \[2, 96\], x is \[3, 96\]"):
        run.run(None, {"x": x, "skip": x[:2]})
    with pytest.raises(Exception, match="last axis must be K = 96"):
        run.run(None, {"x": x[:, :90], "skip": x[:, :90]})


def block(readers: int) -> ir.Model:
    """norm(x + skip) with so many products that read it; the sum is an output of the graph."""
    packed, scales = weights(64, 96, 4)
    norm = helper.make_node(
        "SkipSimplifiedLayerNormalization", ["x", "skip", "gamma"], ["n", "", "", "sum"], domain="com.microsoft",
        epsilon=EPSILON,
    )  # fmt: skip
    sizes = {"K": 96, "N": 64, "bits": 4, "block_size": 32, "accuracy_level": 4}
    products = [
        helper.make_node("MatMulNBits", ["n", "w", "s"], [f"y{i}"], domain="com.microsoft", **sizes)
        for i in range(readers)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", 96]) for name in ("x", "skip", "sum")]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["T", 64]) for i in range(readers)]
    tensors = [
        numpy_helper.from_array(array, name) for array, name in ((packed, "w"), (scales, "s"), (gamma_of(96), "gamma"))
    ]
    graph = helper.make_graph([norm, *products], "g", values[:2], [*outputs, values[2]], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


@pytest.mark.parametrize(("readers", "folded"), [(1, 1), (2, 0)])
def test_a_norm_is_folded_into_the_one_product_that_reads_it(readers: int, folded: int, tmp_path: Path) -> None:
    stock = ir.to_proto(block(readers)).SerializeToString()
    changed = block(readers)
    assert native_graph.use_native_products(changed).normed == folded
    x, skip = rows_of(5, 96), rows_of(5, 96, seed=2)
    got = session(ir.to_proto(changed).SerializeToString()).run(None, {"x": x, "skip": skip})
    wanted = session(stock).run(None, {"x": x, "skip": skip})
    assert len(got) == readers + 1 and np.array_equal(got[-1], wanted[-1])
    for one, other in zip(got[:-1], wanted[:-1], strict=True):
        assert np.abs(one - other).max() <= 0.02 * np.abs(other).max()
