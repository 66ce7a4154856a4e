"""The second, tiny graph of a bundle: the stock graph with the native operators' names in it, over the same weights file.

MatMulNBits with 4- or 8-bit weights in symmetric blocks of 32 becomes MatMulBlocks; what does not fit stays as it is.
"""

from dataclasses import dataclass

import onnx_ir as ir

from elsi_edge.errors import ModelError

DOMAIN = "elsi.edge"  # as elsi_edge.runtime.native_ops has it; the rooms do not import each other
_BLOCK = 32
_EXTRA_INPUTS = slice(3, None)  # of MatMulNBits: zero points, g_idx, bias


@dataclass(frozen=True, kw_only=True)
class NativeChange:
    """What was replaced in a graph."""

    products: int  # MatMulNBits nodes
    left: int  # MatMulNBits nodes that do not fit


def use_native_products(model: ir.Model) -> NativeChange:
    """Replace every matrix product that the native kernels can run. Raises ModelError when there is none."""
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    fitting = [node for node in products if _fits(node)]
    if not fitting:
        raise ModelError(
            f"none of the graph's {len(products)} quantised products has symmetric 4- or 8-bit weights in blocks of "
            f"{_BLOCK}; the native operators cannot run it"
        )
    for node in fitting:
        _replace(model, node)
    model.opset_imports[DOMAIN] = 1
    return NativeChange(products=len(fitting), left=len(products) - len(fitting))


def _fits(node: ir.Node) -> bool:
    return (
        _integer(node, "bits", 4) in (4, 8)
        and _integer(node, "block_size", 0) == _BLOCK
        and _integer(node, "accuracy_level", 0) == 4
        and all(value is None for value in node.inputs[_EXTRA_INPUTS])
    )


def _replace(model: ir.Model, node: ir.Node) -> None:
    sizes = {name: _integer(node, name, 0) for name in ("K", "N", "bits", "block_size")}
    native = ir.node("MatMulBlocks", list(node.inputs[:3]), attributes=sizes, domain=DOMAIN, name=node.name)
    old, new = node.outputs[0], native.outputs[0]
    new.name, new.shape, new.type = old.name, old.shape, old.type
    model.graph.insert_before(node, native)
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, new)
    for index, output in enumerate(model.graph.outputs):
        if output is old:
            model.graph.outputs[index] = new
    model.graph.remove(node, safe=True)


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())
