"""Tensors of a foreign checkpoint as numpy arrays, bfloat16 included, without torch."""

import math

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import DraftError
from elsi_edge.fsio import storage_errors
from elsi_edge.weights import TensorRef

_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "I8": "i1"}


def read_floats(ref: TensorRef) -> NDArray[np.float32]:
    """A weight as float32. Raises DraftError for a type that is none, StorageError."""
    if ref.dtype == "BF16":
        wide = _raw(ref, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32)
    if ref.dtype not in _FLOATS:
        raise DraftError(
            f"{ref.file.name}: the weight {ref.name!r} is {ref.dtype}, expected F16, BF16 or F32; quantised weights "
            "are not read"
        )
    return _raw(ref, _FLOATS[ref.dtype]).astype(np.float32)


def read_integers(ref: TensorRef) -> NDArray[np.int64]:
    """A map of ids. Raises DraftError for a type that is none, StorageError."""
    if ref.dtype not in _INTEGERS:
        raise DraftError(f"{ref.file.name}: {ref.name!r} is {ref.dtype}, expected I64")
    return _raw(ref, _INTEGERS[ref.dtype]).astype(np.int64)


def read_mask(ref: TensorRef) -> NDArray[np.bool_]:
    """A mask; some tools store it as integers. Raises DraftError, StorageError."""
    if ref.dtype == "BOOL":
        return _raw(ref, "u1").astype(np.bool_)
    return read_integers(ref).astype(np.bool_)


def _raw(ref: TensorRef, dtype: str) -> NDArray[np.generic]:
    size = np.dtype(dtype).itemsize * math.prod(ref.shape)
    if ref.stop - ref.start != size:
        raise DraftError(
            f"{ref.file}: {ref.name!r} has {ref.stop - ref.start} bytes, its shape {list(ref.shape)} asks for {size}; "
            "download it again"
        )
    with storage_errors(ref.file), ref.file.open("rb") as handle:
        handle.seek(ref.start)
        data = handle.read(size)
    if len(data) != size:
        raise DraftError(f"{ref.file} ends within {ref.name!r}; download it again")
    return np.frombuffer(data, dtype=dtype).reshape(ref.shape)
