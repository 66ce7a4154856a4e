"""Graphs of one node, to try this machine's kernels: are they sound, what do they cost, whose bits do they give?"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import BLOCK
from elsi_edge.errors import BundleError
from elsi_edge.runtime import native_ops, onnx_bytes

Weights = Sequence[tuple[str, NDArray[Any]]]

_MICROSOFT = "com.microsoft"
_DOMAINS = {"": 21, _MICROSOFT: 1, native_ops.DOMAIN: 1}
_OFFSET_BITS = 4  # of weights whose blocks have offsets in exports
_LEVEL = 4  # MatMulNBits' accuracy level: activations in 8 bits
_PASTS = (5, 8, 20, 33, 64)  # cached tokens at which an attention's rows are compared; of every remainder that matters
_MOST = 0.01  # relative difference of one row from the same among four: rounding is below 1e-6


def matrix_session(
    rows_in: int, rows_out: int, *, bits: int, threads: int, seed: int = 0, native: bool = False
) -> tuple[ort.InferenceSession, int]:
    """A session over x [T, rows_in] -> y [T, rows_out] with random weights of 4, 8 or 32 bits.

    With `native` by this package's operator, for 4 and 8 bits; at 4 with offsets, as exports have them. Returns it with
    the weights' bytes that a call reads. Raises ProviderError where the native operators cannot run.
    """
    draw = np.random.default_rng(seed)
    extra: Weights = []
    if bits == 32:
        weights: Weights = [("w", draw.standard_normal((rows_in, rows_out)).astype(np.float32))]
        node = onnx_bytes.node("MatMul", ["x", "w"], ["y"])
    else:
        blocks = rows_in // BLOCK
        packed = draw.integers(0, 256, (rows_out, blocks, BLOCK * bits // 8), dtype=np.uint8)
        scales = draw.uniform(0.5, 1.5, rows_out * blocks).astype(np.float32)
        weights = [("w", packed), ("s", scales)]
        numbers = {"K": rows_in, "N": rows_out, "bits": bits, "block_size": BLOCK}
        if native:
            if bits == _OFFSET_BITS:
                extra = _random_offsets(draw, rows_out, blocks)
            names = ["x", "w", "s", *(name for name, _ in extra)]
            node = onnx_bytes.node("MatMulBlocks", names, ["y"], domain=native_ops.DOMAIN, numbers=numbers)
        else:
            numbers["accuracy_level"] = _LEVEL
            node = onnx_bytes.node("MatMulNBits", ["x", "w", "s"], ["y"], domain=_MICROSOFT, numbers=numbers)
    read = sum(array.nbytes for _, array in weights)
    weights = [*weights, *extra]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if native:
        native_ops.register(options)
    model = onnx_bytes.model(
        node,
        inputs=[onnx_bytes.value("x", "float32", ["T", rows_in])],
        outputs=[onnx_bytes.value("y", "float32", ["T", rows_out])],
        tensors=[onnx_bytes.tensor(name, array) for name, array in weights],
        domains=_DOMAINS,
    )
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session, read


def _random_offsets(draw: np.random.Generator, rows_out: int, blocks: int) -> Weights:
    """Offsets [N, blocks] as a matrix of 8 bits in blocks of its own."""
    groups = -(-blocks // BLOCK)
    values = draw.integers(0, 256, (rows_out, groups, BLOCK), dtype=np.uint8)
    return [("o", values), ("t", draw.uniform(0.01, 0.02, rows_out * groups).astype(np.float32))]


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


@functools.cache
def exact_attention_rows(heads: int, kv_heads: int, head_width: int, *, most: int, threads: int) -> int:
    """Rows a step, up to `most`, whose attention has the bits of one row a step in the exact chain form.

    That form shows GroupQueryAttention one query row more than the matrices, so at least two: on x86-64 they then agree
    bit for bit. On Arm they do not at every length of the cache, and int8 activations turn a last bit into another
    token. 1 means that no chain is exact here.
    """
    draw = np.random.default_rng(2)
    width, angles = (heads + 2 * kv_heads) * head_width, np.arange(_PASTS[-1] + most + 2)[:, None]
    turned = (angles * 1e4 ** (-np.arange(head_width // 2) / (head_width // 2))).astype(np.float32)
    session = _attention_session(heads, kv_heads, head_width, width, turned, threads)
    good = most
    for past in _PASTS:
        qkv = draw.standard_normal((1, most + 1, width)).astype(np.float32)
        cache = [draw.standard_normal((1, kv_heads, past, head_width)).astype(np.float32) for _ in range(2)]
        _, *grown = _attend(session, qkv, cache)
        alone = []
        for row in range(most):  # what one row a step gives: the row and a copy of itself
            before = [part[:, :, : past + row] for part in grown]
            alone.append(_attend(session, qkv[:, [row, row]], before)[0][0])
        for rows in range(2, good + 1):
            found = _attend(session, qkv[:, [*range(rows), rows - 1]], cache)[0]
            if not all(np.array_equal(found[row], alone[row]) for row in range(rows)):
                good = rows - 1
                break
    return good


def _attention_session(
    heads: int, kv_heads: int, head_width: int, width: int, angles: NDArray[np.float32], threads: int
) -> ort.InferenceSession:
    """qkv [1, T, width] and a cache -> y [1, T, heads * head_width] and the longer cache, rotary embedding inside."""
    caches = [onnx_bytes.value(name, "float32", [1, kv_heads, "S", head_width]) for name in ("k", "v")]
    longer = [onnx_bytes.value(name, "float32", [1, kv_heads, "S2", head_width]) for name in ("k2", "v2")]
    node = onnx_bytes.node(
        "GroupQueryAttention",
        ["qkv", "", "", "k", "v", "seqlens", "total", "cos", "sin"],
        ["y", "k2", "v2"],
        domain=_MICROSOFT,
        numbers={"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1},
    )
    model = onnx_bytes.model(
        node,
        inputs=[
            onnx_bytes.value("qkv", "float32", [1, "T", width]),
            *caches,
            onnx_bytes.value("seqlens", "int32", [1]),
            onnx_bytes.value("total", "int32", []),
        ],
        outputs=[onnx_bytes.value("y", "float32", [1, "T", heads * head_width]), *longer],
        tensors=[onnx_bytes.tensor(name, turn(angles)) for name, turn in (("cos", np.cos), ("sin", np.sin))],
        domains=_DOMAINS,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _attend(
    session: ort.InferenceSession, qkv: NDArray[np.float32], cache: Sequence[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    """Rows [T, heads * head_width], then keys and values with those of the rows."""
    total = cache[0].shape[2] + qkv.shape[1]
    feed = {
        "qkv": np.ascontiguousarray(qkv),
        "seqlens": np.array([total - 1], np.int32),
        "total": np.array(total, np.int32),
        "k": np.ascontiguousarray(cache[0]),
        "v": np.ascontiguousarray(cache[1]),
    }
    rows, keys, values = session.run(None, feed)
    return [rows[0], keys, values]
