"""ONNX graphs of one node, written by hand: the device has no onnx package, and needs one to try its kernels.

The bytes follow onnx.proto3 (field numbers beside each part).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_TYPES = {"float32": 1, "uint8": 2, "int32": 6}  # TensorProto.DataType by numpy's name
_INT, _FLOATING = 2, 1  # AttributeProto.AttributeType


def node(
    op: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    domain: str = "",
    numbers: Mapping[str, int] | None = None,
    floats: Mapping[str, float] | None = None,
) -> bytes:
    """NodeProto; an input named "" is left out."""
    attributes = b"".join(
        field(5, field(1, name.encode()) + _number(3, value) + _number(20, _INT))
        for name, value in (numbers or {}).items()
    )
    attributes += b"".join(
        field(5, field(1, name.encode()) + _single(2, value) + _number(20, _FLOATING))
        for name, value in (floats or {}).items()
    )
    wires = b"".join(field(1, name.encode()) for name in inputs)
    wires += b"".join(field(2, name.encode()) for name in outputs)
    return wires + field(3, b"n") + field(4, op.encode()) + attributes + field(7, domain.encode())


def tensor(name: str, array: NDArray[np.generic]) -> bytes:
    """TensorProto with raw data."""
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, _TYPES[str(array.dtype)]) + field(8, name.encode()) + field(9, array.tobytes())


def value(name: str, kind: str, dims: Sequence[int | str]) -> bytes:
    """ValueInfoProto of a tensor; a dimension is a number or has a name."""
    shape = b"".join(field(1, field(2, size.encode()) if isinstance(size, str) else _number(1, size)) for size in dims)
    return field(1, name.encode()) + field(2, field(1, _number(1, _TYPES[kind]) + field(2, shape)))


def model(
    only: bytes,
    *,
    inputs: Sequence[bytes],
    outputs: Sequence[bytes],
    tensors: Sequence[bytes],
    domains: Mapping[str, int],
) -> bytes:
    """ModelProto of one node; `domains` are the operator sets by name."""
    graph = field(1, only) + field(2, b"g")
    graph += b"".join(field(5, one) for one in tensors)
    graph += b"".join(field(11, one) for one in inputs) + b"".join(field(12, one) for one in outputs)
    opsets = b"".join(field(8, field(1, name.encode()) + _number(2, version)) for name, version in domains.items())
    return _number(1, 10) + field(7, graph) + opsets  # ir_version, graph, opset_import


def field(number: int, content: bytes) -> bytes:
    """A field with content of its own length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, content: int) -> bytes:
    return _varint(number << 3) + _varint(content)


def _single(number: int, content: float) -> bytes:
    return _varint(number << 3 | 5) + np.float32(content).tobytes()


def _varint(content: int) -> bytes:
    out = bytearray()
    while content > 127:
        out.append(content & 127 | 128)
        content >>= 7
    out.append(content)
    return bytes(out)
