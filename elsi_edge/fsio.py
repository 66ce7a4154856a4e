"""Files that are written beside and renamed, so that nothing half-written is ever found under its final name."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elsi_edge.errors import StorageError

_CHUNK = 1 << 20  # bytes read at a time when hashing
_TEMP_PREFIX = ".elsi-tmp-"


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors about `path` into a one-line StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(_explain(error, path)) from error


def _explain(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_bytes(path)
        return (
            f"no space left while writing {path}: {free / 1e6:.0f} MB free there; free some or choose another directory"
        )
    if error.errno == errno.EROFS:
        return f"cannot write {path}: the file system is read-only; choose another directory"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot write or read {path}: permission denied; choose another directory or change its owner"
    return f"{path}: {error.strerror or error}"


def _free_bytes(path: Path) -> int:
    probe = path
    while not probe.exists():
        probe = probe.parent
    return shutil.disk_usage(probe).free


def require_free(directory: Path, needed: int, purpose: str) -> None:
    """Raise StorageError unless `directory` (or its first existing parent) has `needed` bytes free."""
    free = _free_bytes(directory.absolute())
    if free < needed:
        raise StorageError(
            f"{purpose} needs {needed / 1e6:.0f} MB in {directory}, where {free / 1e6:.0f} MB are free; "
            "free some or choose another directory"
        )


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole: beside its final name, flushed to disk, then renamed. Raises StorageError."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole (see `write_bytes`)."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole, indented and without NaN. Raises StorageError, ValueError on NaN."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `final`; on success it is renamed to `final`, on any failure it is removed.

    With `replace` an existing directory is swapped out and then deleted; without it an existing one is an error.
    """
    final = final.absolute()
    if final.exists() and not replace:
        raise StorageError(f"{final} exists already; choose another --out or replace it with --force")
    with storage_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{final.name}-", dir=final.parent))
        try:
            temporary.chmod(0o755)
            yield temporary
            _swap_in(temporary, final, replace=replace)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _swap_in(temporary: Path, final: Path, *, replace: bool) -> None:
    if not final.exists():
        temporary.rename(final)
        return
    if not replace:
        raise StorageError(f"{final} was made by another process meanwhile; choose another --out or use --force")
    old = Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}old-", dir=final.parent))
    final.rename(old / "old")
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)
