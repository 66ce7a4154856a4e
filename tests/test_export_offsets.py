"""Blocks of 4 bits with offsets: what they hold exactly, what the graph with them computes, what a recipe says."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from elsi_edge.artifacts import BLOCK
from elsi_edge.errors import UsageError
from elsi_edge.export import offsets
from elsi_edge.export.native_graph import use_native_products
from elsi_edge.export.quantise import quantise_graph
from elsi_edge.export.recipe import Recipe, make_recipe
from elsi_edge.export.rounding import Floats, quantise

Array = np.ndarray[Any, Any]


def q4_1(draw: np.random.Generator, rows: int, blocks: int) -> Floats:
    """A matrix as a Q4_1 file holds one: float16 scales and minima, each block with its lowest and highest level."""
    scales = draw.uniform(0.001, 0.02, (rows, blocks)).astype(np.float16).astype(np.float32)
    lowest = (scales * draw.uniform(-11, -4, (rows, blocks))).astype(np.float16).astype(np.float32)
    levels = draw.integers(0, 16, (rows, blocks, BLOCK))
    levels[..., 3], levels[..., 17] = 0, 15
    return np.asarray(scales[..., None] * levels + lowest[..., None], np.float32).reshape(rows, -1)


def decoded(made: offsets.OffsetBlocks) -> Floats:
    levels = np.stack([made.levels & 15, made.levels >> 4], -1).reshape(*made.levels.shape[:2], BLOCK)
    shift = offsets.decode_offsets(made.offsets, made.offset_scales, made.levels.shape[1])
    blocks = (levels.astype(np.float32) - 8) * made.scales[..., None] + shift[..., None]
    return np.asarray(blocks, np.float32).reshape(len(made.levels), -1)


def graph_of(weight: Floats) -> ir.Model:
    """y = x W^T by the name that the builder gives such a product."""
    outputs, inputs = weight.shape
    x = ir.Value(name="x", shape=ir.Shape([1, "T", inputs]), type=ir.TensorType(ir.DataType.FLOAT))
    w = ir.Value(name="w", const_value=ir.tensor(np.ascontiguousarray(weight.T), name="w"))
    node = ir.node("MatMul", [x, w], name="/model/layers.0/mlp/down_proj/MatMul")
    y = node.outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape([1, "T", outputs]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [y], nodes=[node], initializers=[w], opset_imports={"": 21, "com.microsoft": 1})
    return ir.Model(graph, ir_version=10)


def run_graph(model: ir.Model, rows: Floats) -> Floats:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    result: Floats = session.run(None, {"x": rows[None]})[0][0]
    return result


@pytest.mark.parametrize("blocks", [1, 3, 48])
def test_a_q4_1_matrix_keeps_its_weights(blocks: int) -> None:
    weight = q4_1(np.random.default_rng(blocks), 40, blocks)
    made = offsets.quantise_with_offsets(weight)
    assert np.array_equal(made.scales, made.scales.astype(np.float16).astype(np.float32))
    error = np.abs(decoded(made) - weight).reshape(40, blocks, BLOCK).max(-1)
    assert (error < 0.2 * made.scales).all()  # of a level; symmetric blocks are off by half a level
    assert np.median(error / made.scales) < 0.03
    again = offsets.quantise_with_offsets(weight, np.eye(weight.shape[1]))  # nothing to make up for
    assert np.abs(decoded(again) - weight).max() <= 1.01 * np.abs(decoded(made) - weight).max()


@pytest.mark.parametrize("blocks", [2, 40])
def test_compensated_levels_keep_the_products_with_correlated_inputs(blocks: int) -> None:
    draw, width = np.random.default_rng(blocks), blocks * BLOCK
    weight = draw.normal(size=(24, width)).astype(np.float32) + np.float32(0.3)
    inputs = draw.normal(size=(3 * width, width // 4)) @ draw.normal(size=(width // 4, width))
    inputs += 0.1 * draw.normal(size=inputs.shape)

    def error(found: Floats) -> float:
        return float(np.square(inputs @ (found - weight).T).mean())

    hessian = inputs.T @ inputs / len(inputs)
    made = offsets.quantise_with_offsets(weight, hessian)
    assert error(decoded(made)) < 0.3 * error(decoded(offsets.quantise_with_offsets(weight)))
    symmetric, scales = quantise(weight, 4, "compensated", hessian)
    levels = np.stack([symmetric & 15, symmetric >> 4], -1).reshape(24, blocks, BLOCK).astype(np.float32) - 8
    assert error(decoded(made)) < error((levels * scales[..., None]).reshape(24, -1))
    assert np.array_equal(made.scales, made.scales.astype(np.float16).astype(np.float32))
    nothing = offsets.quantise_with_offsets(np.zeros((3, width), np.float32), hessian)
    assert not decoded(nothing).any()


def test_one_sided_and_constant_blocks() -> None:
    weight = np.full((2, 2 * BLOCK), 0.5, np.float32)
    weight[1, :BLOCK] = np.linspace(1.0, 1.3, BLOCK)
    found = decoded(offsets.quantise_with_offsets(weight))
    assert np.abs(found - weight).max() < 0.02  # symmetric blocks would be off by 0.08
    zero = offsets.quantise_with_offsets(np.zeros((3, BLOCK), np.float32))
    assert not decoded(zero).any()


def test_what_does_not_fit() -> None:
    assert offsets.fits(np.zeros((4, 64), np.float32))
    assert not offsets.fits(np.zeros((4, 80), np.float32))
    assert not offsets.fits(np.full((4, 32), np.nan, np.float32))
    assert not offsets.fits(np.full((4, 32), 7e4, np.float32))


def test_the_graph_computes_with_offsets_and_rows_do_not_depend_on_each_other() -> None:
    draw = np.random.default_rng(5)
    weight, rows = q4_1(draw, 24, 18), draw.normal(size=(7, 18 * BLOCK)).astype(np.float32)
    model = graph_of(weight)
    assert quantise_graph(model, Recipe()).with_offsets == 1
    found, wanted = run_graph(model, rows), rows @ weight.T
    with_offsets = float(np.abs(found - wanted).max())
    plain = graph_of(weight)
    assert quantise_graph(plain, Recipe(offsets=False)).with_offsets == 0
    assert with_offsets < 0.25 * float(np.abs(run_graph(plain, rows) - wanted).max())
    assert all(np.array_equal(run_graph(model, rows[i : i + 1])[0], found[i]) for i in range(len(rows)))


def test_the_native_form_is_one_node() -> None:
    model = graph_of(q4_1(np.random.default_rng(6), 24, 3))
    quantise_graph(model, Recipe())
    change = use_native_products(model)
    assert (change.products, change.with_offsets, change.left) == (1, 1, 0)
    assert [(node.op_type, len(node.inputs)) for node in model.graph] == [("MatMulBlocks", 5)]


def test_recipes_with_offsets(tmp_path: Path) -> None:
    assert Recipe().has_offsets("layers.0.mlp.up_proj") and not Recipe().has_offsets("lm_head")
    assert Recipe(rounding="compensated").has_offsets("layers.0.mlp.up_proj")
    assert not Recipe(rounding="least-squares").has_offsets("layers.0.mlp.up_proj")
    assert Recipe(lm_head_bits=4).has_offsets("lm_head")
    assert not Recipe(lm_head_bits=4, embedding_bits=4).has_offsets("lm_head")  # lookups know none
    assert not Recipe(matrices={"layers.0.*": 8}).has_offsets("layers.0.mlp.up_proj")
    assert (Recipe().bits_of("lm_head"), Recipe(lm_head_bits=4).bits_of("lm_head")) == (8, 4)
    assert (Recipe(matrices={"lm_*": 4}).bits_of("lm_head"), Recipe(bits=32).bits_of("lm_head")) == (4, 32)
    file = tmp_path / "r.toml"
    file.write_text('offsets = true\nrounding = "least-squares"\n')
    with pytest.raises(UsageError, match="offsets is true and rounding 'least-squares'"):
        make_recipe("int4", file)
    file.write_text('offsets = "yes"\n')
    with pytest.raises(UsageError, match="offsets is 'yes', it must be true or false"):
        make_recipe("int4", file)
