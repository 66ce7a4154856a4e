"""The draft as one tiny native graph: projection, block and what proposing asks of the logits.

Beside the stock pair (`draft_graph`), and over its weights, it saves a call a round and passes over the vocabulary:
rows come as taps or as the draft's own states, taps first, and the outputs are log-probabilities and the likeliest ids.
Products that fit and the attention are the native operators': its `parents` [W] are those of all nodes since the last
commit, the nodes of earlier calls first.
"""

import logging
from pathlib import Path

import onnx_ir as ir

from elsi_edge.errors import ModelError
from elsi_edge.export import surgery
from elsi_edge.export.native_graph import use_native_attention, use_native_products

_log = logging.getLogger(__name__)

MOST_LIKELY = 8  # ids a row that the graph names: a tree's widest beam


def write_native_draft(directory: Path, out: Path) -> bool:
    """Write the native form of draft.onnx and projection.onnx of `directory` beside them.

    False, and no file, where no product fits (fp32).
    """
    model, projection = (surgery.load_graph(directory / f"{name}.onnx") for name in ("draft", "projection"))
    try:
        _project_inside(model, projection)
        use_native_products(model)
        use_native_attention(model)
    except ModelError as error:
        _log.info("no native draft: %s", error)
        return False
    _answer_inside(model)
    surgery.save_graph(model, out)
    return True


def _project_inside(model: ir.Model, projection: ir.Model) -> None:
    """Put the projection before the block: its rows [1, P, E] come first, then those of `state` [1, T - P, E]."""
    graph = model.graph
    (node,) = list(projection.graph)
    taps, projected = node.inputs[0], node.outputs[0]
    state = next(value for value in graph.inputs if value.name == "state")
    if taps is None or state.shape is None or taps.shape is None:
        raise ModelError("the draft's graphs do not have the inputs they are written with; export again")
    weights = [projection.graph.initializers.pop(value.name) for value in node.inputs[1:] if value is not None]
    projection.graph.inputs.clear()
    projection.graph.outputs.clear()
    projection.graph.remove(node)
    for weight in weights:
        if weight.name in graph.initializers:
            raise ModelError(f"both graphs of the draft have weights {weight.name}; export again")
        graph.register_initializer(weight)
    projected.name = "projected"
    # ONNX Runtime shares buffers between values whose named dimensions agree.
    width = state.shape[-1]
    taps.shape, projected.shape = ir.Shape([1, "P", taps.shape[-1]]), ir.Shape([1, "P", width])
    state.shape = ir.Shape([1, "O", width])
    uses = list(state.uses())
    both = ir.node("Concat", [projected, state], attributes={"axis": 1}, name="/states")
    both.outputs[0].name, both.outputs[0].shape = "states", ir.Shape([1, "T", width])
    both.outputs[0].type = state.type
    first = next(iter(graph))
    graph.insert_before(first, [node, both])
    for use in uses:
        use.node.replace_input_with(use.idx, both.outputs[0])
    graph.inputs.append(taps)


def _answer_inside(model: ir.Model) -> None:
    """Replace the logits [1, R, U] by `log_probs` [1, R, U] and the `likeliest` ids [1, R, K], likeliest first."""
    graph = model.graph
    place, logits = next((i, value) for i, value in enumerate(graph.outputs) if value.name == "logits")
    softmax = ir.node("LogSoftmax", [logits], attributes={"axis": -1}, name="/log_probs")
    count = ir.Value(name="likeliest_count", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    vocabulary = logits.shape[-1] if logits.shape is not None else None
    if not isinstance(vocabulary, int):
        raise ModelError("the draft's graph does not say how many tokens it predicts; export again")
    count.const_value = ir.tensor([min(MOST_LIKELY, vocabulary)], name=count.name)
    graph.register_initializer(count)
    top = ir.node("TopK", [logits, count], attributes={"axis": -1}, num_outputs=2, name="/likeliest")
    graph.extend([softmax, top])
    for value, name, kind, width in (
        (softmax.outputs[0], "log_probs", ir.DataType.FLOAT, vocabulary),
        (top.outputs[1], "likeliest", ir.DataType.INT64, min(MOST_LIKELY, vocabulary)),
    ):
        value.name, value.type, value.shape = name, ir.TensorType(kind), ir.Shape([1, "R", width])
    top.outputs[0].name = "likeliest_logits"
    graph.outputs[place] = softmax.outputs[0]
    graph.outputs.append(top.outputs[1])
