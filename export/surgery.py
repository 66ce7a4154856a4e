"""From the model builder's graph to the graphs that the runtime loop needs.

The onnxruntime-genai builder writes a fused graph with an attention-mask subgraph, no taps, and logits for every row.
Here it becomes, without touching the weights file:

- inputs `seqlens_k` [1] int32 and `total_sequence_length` [] int32 in place of the attention-mask subgraph;
- an input `logit_rows` [R] int64: the rows whose logits are wanted (a prefill wants one, a verification all of them);
- taps: the residual stream entering block t as an extra output;
- **tree** form: `position_ids` [1, T] int64 and `attention_bias` [1, 1, T, S + T] float32 wired to every attention.
  Blocks that see the last W positions only read `attention_bias.W` instead: the operator's own window counts columns,
  and in a tree those are not positions. In the other forms they are, and the operator's window stays;
- **chain** form (the exact mode of int4 and int8): every attention sees one more query row, a copy of the last one,
  which is dropped after it. GroupQueryAttention sums in another order for one query row than for several; with at
  least two rows always, one token a step and many a step agree bit for bit. The extra key and value land beyond the end
  of the cache's used part and are overwritten by the next step;
- **batch** form (distillation's answers): plain attention over [B, T], `seqlens_k` [B]. Either T = 1 and every sequence
  has a length of its own, or B = 1: that is what the operator allows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from elsi_edge.errors import ModelError
from elsi_edge.runtime.tree import bias_name

GraphForm = Literal["tree", "chain"]

_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
_PRODUCTS = ("MatMul", "MatMulNBits")
_GQA_TABLES = (7, 8)  # cosines and sines, inputs of com.microsoft.GroupQueryAttention
_GQA_POSITION_IDS, _GQA_ATTENTION_BIAS = 9, 10  # inputs of com.microsoft.GroupQueryAttention
_GQA_SEQLENS_K, _GQA_TOTAL = 5, 6
_WINDOW = "local_window_size"  # attribute of com.microsoft.GroupQueryAttention: columns, the row's own included
_WINDOW_CACHE = "sliding_window_cache"  # one that lets go of what lies before the window; ours holds every position
_SKIP_RESIDUAL = 3  # output of SkipSimplifiedLayerNormalization: the sum that enters the norm


def load_graph(path: Path) -> ir.Model:
    """Read a graph; tensors stay in their external file."""
    return ir.load(path)


def save_graph(model: ir.Model, path: Path) -> None:
    """Write a graph whose external tensors stay where they are."""
    ir.save(model, path)


def attentions(model: ir.Model) -> list[ir.Node]:
    """The attention nodes in block order."""
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if not nodes:
        raise ModelError("the exported graph has no GroupQueryAttention node; this model family is not supported")
    return nodes


def replace_mask_subgraph(model: ir.Model) -> None:
    """Feed `seqlens_k` and `total_sequence_length` directly; drop `attention_mask` and what was computed from it."""
    seqlens = ir.Value(name="seqlens_k", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT32))
    total = ir.Value(name="total_sequence_length", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT32))
    for node in attentions(model):
        node.replace_input_with(_GQA_SEQLENS_K, seqlens)
        node.replace_input_with(_GQA_TOTAL, total)
    mask = graph_input(model, "attention_mask")
    remove_unused(model)
    if mask.uses():
        raise ModelError("the exported graph uses attention_mask outside the attention nodes; family not supported")
    model.graph.inputs.remove(mask)
    model.graph.inputs.extend([seqlens, total])


def select_logit_rows(model: ir.Model) -> None:
    """Gather the rows named by `logit_rows` before the lm_head; logits become [1, R, V]."""
    head = lm_head(model)
    rows = ir.Value(name="logit_rows", shape=ir.Shape(["R"]), type=ir.TensorType(ir.DataType.INT64))
    hidden = head.inputs[0]
    assert hidden is not None
    gather = ir.node("Gather", [hidden, rows], attributes={"axis": 1}, name="/logit_rows/Gather")
    gather.outputs[0].name = "/logit_rows/output_0"
    model.graph.insert_before(head, gather)
    head.replace_input_with(0, gather.outputs[0])
    model.graph.inputs.append(rows)
    logits = _graph_output(model, "logits")
    logits.shape = ir.Shape([1, "R", logits.shape[2] if logits.shape is not None else None])


def residuals(model: ir.Model) -> list[ir.Value]:
    """Taps 0..L: the residual stream entering each block, and the one after the last block before the final norm."""
    values = [_residual_into(_norm_before(node)) for node in attentions(model)]
    values.append(_residual_into(_norm_before(lm_head(model))))
    return values


def final_norm_state(model: ir.Model) -> ir.Value:
    """The state after the final norm, which the lm_head reads (EAGLE-2's input)."""
    return _norm_before(lm_head(model)).outputs[0]


def add_tap_output(model: ir.Model, values: Sequence[ir.Value], width: int, name: str = "taps") -> None:
    """Add one output [1, T, M*E]: the given taps side by side, in the order given."""
    if len(values) == 1:
        node = ir.node("Identity", [values[0]], name=f"/{name}/Identity")
    else:
        node = ir.node("Concat", list(values), attributes={"axis": -1}, name=f"/{name}/Concat")
    output = node.outputs[0]
    output.name = name
    output.shape = ir.Shape([1, "T", len(values) * width])
    output.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.append(node)
    model.graph.outputs.append(output)


def wire_tree_inputs(model: ir.Model) -> None:
    """Positions and an additive mask for every attention: rows are tree nodes, positions their depths."""
    _drop_position_ids(model)
    positions = ir.Value(name="position_ids", shape=ir.Shape([1, "T"]), type=ir.TensorType(ir.DataType.INT64))
    biases: dict[str, ir.Value] = {}
    for node in attentions(model):
        name = bias_name(window_of(node))
        if name not in biases:
            shape = ir.Shape([1, 1, "T", "S_plus_T"])
            biases[name] = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
        _set_input(node, _GQA_POSITION_IDS, positions)
        _set_input(node, _GQA_ATTENTION_BIAS, biases[name])
        set_window(node, -1)
    model.graph.inputs.extend([positions, *biases.values()])


def window_of(node: ir.Node) -> int:
    """Positions that an attention sees, itself included; -1 for all."""
    attribute = node.attributes.get(_WINDOW)
    return -1 if attribute is None else int(attribute.as_int())


def set_window(node: ir.Node, window: int) -> None:
    """Let an attention see the last `window` columns, -1 for all, in a cache that holds every position."""
    node.attributes.pop(_WINDOW_CACHE, None)
    if window_of(node) != window:
        node.attributes[_WINDOW] = ir.AttrInt64(_WINDOW, window)


def append_query_row(model: ir.Model) -> None:
    """Give every attention one more query row, a copy of the last, and drop its output row (exact chain form)."""
    last = constant(model, "/chain/last", [-1])
    start, end, axis = (constant(model, f"/chain/{n}", [v]) for n, v in (("start", 0), ("end", -1), ("axis", 1)))
    for index, node in enumerate(attentions(model)):
        for place, name in enumerate(("query", "key", "value")):  # packed in the first, or one each
            rows = node.inputs[place]
            if rows is None:
                continue
            copy = ir.node("Gather", [rows, last], attributes={"axis": 1}, name=f"/chain/{index}/{name}/Gather")
            longer = ir.node(
                "Concat", [rows, copy.outputs[0]], attributes={"axis": 1}, name=f"/chain/{index}/{name}/Concat"
            )
            model.graph.insert_before(node, [_named(copy), _named(longer)])
            node.replace_input_with(place, longer.outputs[0])
        output = node.outputs[0]
        cut = _named(ir.node("Slice", [output, start, end, axis], name=f"/chain/{index}/Slice"))
        model.graph.insert_after(node, cut)
        for use in list(output.uses()):
            if use.node is not cut:
                use.node.replace_input_with(use.idx, cut.outputs[0])
    _forget_shapes(model)


def free_batch_axis(model: ir.Model) -> None:
    """Let the first axis of every input and output be B (batch form); logits become [B, R, V]."""
    _drop_position_ids(model)
    for value in [*model.graph.inputs, *model.graph.outputs]:
        if value.name == "seqlens_k":
            value.shape = ir.Shape(["B"])
        elif value.name not in ("logit_rows", "total_sequence_length") and value.shape is not None:
            value.shape = ir.Shape(["B", *list(value.shape)[1:]])
    _forget_shapes(model)


def static_batch_one(model: ir.Model) -> None:
    """Name the axes of inputs and outputs in this project's letters; the batch is 1 by design."""
    for value in [*model.graph.inputs, *model.graph.outputs]:
        name = value.name or ""
        if name == "input_ids":
            value.shape = ir.Shape([1, "T"])
        elif name.startswith(("past_key_values", "present")) and value.shape is not None:
            value.shape = ir.Shape([1, value.shape[1], "C", value.shape[3]])


def _drop_position_ids(model: ir.Model) -> None:
    for value in list(model.graph.inputs):
        if value.name == "position_ids":
            if value.uses():
                raise ModelError("the exported graph computes rotary positions outside the attention; not supported")
            model.graph.inputs.remove(value)


def _forget_shapes(model: ir.Model) -> None:
    """The builder's recorded shapes say T rows everywhere, and ONNX Runtime reuses buffers by them."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None


# --- small helpers -------------------------------------------------------------------------------------------------


def graph_input(model: ir.Model, name: str) -> ir.Value:
    """An input by name. Raises ModelError."""
    for value in model.graph.inputs:
        if value.name == name:
            return value
    raise ModelError(f"the exported graph has no input {name!r}; the model builder's version is not the tested one")


def _graph_output(model: ir.Model, name: str) -> ir.Value:
    for value in model.graph.outputs:
        if value.name == name:
            return value
    raise ModelError(f"the exported graph has no output {name!r}; the model builder's version is not the tested one")


def lm_head(model: ir.Model) -> ir.Node:
    """The matrix product that the logits come from. Raises ModelError."""
    node = _graph_output(model, "logits").producer()
    while node is not None and node.op_type not in _PRODUCTS:
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node is None:
        raise ModelError("the exported graph's logits do not come from a matrix product; family not supported")
    return node


def _norm_before(node: ir.Node) -> ir.Node:
    """The nearest norm upstream, along first inputs, of a matrix product: the one whose input is a residual stream.

    From an attention that is the norm before its query projection; norms of the heads themselves lie after that.
    """
    current: ir.Node | None = node
    passed_product = False
    while current is not None:
        passed_product = passed_product or current.op_type in _PRODUCTS
        value = current.inputs[0]
        current = value.producer() if value is not None else None
        if current is not None and current.op_type in _NORMS and passed_product:
            return current
    raise ModelError(f"found no norm before {node.name}; this model family is not supported")


def _residual_into(norm: ir.Node) -> ir.Value:
    if norm.op_type == "SimplifiedLayerNormalization":
        value = norm.inputs[0]
        assert value is not None
        return value
    if len(norm.outputs) <= _SKIP_RESIDUAL:
        norm.resize_outputs(_SKIP_RESIDUAL + 1)
        for skipped in norm.outputs[1:_SKIP_RESIDUAL]:  # optional outputs of the operator that nobody reads
            skipped.name = skipped.name or ""
    residual = norm.outputs[_SKIP_RESIDUAL]
    if not residual.name:
        residual.name = f"{norm.name}/residual"
        residual.type = ir.TensorType(ir.DataType.FLOAT)
    return residual


def _named(node: ir.Node) -> ir.Node:
    """Name the node's only output after it."""
    node.outputs[0].name = f"{node.name}/output_0"
    return node


def _set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def initializer(model: ir.Model, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ir.Value:
    """A new weight of the graph."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def constant(model: ir.Model, name: str, values: list[int]) -> ir.Value:
    """An int64 vector as an initializer, made once per name."""
    existing = model.graph.initializers.get(name)
    if existing is not None:
        return existing
    tensor = ir.tensor(values, dtype=ir.DataType.INT64, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.INT64), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def cut_rotary_tables(model: ir.Model, rows: int) -> None:
    """Keep the first `rows` positions of the tables of angles: of a long model's they are a tenth of its bundle."""
    for node in attentions(model):
        for place in _GQA_TABLES:
            table = node.inputs[place] if place < len(node.inputs) else None
            if table is None or table.const_value is None or table.const_value.shape[0] <= rows:
                continue
            table.const_value = ir.tensor(np.ascontiguousarray(table.const_value.numpy()[:rows]), name=table.name)
            table.shape = table.const_value.shape


def remove_unused(model: ir.Model) -> None:
    """Drop nodes and weights that nothing reads."""
    outputs = set(model.graph.outputs)
    for node in reversed(list(model.graph)):
        if all(not value.uses() and value not in outputs for value in node.outputs):
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and value not in outputs:
            model.graph.initializers.pop(name)
