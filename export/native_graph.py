"""The second, tiny graph of a bundle: the stock one with the native operators' names in it, over the same weights.

MatMulNBits with 4- or 8-bit weights in symmetric blocks of 32 becomes MatMulBlocks, with its offsets where it has some
(elsi_edge.export.offsets), and SiLU(product) * product GatedBlocks; a residual sum with its norm that one of these
alone reads is folded into it (NormMatMulBlocks, NormGatedBlocks). What does not fit stays as it is.
GroupQueryAttention becomes TreeAttention: in place of mask, positions and lengths the graph takes `cached` [1] int32,
the slots in use, and `parents` [T] int64, the row of each row's parent, -1 where its parent is the last cached token.
Where rows follow those of earlier calls that are not among the cached, `parents` [W] begins with the parents of those.
The product that yields the logits [1, R, V] becomes LikeliestBlocks: the graph then also yields `likeliest` [1, R], the
token of each row's largest logit, and where its input `logits_wanted` [1] is 0 the logits are [1, 0, V].
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from elsi_edge.artifacts import BLOCK
from elsi_edge.errors import ModelError
from elsi_edge.export import offsets
from elsi_edge.export.native_blocks import fold_blocks
from elsi_edge.export.rounding import ACCURACY_LEVEL
from elsi_edge.export.surgery import attentions, load_graph, save_graph
from elsi_edge.runtime.tree import bias_window

_log = logging.getLogger(__name__)

DOMAIN = "elsi.edge"  # as elsi_edge.runtime.native_ops has it; the rooms do not import each other
_LEVELS = 2  # inputs of a product's own matrix: levels and scales; those of its offsets come after
_EXTRA_INPUTS = slice(3, None)  # of MatMulNBits: zero points, g_idx, bias
_SKIP_NORM, _SUM = "SkipSimplifiedLayerNormalization", 3  # and which of its outputs is the sum before the norm
_SIZES = ("K", "N", "bits", "block_size")  # attributes of both kinds of product
_TREE_WIRES = (0, 1)  # of GroupQueryAttention's inputs from the 10th on: positions and mask, which parents stand for
_STOCK_INPUTS = ("seqlens_k", "total_sequence_length", "position_ids")  # and the masks
_BIAS = 10  # of GroupQueryAttention's inputs: its mask, whose name says the window


@dataclass(frozen=True, kw_only=True)
class NativeChange:
    """What was replaced in a graph."""

    products: int  # matrices, those of gated pairs included
    with_offsets: int  # of those
    gated: int  # pairs of products, SiLU of one times the other, that became GatedBlocks
    normed: int  # norms that were folded into the product that reads them
    left: int  # MatMulNBits nodes that do not fit


def write_native_graph(stock: Path, out: Path, *, attention: bool = True) -> bool:
    """Write the native form of a graph beside it: of one in the tree form, or without `attention` its products alone,
    which serves many sequences and all taps. False, and no file, where the family has none.
    """
    model = load_graph(stock)
    try:
        use_native_products(model)
        if attention:
            use_native_attention(model)
            fold_blocks(model, DOMAIN)
            use_native_head(model)
    except ModelError as error:
        _log.info("no native graph: %s", error)
        return False
    save_graph(model, out)
    return True


def use_native_products(model: ir.Model) -> NativeChange:
    """Replace every matrix product that the native kernels can run. Raises ModelError when there is none."""
    quantised = [node for node in model.graph if node.op_type == "MatMulNBits"]
    fitting = [node for node in quantised if _fits(node)]
    if not fitting:
        raise ModelError(
            f"none of the graph's {len(quantised)} quantised products has symmetric 4- or 8-bit weights in blocks of "
            f"{BLOCK}; the native operators cannot run it"
        )
    with_offsets = sum(_replace_with_offsets(model, node) for node in list(model.graph) if node.op_type == "Add")
    plain = [node for node in model.graph if node.op_type == "MatMulNBits" and _fits(node)]
    for node in plain:
        _swap(model, node, _native_product(node, node.inputs[1:3]))
    gated = sum(_replace_gated(model, node) for node in list(model.graph) if node.op_type == "Mul")
    normed = sum(_fold_norm(model, node) for node in list(model.graph) if node.op_type == _SKIP_NORM)
    model.opset_imports[DOMAIN] = 1
    return NativeChange(
        products=with_offsets + len(plain),
        with_offsets=with_offsets,
        gated=gated,
        normed=normed,
        left=len(quantised) - len(fitting),
    )


def _native_product(node: ir.Node, weights: Sequence[ir.Value | None]) -> ir.Node:
    sizes = {name: _integer(node, name, 0) for name in _SIZES}
    return ir.node("MatMulBlocks", [node.inputs[0], *weights], attributes=sizes, domain=DOMAIN, name=node.name)


def _replace_with_offsets(model: ir.Model, node: ir.Node) -> bool:
    """Replace (x times levels) + (sums of x over blocks) times offsets, as `elsi_edge.export.quantise` writes it."""
    main, extra = (value.producer() if value is not None else None for value in node.inputs)
    if main is None or extra is None or {main.op_type, extra.op_type} != {"MatMulNBits"}:
        return False
    sums = extra.inputs[0].producer() if extra.inputs[0] is not None else None
    split = sums.inputs[0].producer() if sums is not None and sums.inputs[0] is not None else None
    if sums is None or split is None or (split.op_type, sums.op_type) != ("Reshape", "ReduceSum"):
        return False
    alone = all(len(product.outputs[0].uses()) == 1 for product in (main, extra))
    blocks = _integer(main, "K", 0) // BLOCK
    alike = (_integer(extra, "K", 0), _integer(extra, "N", 0)) == (blocks, _integer(main, "N", 0))
    bits = (_integer(main, "bits", 4), _integer(extra, "bits", 4)) == (offsets.BITS, offsets.OFFSET_BITS)
    if not (alone and alike and bits and split.inputs[0] is main.inputs[0] and _fits(main) and _fits(extra)):
        return False
    _swap(model, node, _native_product(main, [*main.inputs[1:3], *extra.inputs[1:3]]))
    for dead in (main, extra):
        model.graph.remove(dead, safe=True)
    for dead in (sums, split):  # products of one input share them
        if not dead.outputs[0].uses():
            model.graph.remove(dead, safe=True)
    return True


def _replace_gated(model: ir.Model, node: ir.Node) -> bool:
    """Replace SiLU(product) * product of one input, where `node` is the last Mul of (g * Sigmoid(g)) * u."""
    silu, up = (value.producer() if value is not None else None for value in node.inputs)
    if silu is None or up is None or silu.op_type != "Mul" or up.op_type != "MatMulBlocks":
        return False
    gate, sigmoid = (value.producer() if value is not None else None for value in silu.inputs)
    if gate is None or sigmoid is None or gate.op_type != "MatMulBlocks" or sigmoid.op_type != "Sigmoid":
        return False
    own = (len(gate.outputs[0].uses()), *(len(n.outputs[0].uses()) for n in (sigmoid, silu, up))) == (2, 1, 1, 1)
    alike = all(_integer(gate, name, 0) == _integer(up, name, 0) for name in _SIZES)
    if not (own and alike and len(gate.inputs) == len(up.inputs)):
        return False
    if sigmoid.inputs[0] is not gate.outputs[0] or gate.inputs[0] is not up.inputs[0]:
        return False
    sizes = {name: _integer(gate, name, 0) for name in _SIZES}
    rows, *first = gate.inputs
    second = up.inputs[1:]
    wires = [rows, *first[:_LEVELS], *second[:_LEVELS], *first[_LEVELS:], *second[_LEVELS:]]
    _swap(model, node, ir.node("GatedBlocks", wires, attributes=sizes, domain=DOMAIN, name=node.name))
    for dead in (silu, sigmoid, gate, up):
        model.graph.remove(dead, safe=True)
    return True


def _fold_norm(model: ir.Model, norm: ir.Node) -> bool:
    """Let the one product that reads a residual sum's norm compute both: two dispatches a block less."""
    normed, middle = norm.outputs[0], norm.outputs[1:_SUM]
    total = norm.outputs[_SUM] if len(norm.outputs) > _SUM else None
    readers = normed.uses()
    if len(norm.inputs) != 3 or len(readers) != 1 or any(value.uses() for value in middle):
        return False
    product, place = next(iter(readers))
    if product.op_type not in ("MatMulBlocks", "GatedBlocks") or place != 0 or normed in model.graph.outputs:
        return False
    attributes = {name: _integer(product, name, 0) for name in _SIZES}
    folded = ir.node(
        f"Norm{product.op_type}",
        [*norm.inputs, *product.inputs[1:]],
        attributes={**attributes, "epsilon": _number(norm, "epsilon")},
        domain=DOMAIN,
        num_outputs=2,
        name=product.name,
    )
    # Where the norm stood: what reads the sum may come before the product.
    model.graph.insert_before(norm, folded)
    _take_over(model, product.outputs[0], folded.outputs[0])
    if total is None:
        folded.outputs[1].name = f"{norm.name}/sum"
    else:
        _take_over(model, total, folded.outputs[1])
    for dead in (product, norm):
        model.graph.remove(dead, safe=True)
    return True


