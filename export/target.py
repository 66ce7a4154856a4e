"""The target's graphs of a bundle: one weights file, and small graphs that name parts of it."""

from pathlib import Path

import onnx_ir as ir

from elsi_edge.artifacts import LayerSelection, ModelShape, Precision
from elsi_edge.bundle import NATIVE_PRODUCTS, GraphRole
from elsi_edge.export import native_graph, surgery

STATES_PREFIX = "tap."  # outputs tap.0 ... tap.L of the states graph


def write_target_graphs(
    base: Path, out: Path, *, shape: ModelShape, precision: Precision, selection: LayerSelection | None
) -> dict[GraphRole, str]:
    """Write the target's graphs beside the weights file in `out`; `base` is the graph that names it.

    - `target-tree`: positions and mask as inputs; at fp32 every mode uses it.
    - `target-chain` (int4 and int8): the exact mode, see `elsi_edge.export.surgery`.
    - `target-native` (int4 and int8, where the family allows): exact for trees too, with the native operators.
    - `target-states` (without a selection): every tap as an output, for distillation; a complete bundle needs none.
    - `target-batch` (without a selection): one token each of many sequences, for distillation's answers.
    - both of these again with the native products, at int4 and int8.
    """
    graphs: dict[GraphRole, str] = {"target-tree": "target-tree.onnx"}
    _write(base, out / "target-tree.onnx", shape, selection, chain=False)
    if precision != "fp32":
        graphs["target-chain"] = "target-chain.onnx"
        _write(base, out / "target-chain.onnx", shape, selection, chain=True)
        if native_graph.write_native_graph(out / "target-tree.onnx", out / "target-native.onnx"):
            graphs["target-native"] = "target-native.onnx"
    if selection is None:
        graphs["target-states"] = "target-states.onnx"
        _write_states(base, out / "target-states.onnx", shape)
        graphs["target-batch"] = "target-batch.onnx"
        _write_batch(base, out / "target-batch.onnx")
        for role, native in NATIVE_PRODUCTS.items():
            if native_graph.write_native_graph(out / graphs[role], out / f"{native}.onnx", attention=False):
                graphs[native] = f"{native}.onnx"
    return graphs


def _write(base: Path, path: Path, shape: ModelShape, selection: LayerSelection | None, *, chain: bool) -> None:
    model = surgery.load_graph(base)
    if selection is not None:
        surgery.add_tap_output(model, _tapped(model, selection), shape.width)
    if chain:
        surgery.append_query_row(model)
    else:
        surgery.wire_tree_inputs(model)
    surgery.save_graph(model, path)


def _tapped(model: ir.Model, selection: LayerSelection) -> list[ir.Value]:
    if selection.state == "final-norm":
        return [surgery.final_norm_state(model)]
    values = surgery.residuals(model)
    return [values[tap] for tap in selection.taps]


def _write_states(base: Path, path: Path, shape: ModelShape) -> None:
    model = surgery.load_graph(base)
    for tap, value in enumerate(surgery.residuals(model)):
        surgery.add_tap_output(model, [value], shape.width, f"{STATES_PREFIX}{tap}")
    surgery.add_tap_output(model, [surgery.final_norm_state(model)], shape.width, f"{STATES_PREFIX}final-norm")
    surgery.wire_tree_inputs(model)
    surgery.save_graph(model, path)


def _write_batch(base: Path, path: Path) -> None:
    model = surgery.load_graph(base)
    surgery.free_batch_axis(model)
    surgery.save_graph(model, path)
