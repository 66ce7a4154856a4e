"""A model of one attention and nothing else: the native operator or ONNX Runtime's, for tests and timings alike."""

from typing import Any

import onnxruntime as ort
from onnx import TensorProto, helper

from elsi_edge.runtime import native_ops

OUTPUTS = ("y", "key", "value")
_RANKS = {
    "qkv": 3, "past_key": 4, "past_value": 4, "cos": 2, "sin": 2, "cached": 1, "parents": 1, "seqlens_k": 1, "total": 0,
}  # fmt: skip
_TYPES = {
    "cached": TensorProto.INT32,
    "parents": TensorProto.INT64,
    "seqlens_k": TensorProto.INT32,
    "total": TensorProto.INT32,
}
_NATIVE = ("qkv", "past_key", "past_value", "cos", "sin", "cached", "parents")
_STOCK = ("qkv", "", "", "past_key", "past_value", "seqlens_k", "total", "cos", "sin")


def open_native(options: ort.SessionOptions, **attributes: Any) -> ort.InferenceSession:
    """A session over TreeAttention; the operators are registered with `options`."""
    native_ops.register(options)
    return _open("TreeAttention", native_ops.DOMAIN, _NATIVE, options, attributes)


def open_stock(options: ort.SessionOptions, **attributes: Any) -> ort.InferenceSession:
    """A session over GroupQueryAttention, rotary embedding inside."""
    return _open("GroupQueryAttention", "com.microsoft", _STOCK, options, {"do_rotary": 1, **attributes})


def _open(
    operator: str, domain: str, wires: tuple[str, ...], options: ort.SessionOptions, attributes: dict[str, Any]
) -> ort.InferenceSession:
    node = helper.make_node(operator, wires, OUTPUTS, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(
                name, _TYPES.get(name, TensorProto.FLOAT), [f"{name}{axis}" for axis in range(_RANKS[name])]
            )
            for name in wires
            if name
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
