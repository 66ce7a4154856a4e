"""Safetensors files of a model directory, checked and hashed without torch, and a writer that streams.

The format: 8 bytes little-endian length, that many bytes of JSON (name -> dtype, shape, data_offsets), then the data.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge import fsio
from elsi_edge.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_CHUNK = 1 << 22  # bytes hashed at a time
_LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library


@dataclass(frozen=True, kw_only=True)
class TensorRef:
    """Where one tensor lies."""

    name: str
    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    file: Path
    start: int  # byte in the file
    stop: int  # byte after the last


def list_tensors(directory: Path) -> dict[str, TensorRef]:
    """Every tensor of a model directory by name; the index decides which files count, stray ones are ignored.

    Raises ModelError naming the file and the bytes that are missing or too many, or what kind of checkpoint this is
    when it holds no safetensors.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        single = directory / SINGLE_FILE
        if not single.is_file():
            raise ModelError(_no_weights(directory))
        return {ref.name: ref for ref in _read_header(single)}
    files = indexed_files(directory)
    found = {ref.name: ref for name in sorted(set(files.values())) for ref in _read_header(directory / name)}
    for tensor, file in sorted(files.items()):
        if tensor not in found or found[tensor].file.name != file:
            raise ModelError(
                f"{index.name} places {tensor} in {file}, which does not hold it; download the model again"
            )
    return {name: found[name] for name in files}


def count_weights(directory: Path) -> int:
    """Weights of a model directory, all tensors together. Raises as `list_tensors` does."""
    return sum(math.prod(ref.shape) for ref in list_tensors(directory).values())


def indexed_files(directory: Path) -> dict[str, str]:
    """Tensor name to file name, as the index of a sharded checkpoint says. Raises ModelError."""
    index = directory / INDEX_FILE
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error}); download the model again") from error
    for file in files.values():
        if Path(file).name != file:
            raise ModelError(f"{index} names {file!r}, which leaves the model's directory")
    return files


def fingerprint(shape: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> str:
    """Hex SHA-256 over the shape and every tensor's name, dtype, shape and bytes, in the order of the names.

    How tensors are spread over files, and how the configuration spells a number, does not change it.
    """
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    for name in sorted(tensors):
        ref = tensors[name]
        digest.update(f"\n{name} {ref.dtype} {list(ref.shape)}\n".encode())
        with fsio.storage_errors(ref.file), ref.file.open("rb") as handle:
            handle.seek(ref.start)
            left = ref.stop - ref.start
            while left:
                block = handle.read(min(left, _CHUNK))
                if not block:
                    raise ModelError(f"{ref.file} ends {left} bytes too early, in {name}; download it again")
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def write_tensors(
    file: Path, shapes: Mapping[str, Sequence[int]], tensors: Iterable[tuple[str, NDArray[np.float32]]]
) -> None:
    """Write float32 tensors one by one, so that only one is in memory; `tensors` come in the order of `shapes`.

    Raises StorageError (no space), ValueError when `tensors` and `shapes` disagree.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    fsio.require_free(file.parent, 8 + len(text) + offset, f"writing {file.name}")
    with fsio.storage_errors(file), file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), (given, array) in zip(shapes.items(), tensors, strict=True):
            if given != name or array.shape != tuple(shape):
                raise ValueError(f"expected {name} {tuple(shape)}, got {given} {array.shape}")
            handle.write(np.ascontiguousarray(array, dtype="<f4").data)
        handle.flush()
        os.fsync(handle.fileno())


def _read_header(file: Path) -> list[TensorRef]:
    again = "download it again"
    if not file.is_file():
        raise ModelError(f"{file} is missing, but the index names it; {again}")
    size = file.stat().st_size
    with fsio.storage_errors(file), file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _LARGEST_HEADER):
            raise ModelError(
                f"{file} is not a whole safetensors file: {size} bytes, its header alone asks for more; {again}"
            )
        text = handle.read(length)
    try:
        header = json.loads(text)
        refs = [_ref(name, entry, file, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} has a broken header ({error}); {again}") from error
    needed = max((ref.stop for ref in refs), default=8 + length)
    if needed != size:
        raise ModelError(f"{file} has {size} bytes, its header asks for {needed}; {again}")
    return refs


def _ref(name: str, entry: Mapping[str, Any], file: Path, data_start: int) -> TensorRef:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop:
        raise ValueError(f"{name} lies at bytes {start}..{stop}")
    shape = tuple(int(n) for n in entry["shape"])
    return TensorRef(
        name=name, dtype=str(entry["dtype"]), shape=shape, file=file, start=data_start + start, stop=data_start + stop
    )


def _no_weights(directory: Path) -> str:
    if pickles := sorted(directory.glob("*.bin")):
        return (
            f"{directory} holds weights as pickle ({pickles[0].name}), which is never opened; save them as safetensors"
        )
    if ggufs := sorted(directory.glob("*.gguf")):
        return f"{directory} has no {SINGLE_FILE}; to use the GGUF in it, give that file: {ggufs[0]}"
    return f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}; a model directory needs one of them"
