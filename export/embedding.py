"""The embedding table: read by the target's lookup and the draft, and where it has the same bits by the lm_head."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from elsi_edge.errors import ModelError
from elsi_edge.export import surgery
from elsi_edge.export.recipe import TABLE_BITS
from elsi_edge.export.rounding import quantise

_NAME = "embed_tokens"
_RESHAPE = "/embed/Reshape"


def share_embedding(model: ir.Model, *, bits: int, block: int, vocab_size: int, width: int) -> bool:
    """Let a tied embedding read the lm_head's quantised blocks instead of its own float table.

    Returns whether anything changed: not when a row's last block is padded, which the lookup would read as weights. The
    old table is left for `surgery.remove_unused`.
    """
    head = surgery.lm_head(model)
    if width % block or _lookup(model) is None or head.op_type != "MatMulNBits":
        return False
    weight, scales = head.inputs[1], head.inputs[2]
    assert weight is not None and scales is not None
    shape = surgery.constant(model, "/embed/shape", [vocab_size, width * bits // 8])
    reshape = ir.node("Reshape", [weight, shape], name=_RESHAPE)
    reshape.outputs[0].name = f"{_RESHAPE}/output_0"
    _replace_lookup(model, reshape.outputs[0], scales, bits=bits, block=block, before=[reshape])
    return True


def read_in_place(model: ir.Model) -> None:
    """Let a lookup that shares the lm_head's blocks name their bytes a second time, in its own shape.

    To be called on a graph whose weights lie in their file: ONNX Runtime would compute the Reshape of `share_embedding`
    once per graph when it opens it, and keep a copy of the whole table, for the target and for the draft.
    """
    reshape = next((node for node in model.graph if node.name == _RESHAPE), None)
    if reshape is None:
        return
    blocks, shape = reshape.inputs
    assert blocks is not None and shape is not None and shape.const_value is not None
    stored = blocks.const_value
    if not isinstance(stored, ir.ExternalTensor):
        return
    rows, width = shape.const_value.numpy().tolist()
    name, form = f"{blocks.name}_rows", ir.Shape([rows, width])
    tensor = ir.ExternalTensor(
        stored.location, stored.offset, stored.length, stored.dtype, shape=form, name=name, base_dir=stored.base_dir
    )
    value = ir.Value(name=name, shape=form, type=ir.TensorType(stored.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    ir.convenience.replace_all_uses_with(reshape.outputs[0], value)
    model.graph.remove(reshape, safe=True)
    surgery.remove_unused(model)


def quantise_embedding(model: ir.Model, *, block: int, width: int) -> bool:
    """Store a table whose blocks no lm_head shares in 8 bits: a quarter, and as good as exact.

    Returns whether anything changed: not when a row's last block would be padded, nor without a table.
    """
    table = _table(model)
    if width % block or table is None:
        return False
    packed, scales = quantise(table, TABLE_BITS, "nearest")
    rows = len(packed)
    made = [
        surgery.initializer(model, f"{_NAME}_Q{TABLE_BITS}", packed.reshape(rows, -1)),
        surgery.initializer(model, f"{_NAME}_scales", scales.reshape(rows, -1)),
    ]
    _replace_lookup(model, *made, bits=TABLE_BITS, block=block)
    return True


def _table(model: ir.Model) -> NDArray[np.float32] | None:
    """The float table [V, E] that is looked up; the builder turns a tied one out of the lm_head's weight [E, V]."""
    node = _lookup(model)
    table = None if node is None else node.inputs[0]
    turn = None if table is None else table.producer()
    tied = turn is not None and turn.op_type == "Transpose"
    value = turn.inputs[0] if turn is not None and tied else table
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    found = value.const_value.numpy()
    return np.ascontiguousarray(found.T if tied else found, np.float32)


def _lookup(model: ir.Model) -> ir.Node | None:
    """The Gather that turns token ids into states."""
    ids = surgery.graph_input(model, "input_ids")
    return next((node for node in model.graph if node.op_type == "Gather" and node.inputs[1] is ids), None)


def _replace_lookup(
    model: ir.Model,
    blocks: ir.Value,
    scales: ir.Value,
    *,
    bits: int,
    block: int,
    before: Sequence[ir.Node] = (),
) -> None:
    gather = _lookup(model)
    assert gather is not None
    lookup = ir.node(
        "GatherBlockQuantized",
        [blocks, gather.inputs[1], scales],
        attributes={"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1},
        domain="com.microsoft",
        name="/embed/GatherBlockQuantized",
    )
    lookup.outputs[0].name = "/embed/GatherBlockQuantized/output_0"
    old = gather.outputs[0]
    model.graph.insert_before(gather, [*before, lookup])
    ir.convenience.replace_all_uses_with(old, lookup.outputs[0])
    model.graph.remove(gather, safe=True)


def embed_with(model: ir.Model, target: ir.Model, name: str) -> None:
    """Replace the input `name` of a draft by the target's own lookup of `input_ids` (its tap 0); weights are shared."""
    embedding = surgery.residuals(target)[0]
    cloned: dict[ir.Value, ir.Value] = {}
    ids = ir.Value(name="input_ids", shape=ir.Shape([1, "T"]), type=ir.TensorType(ir.DataType.INT64))
    cloned[surgery.graph_input(target, "input_ids")] = ids
    nodes = [_clone(node, cloned, model) for node in _upstream(embedding)]
    old = surgery.graph_input(model, name)
    first = next(iter(model.graph))
    model.graph.insert_before(first, nodes)
    ir.convenience.replace_all_uses_with(old, cloned[embedding])
    model.graph.inputs.remove(old)
    model.graph.inputs.insert(0, ids)


def _upstream(value: ir.Value) -> list[ir.Node]:
    """The nodes that `value` is computed from, producers first."""
    node = value.producer()
    if node is None:
        return []
    found = []
    for source in node.inputs:
        if source is not None:
            found += [upstream for upstream in _upstream(source) if upstream not in found]
    return [*found, node]


def _clone(node: ir.Node, cloned: dict[ir.Value, ir.Value], model: ir.Model) -> ir.Node:
    inputs = []
    for source in node.inputs:
        if source is not None and source not in cloned:
            if source.const_value is None:
                raise ModelError(f"the embedding lookup reads {source.name}, which is not a weight; not supported")
            copy = ir.Value(name=source.name, shape=source.shape, type=source.type, const_value=source.const_value)
            model.graph.register_initializer(copy)
            cloned[source] = copy
        inputs.append(None if source is None else cloned[source])
    made = ir.node(
        node.op_type,
        inputs,
        attributes=dict(node.attributes),
        domain=node.domain,
        name=node.name,
        num_outputs=len(node.outputs),
    )
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.name = old.name
        cloned[old] = new
    return made
