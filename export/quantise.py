"""The builder's float32 graph with its matrices in blocks of 4 or 8 bits, by a recipe."""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from elsi_edge.export import surgery
from elsi_edge.export.recipe import Recipe, matrix_name
from elsi_edge.export.rounding import ACCURACY_LEVEL, BLOCK, Floats, Rounding, quantise

Moments = Callable[[str], Floats]  # the mean outer product [K, K] of the inputs of a matrix, by its name


def matrices(model: ir.Model) -> dict[str, ir.Node]:
    """The products of the graph with a constant matrix [K, N], by the names that recipes use."""
    found = {}
    for node in model.graph:
        if node.op_type != "MatMul" or node.domain not in ("", "ai.onnx"):
            continue
        weight, name = node.inputs[1], matrix_name(node.name or "")
        constant = weight is not None and weight.const_value is not None and len(weight.const_value.shape) == 2
        if name is not None and constant:
            found[name] = node
    return found


def quantise_graph(model: ir.Model, recipe: Recipe, moments: Moments | None = None) -> Mapping[int, int]:
    """Replace each matrix product by MatMulNBits with the recipe's bits; returns how many matrices got how many.

    `moments` are for compensated rounding; without, such a recipe is rounded by least squares. The graph may keep float
    weights that nothing reads any more. Raises UsageError when a pattern of the recipe names no matrix.
    """
    found = matrices(model)
    recipe.require_matches(found)
    counts: Counter[int] = Counter()
    for name, node in found.items():
        bits = recipe.bits_of(name)
        counts[bits] += 1
        if bits == 32:
            continue
        if recipe.rounding == "compensated" and moments is not None:
            _replace(model, node, bits, "compensated", moments(name))
        else:
            _replace(model, node, bits, "nearest" if recipe.rounding == "nearest" else "least-squares", None)
    return dict(counts)


def _replace(model: ir.Model, node: ir.Node, bits: int, rounding: Rounding, hessian: Floats | None) -> None:
    source = node.inputs[1]
    assert source is not None and source.const_value is not None and source.name is not None
    weight = np.ascontiguousarray(source.const_value.numpy().T)  # shape: [N, K] float32
    packed, scales = quantise(weight, bits, rounding, None if hessian is None else hessian.astype(np.float64))
    made = [
        surgery.initializer(model, f"{source.name}_Q{bits}", packed),
        surgery.initializer(model, f"{source.name}_scales", scales),
    ]
    product = ir.node(
        "MatMulNBits",
        [node.inputs[0], *made],
        attributes={
            "K": weight.shape[1],
            "N": weight.shape[0],
            "bits": bits,
            "block_size": BLOCK,
            "accuracy_level": ACCURACY_LEVEL,
        },
        domain="com.microsoft",
        name=f"{node.name}_Q{bits}",
    )
    old, new = node.outputs[0], product.outputs[0]
    new.name, new.shape, new.type = old.name, old.shape, old.type
    model.graph.insert_before(node, product)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
