"""The draft's two graphs: the projection of the taps, and the blocks with their reduced-vocabulary head.

One graph of the blocks serves both modes, since its `state` input is either projected taps of the target or the draft's
own output. The embedding lookup is the target's own nodes: it names the same bytes of the same weights file.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.artifacts import BITS, BLOCK, DraftConfig, Precision
from elsi_edge.bundle import DRAFT_VOCAB_FILE, GraphRole
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.draft.shapes import block_prefixes
from elsi_edge.export import embedding, native_draft, surgery
from elsi_edge.export.rounding import ACCURACY_LEVEL

_EMBEDDED = "embedded"
_MICROSOFT = "com.microsoft"


def write_draft(
    out: Path, draft: LoadedDraft, *, base: Path, precision: Precision, positions: int
) -> dict[GraphRole, str]:
    """Write draft.onnx, projection.onnx and the vocabulary map into `out`; `base` is the target graph beside it.

    The tables of angles reach to `positions` tokens.

    draft-native.onnx is both in one over the same weights, where the native operators can run their products.
    """
    projection = _quantised(_projection(draft), precision)
    ir.save(ir.from_proto(projection), out / "projection.onnx", external_data="projection.weights")
    block = _quantised(_block(draft, positions), precision)
    path = out / "draft.onnx"
    ir.save(ir.from_proto(block), path, external_data="draft.weights")
    graph = surgery.load_graph(path)  # its tensors now name their place in draft.weights
    embedding.embed_with(graph, surgery.load_graph(base), _EMBEDDED)
    surgery.save_graph(graph, path)
    np.save(out / DRAFT_VOCAB_FILE, draft.draft_to_target_ids, allow_pickle=False)
    graphs: dict[GraphRole, str] = {"draft": "draft.onnx", "projection": "projection.onnx"}
    if native_draft.write_native_draft(out, out / "draft-native.onnx"):
        graphs["draft-native"] = "draft-native.onnx"
    return graphs


def _projection(draft: LoadedDraft) -> onnx.ModelProto:
    config = draft.config
    nodes = [helper.make_node("MatMul", ["taps", "projection.weight"], ["state"], name="/projection/MatMul")]
    inputs = [_floats("taps", [1, "T", config.m * config.embedding_width])]
    outputs = [_floats("state", [1, "T", config.width])]
    return _model(nodes, inputs, outputs, {"projection.weight": draft.tensors["projection.weight"].T})


def _block(draft: LoadedDraft, positions: int) -> onnx.ModelProto:
    config, tensors = draft.config, draft.tensors
    weights = {
        name: tensor if name.endswith("norm.weight") else tensor.T
        for name, tensor in tensors.items()
        if name != "projection.weight"
    }
    weights["cos_cache"], weights["sin_cache"] = rotary_tables(config, positions)
    cache: list[int | str] = [1, config.kv_heads, "C", config.head_width]
    caches = [f"{block}.{kind}" for block in range(config.depth) for kind in ("key", "value")]
    inputs = [
        _floats(_EMBEDDED, [1, "T", config.embedding_width]),
        _floats("state", [1, "T", config.width]),
        helper.make_tensor_value_info("logit_rows", TensorProto.INT64, ["R"]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, [1, "T"]),
        _floats("attention_bias", [1, 1, "T", "S_plus_T"]),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []),
        *(_floats(f"past_key_values.{name}", cache) for name in caches),
    ]
    outputs = [
        _floats("logits", [1, "R", config.draft_vocab_size]),
        _floats("next_state", [1, "T", config.width]),
        *(_floats(f"present.{name}", cache) for name in caches),
    ]
    return _model(_nodes(config), inputs, outputs, weights)


def _nodes(config: DraftConfig) -> list[onnx.NodeProto]:
    """The network of `elsi_edge.draft.network.DraftNetwork`, node by node."""
    eps = config.norm_eps
    prefixes = block_prefixes(config)
    nodes = [
        _norm(_EMBEDDED, "embed_norm.weight", "embed_normed", eps),
        _norm("state", "state_norm.weight", "state_normed", eps),
        helper.make_node("Concat", ["embed_normed", "state_normed"], ["both"], name="/both", axis=-1),
    ]
    read, state = "both", "state"
    for index, prefix in enumerate(prefixes):
        last = index + 1 == len(prefixes)
        norm = "final_norm.weight" if last else f"{prefixes[index + 1]}state_norm.weight"
        result = ("final_normed", "next_state") if last else (f"{prefix}finished_normed", f"{prefix}finished")
        nodes += _block_nodes(config, index, prefix, read=read, state=state, norm=norm, result=result)
        read, state = result
    return [
        *nodes,
        helper.make_node("Gather", ["final_normed", "logit_rows"], ["wanted"], name="/wanted", axis=1),
        _product("wanted", "head.weight", "logits"),
    ]


def _block_nodes(
    config: DraftConfig, index: int, prefix: str, *, read: str, state: str, norm: str, result: tuple[str, str]
) -> list[onnx.NodeProto]:
    """One block over `state`, whose fused qkv reads `read`; yields the normed and the un-normed state, `result`."""

    def own(name: str) -> str:
        return f"{prefix}{name}"

    def add_norm(first: str, second: str, weight: str, normed: str, total: str) -> onnx.NodeProto:
        operator, outputs = "SkipSimplifiedLayerNormalization", [normed, "", "", total]
        name = f"/{normed}"
        return helper.make_node(
            operator, [first, second, weight], outputs, name, domain=_MICROSOFT, epsilon=config.norm_eps
        )

    attention = helper.make_node(
        "GroupQueryAttention",
        [
            *(own("qkv"), "", "", f"past_key_values.{index}.key", f"past_key_values.{index}.value"),
            *("seqlens_k", "total_sequence_length", "cos_cache", "sin_cache", "position_ids", "attention_bias"),
        ],
        [own("attended"), f"present.{index}.key", f"present.{index}.value"],
        name=f"/{own('attention')}",
        domain=_MICROSOFT,
        num_heads=config.heads,
        kv_num_heads=config.kv_heads,
        scale=config.head_width**-0.5,
        do_rotary=1,
        rotary_interleaved=0,
    )
    return [
        _product(read, own("qkv.weight"), own("qkv")),
        attention,
        _product(own("attended"), own("o.weight"), own("mixed")),
        add_norm(state, own("mixed"), own("mlp_norm.weight"), own("mlp_normed"), own("residual")),
        _product(own("mlp_normed"), own("gate.weight"), own("gated")),
        _product(own("mlp_normed"), own("up.weight"), own("raised")),
        helper.make_node("Sigmoid", [own("gated")], [own("sigmoid")], name=f"/{own('sigmoid')}"),
        helper.make_node("Mul", [own("gated"), own("sigmoid")], [own("silu")], name=f"/{own('silu')}"),
        helper.make_node("Mul", [own("silu"), own("raised")], [own("swiglu")], name=f"/{own('swiglu')}"),
        _product(own("swiglu"), own("down.weight"), own("lowered")),
        add_norm(own("residual"), own("lowered"), norm, *result),
    ]


def _norm(source: str, weight: str, result: str, eps: float) -> onnx.NodeProto:
    attributes = {"epsilon": eps, "axis": -1, "stash_type": 1}
    return helper.make_node("SimplifiedLayerNormalization", [source, weight], [result], f"/{result}", **attributes)


def _product(source: str, weight: str, result: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", [source, weight], [result], name=f"/{result}/MatMul")


def rotary_tables(config: DraftConfig, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [P, D / 2] of Llama's half-split rotary embedding, for at most the draft's context."""
    inverse = config.rope_theta ** (-np.arange(0, config.head_width, 2) / config.head_width)
    angles = np.arange(min(positions, config.context))[:, None] * inverse[None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _quantised(model: onnx.ModelProto, precision: Precision) -> onnx.ModelProto:
    """Matrices to MatMulNBits with the target's recipe; fp32 stays as it is."""
    if precision == "fp32":
        return model
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.WARNING)
    quantiser = MatMulNBitsQuantizer(
        model, bits=BITS[precision], block_size=BLOCK, is_symmetric=True, accuracy_level=ACCURACY_LEVEL
    )
    quantiser.process()
    result: onnx.ModelProto = quantiser.model.model
    return result


def _floats(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, NDArray[Any]],
) -> onnx.ModelProto:
    initialisers = [
        numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name) for name, value in weights.items()
    ]
    graph = helper.make_graph(nodes, "draft", inputs, outputs, initialisers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="elsi-edge")