def use_native_attention(model: ir.Model) -> int:
    """Replace every attention of a graph in the tree form; returns how many. Raises ModelError where one cannot be."""
    cached = ir.Value(name="cached", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT32))
    parents = ir.Value(name="parents", shape=ir.Shape(["W"]), type=ir.TensorType(ir.DataType.INT64))
    nodes = attentions(model)
    for node in nodes:
        _replace_attention(model, node, cached, parents)
    for value in list(model.graph.inputs):
        if value.name in _STOCK_INPUTS or bias_window(value.name or "") is not None:
            if value.uses():
                raise ModelError(
                    f"the graph uses {value.name} outside its attentions; the native operators cannot run it"
                )
            model.graph.inputs.remove(value)
    model.graph.inputs.extend([cached, parents])
    model.opset_imports[DOMAIN] = 1
    return len(nodes)


def _replace_attention(model: ir.Model, node: ir.Node, cached: ir.Value, parents: ir.Value) -> None:
    query, key, value, past_key, past_value, _, _, cos, sin, *rest = node.inputs
    others = [name for index, name in enumerate(rest) if name is not None and index not in _TREE_WIRES]
    rotary = _integer(node, "do_rotary", 0) == 1 and _integer(node, "rotary_interleaved", 0) == 0
    if not rotary or others or _integer(node, "smooth_softmax", 0) > 0 or past_key is None or cos is None:
        raise ModelError(
            f"{node.name}: the native attention wants rotary embedding by halves, a cache, and no sinks or scaled "
            "caches; this model family has another kind"
        )
    if key is not None and value is not None:  # not packed
        packed = ir.node("Concat", [query, key, value], attributes={"axis": -1}, name=f"{node.name}/Concat")
        packed.outputs[0].name = f"{packed.name}/output_0"
        model.graph.insert_before(node, packed)
        query = packed.outputs[0]
    mask = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    window = None if mask is None else bias_window(mask.name or "")
    if window is None:
        raise ModelError(f"{node.name} has no mask; the native form is made from the tree form")
    numbers: dict[str, int | float] = {
        "num_heads": _integer(node, "num_heads", 0),
        "kv_num_heads": _integer(node, "kv_num_heads", 0),
        "window": window or -1,
        "scale": _number(node, "scale"),
        "softcap": _number(node, "softcap"),
    }
    wires = [query, past_key, past_value, cos, sin, cached, parents]
    native = ir.node("TreeAttention", wires, attributes=numbers, domain=DOMAIN, num_outputs=3, name=node.name)
    _swap(model, node, native)


