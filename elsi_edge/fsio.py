"""Files that are written beside and renamed, so that nothing half-written is ever found under its final name.

A temporary is locked by the process that fills it; one that a killed process left is therefore known as dead, and goes
when the same name is written next.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elsi_edge.errors import ElsiError, StorageError

_CHUNK = 1 << 20  # bytes read at a time when hashing
_TEMP_PREFIX = ".elsi-tmp-"
_SETTLED_S = 1.0  # seconds after which a temporary that nobody has locked is dead, not just born
_LEAST_FREE = 1 << 17  # bytes, for the small files of reports
_OLD = "old"  # what a replaced directory is called until it is deleted


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
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"cannot write {path}: a part of this path is a file; choose another directory"
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


def require_writable(path: Path) -> None:
    """Raise StorageError unless the file `path` could be written now: to be asked before long work. Leaves no trace."""
    probe = path.absolute().parent
    while not probe.exists():
        probe = probe.parent
    with storage_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=probe):
            pass
        if _free_bytes(probe) < _LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
        sweep(path)
        descriptor, name = tempfile.mkstemp(prefix=f"{_TEMP_PREFIX}{path.name}-", dir=path.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as handle:
                _lock(descriptor)
                handle.write(data)
                handle.flush()
                os.fsync(descriptor)
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


def read_json_object(path: Path, error: type[ElsiError], *, remedy: str = "") -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises StorageError, and `error` naming the file for anything else."""
    advice = f"; {remedy}" if remedy else ""
    try:
        with storage_errors(path):
            value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise error(f"{path} is not valid JSON ({wrong}){advice}") from wrong
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object{advice}")
    return value


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
        sweep(final)
        temporary = _temporary(final)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            _lock(descriptor)
            temporary.chmod(0o755)
            yield temporary
            _swap_in(temporary, final, replace=replace)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(descriptor)


def sweep(final: Path) -> None:
    """Delete what killed processes left beside `final` while they wrote it; a replaced directory comes back."""
    for path in _dead(final.parent):
        if _is_temporary_of(path.name, final.name):
            if (path / _OLD).exists() and not final.exists():
                with contextlib.suppress(OSError):
                    (path / _OLD).rename(final)
            _delete(path)


def sweep_directory(directory: Path) -> None:
    """Delete what killed processes left in `directory`, whatever they were writing."""
    for path in _dead(directory):
        if not (path / _OLD).exists():
            _delete(path)


def _dead(directory: Path) -> list[Path]:
    """Temporaries that no living process fills."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith(_TEMP_PREFIX):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_ctime >= _SETTLED_S and _is_dead(path):
                    found.append(path)
    return found


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_temporary_of(name: str, final: str) -> bool:
    start = f"{_TEMP_PREFIX}{final}-"
    return name.startswith(start) and "-" not in name[len(start) :]  # else it is of a longer name


def _temporary(final: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{final.name}-", dir=final.parent))


def _is_dead(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False when another holds it or the file system knows no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _swap_in(temporary: Path, final: Path, *, replace: bool) -> None:
    meanwhile = f"{final} was made by another process meanwhile; choose another --out or use --force"
    if final.exists() and not replace:
        raise StorageError(meanwhile)
    old = _temporary(final) if final.exists() else None
    try:
        if old is not None:
            final.rename(old / _OLD)
        temporary.rename(final)
    except BaseException as error:
        if old is not None and (old / _OLD).exists() and not final.exists():
            (old / _OLD).rename(final)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise StorageError(meanwhile) from error
        raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
