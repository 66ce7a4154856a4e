"""What a matrix's inputs look like: their mean outer products over built-in prompts, for compensated rounding.

Inputs are scaled to unit length first, so that what is kept small is each position's relative error.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import ModelShape
from elsi_edge.export import surgery
from elsi_edge.export.quantise import Moments, matrices
from elsi_edge.export.rounding import Floats
from elsi_edge.export.ticker import Ticker
from elsi_edge.prompts import builtin_calibration_prompts
from elsi_edge.runtime.tree import attention_bias, bias_window
from elsi_edge.text import TextCodec

TOKENS = 6144  # positions measured
LONGEST = 192  # tokens of a prompt
_MOST = 1 << 30  # bytes of outer products held at a time; more matrices take another pass over the prompts


def texts(codec: TextCodec) -> list[list[int]]:
    """Token ids of built-in prompts, some TOKENS of them together."""
    found: list[list[int]] = []
    for row in builtin_calibration_prompts():
        ids = codec.encode_raw(row.turns[0])[:LONGEST]
        if len(ids) > 1:
            found.append(ids)
        if sum(map(len, found)) >= TOKENS:
            break
    return found


def measure(
    graph: Path, ids: Sequence[Sequence[int]], shape: ModelShape, say: Callable[[str], None] = lambda _: None
) -> Moments:
    """The moments of the base graph `graph` over token sequences; matrices are asked for in the graph's order.

    They are computed a group of matrices at a time, each in one pass over the sequences.
    """
    sources: dict[str, str] = {}  # matrix to the value that it multiplies
    widths: dict[str, int] = {}  # matrix to K
    for name, node in matrices(surgery.load_graph(graph)).items():
        source, weight = node.inputs[0], node.inputs[1]
        assert source is not None and weight is not None and weight.const_value is not None
        sources[name], widths[name] = str(source.name), int(weight.const_value.shape.numpy()[0])
    held: dict[str, NDArray[np.float64]] = {}

    def moments(matrix: str) -> Floats:
        if sources[matrix] not in held:
            names, size = list(sources), 0
            wanted: dict[str, int] = {}
            for name in names[names.index(matrix) :]:
                if sources[name] not in wanted:
                    size += 8 * widths[name] ** 2
                    if size > _MOST and wanted:
                        break
                    wanted[sources[name]] = widths[name]
            held.clear()
            tokens = sum(map(len, ids))
            what = f"GPTQ: measuring what {len(wanted)} matrices multiply over {tokens} tokens"
            say(what)
            held.update(_outer_products(graph, wanted, ids, shape, Ticker(say, what, total=tokens)))
        return held[sources[matrix]].astype(np.float32)

    return moments


def _outer_products(
    graph: Path, wanted: dict[str, int], ids: Sequence[Sequence[int]], shape: ModelShape, note: Ticker
) -> dict[str, NDArray[np.float64]]:
    model = surgery.load_graph(graph)
    surgery.wire_tree_inputs(model)
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    for name in wanted:
        if values[name] not in model.graph.outputs:
            values[name].type = ir.TensorType(ir.DataType.FLOAT)
            model.graph.outputs.append(values[name])
    path = graph.with_name("moments.onnx")
    surgery.save_graph(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    empty = {
        value.name: np.zeros((1, shape.kv_heads, 0, shape.head_width), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values")
    }
    windows = {v.name: window for v in session.get_inputs() if (window := bias_window(v.name)) is not None}
    sums = {name: np.zeros((width, width)) for name, width in wanted.items()}
    count = 0
    for row in ids:
        length = len(row)
        places, seen = np.arange(length), np.tri(length, dtype=np.bool_)
        feeds = {
            **empty,
            **{name: attention_bias(seen, 0, window=w, depths=places) for name, w in windows.items()},
            "input_ids": np.array([row], np.int64),
            "logit_rows": places,
            "position_ids": places[None],
            "seqlens_k": np.array([length - 1], np.int32),
            "total_sequence_length": np.array(length, np.int32),
        }
        for name, inputs in zip(wanted, session.run(list(wanted), feeds), strict=True):
            # Each position counts alike: those few with states a hundred times larger would decide everything.
            rows = inputs[0] / np.maximum(np.linalg.norm(inputs[0], axis=-1, keepdims=True), 1e-12)  # shape: [T, K]
            sums[name] += rows.T @ rows
        count += length
        note.step(length)
    return {name: total / count for name, total in sums.items()}
