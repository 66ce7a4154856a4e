"""ONNX graphs of one matrix product, written by hand: the device has no onnx package, and needs one to try its kernels.

The bytes follow onnx.proto3 (field numbers beside each part).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.errors import BundleError
from elsi_edge.runtime import native_ops

Weights = Sequence[tuple[str, NDArray[Any]]]

_FLOAT, _UINT8 = 1, 2  # TensorProto.DataType
_BLOCK = 32  # weights that share a scale, as exports have it
_LEVEL = 4  # MatMulNBits' accuracy level: activations in 8 bits
_MOST = 0.01  # relative difference of one row from the same among four: rounding is below 1e-6


def matrix_session(
    rows_in: int, rows_out: int, *, bits: int, threads: int, seed: int = 0, native: bool = False
) -> tuple[ort.InferenceSession, int]:
    """A session over x [T, rows_in] -> y [T, rows_out] with random weights of 4, 8 or 32 bits.

    With `native` by this package's operator, for 4 and 8 bits. Returns it with the weights' bytes. Raises ProviderError
    where the native operators cannot run.
    """
    draw = np.random.default_rng(seed)
    if bits == 32:
        weights: Weights = [("w", draw.standard_normal((rows_in, rows_out)).astype(np.float32))]
        node = _node("MatMul", ["x", "w"])
    else:
        blocks = rows_in // _BLOCK
        packed = draw.integers(0, 256, (rows_out, blocks, _BLOCK * bits // 8), dtype=np.uint8)
        scales = draw.uniform(0.5, 1.5, rows_out * blocks).astype(np.float32)
        weights = [("w", packed), ("s", scales)]
        numbers = {"K": rows_in, "N": rows_out, "bits": bits, "block_size": _BLOCK}
        if native:
            node = _node("MatMulBlocks", ["x", "w", "s"], domain=native_ops.DOMAIN, numbers=numbers)
        else:
            numbers["accuracy_level"] = _LEVEL
            node = _node("MatMulNBits", ["x", "w", "s"], domain="com.microsoft", numbers=numbers)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if native:
        native_ops.register(options)
    model = _model(node, weights, rows_in, rows_out)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, sum(array.nbytes for _, array in weights)


def require_sound_kernel(bits: int) -> None:
    """Raise BundleError where this CPU's kernel for quantised products gives one row another result than four.

    Such kernels exist (microsoft/onnxruntime#29853, asymmetric int4 on AVX2), and what they answer is nonsense.
    """
    session, _ = matrix_session(128, 64, bits=bits, threads=1)
    rows = np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)  # shape: [T, K]
    four = session.run(None, {"x": rows})[0]
    one = np.concatenate([session.run(None, {"x": rows[i : i + 1]})[0] for i in range(4)])
    difference = float(np.abs(one - four).max() / np.abs(four).max())
    if not difference <= _MOST:
        raise BundleError(
            f"the int{bits} kernel (MatMulNBits) of ONNX Runtime {ort.__version__} is broken on this CPU: one row and "
            f"four rows differ by {difference:.1%}, at most {_MOST:.0%} is rounding; use another version, or fp32"
        )


def _model(node: bytes, weights: Weights, rows_in: int, rows_out: int) -> bytes:
    graph = _field(1, node) + _field(2, b"g")
    for name, array in weights:
        graph += _field(5, _tensor(name, array))
    graph += _field(11, _value("x", rows_in)) + _field(12, _value("y", rows_out))
    opsets = b"".join(
        _field(8, _field(1, domain.encode()) + _number(2, version))
        for domain, version in (("", 21), ("com.microsoft", 1), (native_ops.DOMAIN, 1))
    )
    return _number(1, 10) + _field(7, graph) + opsets  # ir_version, graph, opset_import


def _node(op: str, inputs: Sequence[str], *, domain: str = "", numbers: dict[str, int] | None = None) -> bytes:
    attributes = b"".join(
        _field(5, _field(1, name.encode()) + _number(3, value) + _number(20, 2))
        for name, value in (numbers or {}).items()
    )
    wires = b"".join(_field(1, name.encode()) for name in inputs) + _field(2, b"y")
    return wires + _field(3, b"n") + _field(4, op.encode()) + attributes + _field(7, domain.encode())


def _tensor(name: str, array: NDArray[np.generic]) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    kind = _FLOAT if array.dtype == np.float32 else _UINT8
    return dims + _number(2, kind) + _field(8, name.encode()) + _field(9, array.tobytes())


def _value(name: str, width: int) -> bytes:
    shape = _field(1, _field(2, b"T")) + _field(1, _number(1, width))  # dim_param, dim_value
    kind = _field(1, _number(1, _FLOAT) + _field(2, shape))  # tensor_type: elem_type, shape
    return _field(1, name.encode()) + _field(2, kind)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
