"""A half-done measurement on disk, so that an interrupted run goes on where it stopped."""

import contextlib
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge import fsio
from elsi_edge.calibration.rendering import Rendered
from elsi_edge.calibration.settings import CalibrationSettings, Note, no_note
from elsi_edge.errors import StorageError
from elsi_edge.models import SourceModel

EVERY_S = 60.0  # seconds between saves
MOST_SHARE = 20.0  # times as long as the last save took, where that is more
_FORMAT = 3  # raise it when what is summed up changes
_META = "elsi-edge"
_DTYPES = {"<f8": "F64", "<f4": "F32", "<i8": "I64"}  # numpy's names to those of safetensors


def identity(model: SourceModel, rendered: Rendered, settings: CalibrationSettings) -> dict[str, Any]:
    """What two runs must share for one to go on where the other stopped."""
    return {
        "format": _FORMAT,
        "model": model.fingerprint,
        "ids": [list(ids) for ids in rendered.ids],
        "first": list(rendered.first),
        "settings": repr(settings),
    }


def tokens_done(path: Path, model: SourceModel, rendered: Rendered, settings: CalibrationSettings) -> int:
    """Tokens of which an interrupted run with these very inputs has left the sums at `path`."""
    return Checkpoint(path, identity(model, rendered, settings), no_note).peek()


class Checkpoint:
    """One file of arrays and a JSON note; of another run, or damaged, it counts as not there.

    The note says under "tokens" and "of" how many tokens are done, and of how many.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], note: Note) -> None:
        self._path = path
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._note = note
        self._saved = time.monotonic()
        self._every = EVERY_S
        self._held: tuple[int, int] | None = None  # tokens that the file holds, of how many
        self._tried = False  # to save, in vain: said already

    @property
    def due(self) -> bool:
        """Whether it is time to save again."""
        return self._path is not None and time.monotonic() - self._saved >= self._every

    def save(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> bool:
        """Write everything; a disk that is full costs the resume, not the run. Returns whether it was written."""
        if self._path is None:
            return False
        started = time.monotonic()
        try:
            self._write(self._path, arrays, {_META: json.dumps({"identity": self._identity, **meta})})
            self._hold(meta)
        except StorageError as error:
            self._note(f"warning: progress is not saved: {error}")
            self._tried = True
            return False
        finally:
            self._saved = time.monotonic()
            self._every = max(EVERY_S, MOST_SHARE * (self._saved - started))
        return True

    @staticmethod
    def _write(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str]) -> None:
        """A safetensors file, beside its final name and then renamed; from the arrays where they lie, since the
        library's own `save` copies all of them twice and they may be gigabytes."""
        header: dict[str, Any] = {"__metadata__": metadata}
        offset = 0
        for name, array in arrays.items():
            end = offset + array.nbytes
            header[name] = {"dtype": _DTYPES[array.dtype.str], "shape": array.shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        partial = path.with_name(f"{path.name}.part")
        with fsio.storage_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("wb") as handle:
                    handle.write(struct.pack("<Q", len(text)) + text)
                    for array in arrays.values():
                        handle.write(np.ascontiguousarray(array).data)
                    handle.flush()
                    os.fsync(handle.fileno())
                partial.replace(path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        """What `save` wrote in a run with the same inputs, else None."""
        if self._path is None or not self._path.is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="numpy") as file:
                meta = json.loads((file.metadata() or {}).get(_META, "{}"))
                if meta.pop("identity", None) != self._identity:
                    self._note(f"note: {self._path} belongs to a run with other inputs; starting over")
                    return None
                arrays = {name: file.get_tensor(name) for name in list(file.keys())}
        except (SafetensorError, OSError, ValueError):
            self._note(f"note: {self._path} is cut short; starting over")
            return None
        self._hold(meta)
        return arrays, meta

    def peek(self) -> int:
        """Tokens that the file holds of this very run, without reading its arrays or saying anything."""
        from safetensors import SafetensorError, safe_open

        if self._path is None or not self._path.is_file():
            return 0
        try:
            with safe_open(self._path, framework="numpy") as file:
                meta = json.loads((file.metadata() or {}).get(_META, "{}"))
        except (SafetensorError, OSError, ValueError):
            return 0
        if meta.get("identity") != self._identity:
            return 0
        self._hold(meta)
        return self._held[0] if self._held else 0

    def _hold(self, meta: Mapping[str, Any]) -> None:
        self._held = (int(meta["tokens"]), int(meta["of"])) if "tokens" in meta else None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tell the user of a run that is interrupted inside what the next one goes on from."""
        try:
            yield
        except KeyboardInterrupt:
            if self._held is None:
                self.peek()
            if self._held is not None:
                done, total = self._held
                self._note(f"saved up to {done:,} of {total:,} tokens; the same command goes on from there")
            elif self._path is not None and not self._tried:
                self._note("nothing to save yet")
            raise

    def say(self, text: str) -> None:
        """A line for the user."""
        self._note(text)

    def clear(self) -> None:
        """Delete the file."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # a result is worth more than tidiness
                self._path.unlink(missing_ok=True)
