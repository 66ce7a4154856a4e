"""The builder's float32 graph with its matrices in blocks of 4 or 8 bits, by a recipe."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from elsi_edge.artifacts import BLOCK
from elsi_edge.export import offsets, surgery
from elsi_edge.export.recipe import Recipe, matrix_name
from elsi_edge.export.rounding import ACCURACY_LEVEL, Floats, quantise
from elsi_edge.export.ticker import Ticker

Blocks = tuple[NDArray[np.uint8], Floats]  # levels and scales, as MatMulNBits takes them
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


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """What became of a graph's matrices."""

    by_bits: Mapping[int, int]  # how many got how many bits
    by_rounding: Mapping[str, int]  # how many of those of 8 bits or fewer were rounded how
    with_offsets: int  # how many of those of 4 bits got offsets
    table_bits: int = 32  # of the embedding table


def quantise_graph(
    model: ir.Model, recipe: Recipe, moments: Moments | None = None, say: Callable[[str], None] = lambda _: None
) -> Quantised:
    """Replace each matrix product by MatMulNBits with the recipe's bits; with offsets, by two of them.

    `moments` are for compensated rounding; without, such a matrix is rounded by least squares, or with offsets to the
    nearest levels. The graph may keep float weights that nothing reads any more. Raises UsageError when a pattern of
    the recipe names no matrix.
    """
    found = matrices(model)
    recipe.require_matches(found)
    counts: Counter[int] = Counter()
    roundings: Counter[str] = Counter()
    with_offsets = 0
    slow = sum(recipe.bits_of(name) != 32 and recipe.rounding_of(name) == "compensated" for name in found)
    note = Ticker(say, f"GPTQ: rounding {slow} matrices", total=slow)
    for name, node in found.items():
        bits = recipe.bits_of(name)
        counts[bits] += 1
        if bits == 32:
            continue
        weight, rounding = _weight(node), recipe.rounding_of(name)
        hessian = None
        if rounding == "compensated" and moments is not None:
            hessian = moments(name).astype(np.float64)
        elif rounding == "compensated":
            rounding = "least-squares"
        if recipe.has_offsets(name) and offsets.fits(weight):
            _replace_with_offsets(model, node, offsets.quantise_with_offsets(weight, hessian))
            with_offsets += 1
            rounding = "nearest" if hessian is None else rounding
        else:
            _replace(model, node, bits, quantise(weight, bits, rounding, hessian), inputs=weight.shape[1])
        roundings[rounding] += 1
        if hessian is not None:
            note.step()
    return Quantised(by_bits=dict(counts), by_rounding=dict(roundings), with_offsets=with_offsets)


def _weight(node: ir.Node) -> Floats:
    """The matrix [N, K] float32 of a product."""
    source = node.inputs[1]
    assert source is not None and source.const_value is not None
    return np.ascontiguousarray(source.const_value.numpy().T)


def _replace(model: ir.Model, node: ir.Node, bits: int, blocks: Blocks, *, inputs: int) -> None:
    name = f"{node.name}_Q{bits}"
    product = _product(model, node.inputs[0], blocks, bits=bits, name=name, matrix=_name(node), inputs=inputs)
    _put(model, node, [product])


def _replace_with_offsets(model: ir.Model, node: ir.Node, made: offsets.OffsetBlocks) -> None:
    """y = x times levels + (sums of x over each block) times offsets."""
    rows, name, blocks = node.inputs[0], f"{node.name}_Q{offsets.BITS}", made.levels.shape[1]
    main = _product(
        model,
        rows,
        (made.levels, made.scales),
        bits=offsets.BITS,
        name=name,
        matrix=_name(node),
        inputs=blocks * BLOCK,
    )
    sums, new = _block_sums(model, rows, blocks=blocks)
    extra = _product(
        model,
        sums,
        (made.offsets, made.offset_scales),
        bits=offsets.OFFSET_BITS,
        name=f"{name}_offsets",
        matrix=f"{_name(node)}_offsets",
        inputs=blocks,
    )
    total = ir.node("Add", [main.outputs[0], extra.outputs[0]], name=f"{name}_sum")
    _put(model, node, [*new, main, extra, total])


def _block_sums(model: ir.Model, rows: ir.Value | None, *, blocks: int) -> tuple[ir.Value, list[ir.Node]]:
    """Sums of each block of 32 of `rows` [.., K], and the nodes that are new: products of one input share them."""
    assert rows is not None and rows.name is not None
    name = f"{rows.name}/block_sums"
    for reader, _ in rows.uses():
        if reader.name == f"{name}/Reshape":
            return next(iter(reader.outputs[0].uses()))[0].outputs[0], []
    shape = surgery.constant(model, f"/block_sums/shape_{blocks}", [0, 0, blocks, BLOCK])
    split = ir.node("Reshape", [rows, shape], name=f"{name}/Reshape")
    axes = surgery.constant(model, "/block_sums/axes", [-1])
    total = ir.node("ReduceSum", [split.outputs[0], axes], attributes={"keepdims": 0}, name=f"{name}/ReduceSum")
    return total.outputs[0], [split, total]


def _product(
    model: ir.Model,
    rows: ir.Value | None,
    blocks: Blocks,
    *,
    bits: int,
    name: str,
    matrix: str,
    inputs: int,
) -> ir.Node:
    """MatMulNBits of `rows` [.., `inputs`] and quantised blocks."""
    packed, scales = blocks
    made = [
        surgery.initializer(model, f"{matrix}_Q{bits}", packed),
        surgery.initializer(model, f"{matrix}_scales", scales),
    ]
    sizes = {"K": inputs, "N": packed.shape[0], "bits": bits, "block_size": BLOCK, "accuracy_level": ACCURACY_LEVEL}
    return ir.node("MatMulNBits", [rows, *made], attributes=sizes, domain="com.microsoft", name=name)


def _name(node: ir.Node) -> str:
    source = node.inputs[1]
    assert source is not None and source.name is not None
    name: str = source.name
    return name


def _put(model: ir.Model, node: ir.Node, made: list[ir.Node]) -> None:
    """Put nodes in the place of a product; the last one's output is the product's."""
    for new in made[:-1]:
        new.outputs[0].name = f"{new.name}/output_0"
    old, output = node.outputs[0], made[-1].outputs[0]
    output.name, output.shape, output.type = old.name, old.shape, old.type
    model.graph.insert_before(node, made)
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
