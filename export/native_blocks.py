"""Whole blocks of a native graph as one operator each: DecoderBlock, for models whose blocks are Llama's.

What it takes in is the residual stream, what it yields the stream after the block: the norm of a block's entry, which
`use_native_products` folded together with the sum before it, goes to the block itself, and the sum to the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

_SKIP_NORM, _NORM = "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization"
_WEIGHTS = {"MatMulBlocks": 1, "NormMatMulBlocks": 3, "GatedBlocks": 1, "NormGatedBlocks": 3}  # place of the first
_CACHES = slice(1, 7)  # of TreeAttention's inputs: caches, angles, cached, parents
_ATTENTION = ("num_heads", "kv_num_heads", "window", "scale", "softcap")


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The nodes of one block, its entry's norm included."""

    entry: ir.Node  # NormMatMulBlocks; or, of the first block, MatMulBlocks behind a norm of its own
    attention: ir.Node
    output: ir.Node  # MatMulBlocks
    gated: ir.Node  # NormGatedBlocks
    down: ir.Node  # MatMulBlocks

    @property
    def products(self) -> tuple[ir.Node, ...]:
        return self.entry, self.output, self.gated, self.down


def fold_blocks(model: ir.Model, domain: str) -> int:
    """Replace every block by one node; returns how many, 0 where one of them is of another kind and all stay."""
    attentions = [node for node in model.graph if node.op_type == "TreeAttention"]
    found = [_block(node) for node in attentions]
    blocks = [block for block in found if block is not None]
    if not blocks or len(blocks) < len(found) or not _follow_each_other(blocks):
        return 0
    stream = _stream_into(blocks[0])
    if stream is None:
        return 0
    for block in blocks:
        stream = _fold(model, block, stream, domain)
    last = blocks[-1]
    norm = _reader(last.down.outputs[0])
    assert norm is not None
    first = _entry_norm(blocks[0])
    assert first is not None
    attributes = {**first.attributes, "epsilon": ir.AttrFloat32("epsilon", _attribute(norm, "epsilon"))}
    final = ir.node(_NORM, [stream, norm.inputs[2]], attributes=attributes, domain=first.domain, name=norm.name)
    final.outputs[0].name = f"{norm.name}/output_0"
    model.graph.insert_before(norm, final)
    ir.convenience.replace_all_uses_with(norm.outputs[0], final.outputs[0], replace_graph_outputs=True)
    _take_sum(norm.outputs, stream)
    model.graph.remove(norm, safe=True)
    for block in reversed(blocks):
        for node in (block.down, block.gated, block.output, block.attention, block.entry):
            model.graph.remove(node, safe=True)
    model.graph.remove(first, safe=True)
    return len(blocks)


def _block(attention: ir.Node) -> _Block | None:
    """The block around an attention; None where it is no Llama block."""
    value = attention.inputs[0]
    entry = None if value is None else value.producer()
    output = _reader(attention.outputs[0])
    gated = None if output is None else _reader(output.outputs[0])
    down = None if gated is None else _reader(gated.outputs[0])
    if entry is None or output is None or gated is None or down is None:
        return None
    kinds = (entry.op_type, output.op_type, gated.op_type, down.op_type)
    if kinds[0] not in ("NormMatMulBlocks", "MatMulBlocks") or kinds[1:] != (
        "MatMulBlocks",
        "NormGatedBlocks",
        "MatMulBlocks",
    ):
        return None
    block = _Block(entry=entry, attention=attention, output=output, gated=gated, down=down)
    bits = {_attribute(node, "bits") for node in block.products}
    shifts = {len(_weights(node)) > (4 if node is gated else 2) for node in block.products}
    alone = entry.outputs[0].uses() and len(entry.outputs[0].uses()) == 1
    return block if len(bits) == len(shifts) == 1 and alone else None