def use_native_head(model: ir.Model) -> bool:
    """Let the head find each row's likeliest token; False where the logits are no native product as it is."""
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    head = None if logits is None else logits.producer()
    if head is None or head.op_type != "MatMulBlocks":
        return False
    wanted = ir.Value(name="logits_wanted", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    rows, *weights = head.inputs
    native = ir.node(
        "LikeliestBlocks",
        [rows, wanted, *weights],
        attributes={name: _integer(head, name, 0) for name in _SIZES},
        domain=DOMAIN,
        num_outputs=2,
        name=head.name,
    )
    model.graph.insert_before(head, native)
    _take_over(model, head.outputs[0], native.outputs[0])
    model.graph.remove(head, safe=True)
    likeliest = native.outputs[1]
    likeliest.name, likeliest.type = "likeliest", ir.TensorType(ir.DataType.INT64)
    likeliest.shape = ir.Shape([1, "R"])
    model.graph.inputs.append(wanted)
    model.graph.outputs.append(likeliest)
    return True


def _fits(node: ir.Node) -> bool:
    return (
        _integer(node, "bits", 4) in (4, 8)
        and _integer(node, "block_size", 0) == BLOCK
        and _integer(node, "accuracy_level", 0) == ACCURACY_LEVEL
        and all(value is None for value in node.inputs[_EXTRA_INPUTS])
    )


def _swap(model: ir.Model, node: ir.Node, native: ir.Node) -> None:
    """Put one node in the place of another with as many outputs."""
    model.graph.insert_before(node, native)
    for old, new in zip(node.outputs, native.outputs, strict=True):
        _take_over(model, old, new)
    model.graph.remove(node, safe=True)


def _take_over(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Let `new` be all that `old` was: its name, what reads it, an output of the graph."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, new)
    for index, output in enumerate(model.graph.outputs):
        if output is old:
            model.graph.outputs[index] = new


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())


def _number(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 0.0 if attribute is None else float(attribute.as_float())