def _follow_each_other(blocks: list[_Block]) -> bool:
    """Whether each block's two halves of the stream meet in the next one's entry, and the last one's in a norm."""
    for block, after in pairwise(blocks):
        if after.entry.op_type != "NormMatMulBlocks" or not _joins(block, after.entry):
            return False
        if _attribute(after.entry, "epsilon") != _attribute(after.gated, "epsilon"):
            return False
    norm = _reader(blocks[-1].down.outputs[0])
    return norm is not None and norm.op_type == _SKIP_NORM and len(norm.inputs) == 3 and _joins(blocks[-1], norm)


def _joins(block: _Block, node: ir.Node) -> bool:
    """Whether `node` sums the middle of the stream and what the block's last product yields, and alone reads both."""
    halves = (block.gated.outputs[1], block.down.outputs[0])
    return set(node.inputs[:2]) == set(halves) and all(len(value.uses()) == 1 for value in halves)


def _entry_norm(first: _Block) -> ir.Node | None:
    value = first.entry.inputs[0]
    norm = None if value is None else value.producer()
    alone = norm is not None and norm.op_type == _NORM and len(norm.outputs[0].uses()) == 1
    return norm if alone else None


def _stream_into(first: _Block) -> ir.Value | None:
    """What the first block reads: the embeddings, which its own norm and its middle take."""
    norm = _entry_norm(first)
    if first.entry.op_type != "MatMulBlocks" or norm is None:
        return None
    stream = norm.inputs[0]
    same = _attribute(norm, "epsilon") == _attribute(first.gated, "epsilon")
    return stream if same and stream in first.gated.inputs[:2] else None


def _fold(model: ir.Model, block: _Block, stream: ir.Value, domain: str) -> ir.Value:
    """Put a DecoderBlock before the block's attention and let it take over the caches; yields the stream behind it."""
    entry, attention, gated = block.entry, block.attention, block.gated
    normed = entry.op_type == "NormMatMulBlocks"
    gamma = entry.inputs[2] if normed else _gamma(block)
    levels = [value for node in block.products for value in _pairs(node)[0]]
    shifts = [value for node in block.products for value in _pairs(node)[1]]
    numbers: dict[str, int | float] = {name: _attribute(attention, name) for name in _ATTENTION}
    numbers |= {
        "width": _attribute(entry, "K"),
        "qkv": _attribute(entry, "N"),
        "attended": _attribute(block.output, "K"),
        "mlp": _attribute(gated, "N"),
        "bits": _attribute(entry, "bits"),
        "epsilon": _attribute(gated, "epsilon"),
    }
    node = ir.node(
        "DecoderBlock",
        [stream, *attention.inputs[_CACHES], gamma, gated.inputs[2], *levels, *shifts],
        attributes=numbers,
        domain=domain,
        num_outputs=3,
        name=attention.name,
    )
    model.graph.insert_before(attention, node)
    after = node.outputs[0]
    after.name, after.type = f"{attention.name}/stream", ir.TensorType(ir.DataType.FLOAT)
    for old, new in zip(attention.outputs[1:], node.outputs[1:], strict=True):
        new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = f"{new.name}/before"
    if normed:
        _take_sum(entry.outputs, stream)
    return after


def _take_sum(outputs: Sequence[ir.Value], stream: ir.Value) -> None:
    """Readers of the sum that comes beside the normed rows, as the last output, read the stream itself."""
    if len(outputs) > 1:
        ir.convenience.replace_all_uses_with(outputs[-1], stream, replace_graph_outputs=True)


def _gamma(block: _Block) -> ir.Value | None:
    norm = _entry_norm(block)
    assert norm is not None
    return norm.inputs[1]


def _weights(node: ir.Node) -> list[ir.Value | None]:
    return list(node.inputs[_WEIGHTS[node.op_type] :])


def _pairs(node: ir.Node) -> tuple[list[ir.Value | None], list[ir.Value | None]]:
    """Levels and scales of a product's matrices, and those of their shifts."""
    weights, plain = _weights(node), 4 if node.op_type == "NormGatedBlocks" else 2
    return weights[:plain], weights[plain:]


def _attribute(node: ir.Node, name: str) -> int | float:
    attribute = node.attributes.get(name)
    value: int | float = 0 if attribute is None else attribute.value
    return value


def _reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value."""
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 else None
