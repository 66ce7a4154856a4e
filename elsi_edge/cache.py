"""The model cache: directories that appear whole, by rename, and are only ever read afterwards.

It lies under $ELSI_EDGE_HOME, else $XDG_CACHE_HOME/elsi-edge, else ~/.cache/elsi-edge. Reading takes no lock and writes
nothing, so a read-only or shared cache works.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elsi_edge import fsio
from elsi_edge.errors import StorageError

_log = logging.getLogger(__name__)

HOME_VARIABLE = "ELSI_EDGE_HOME"
_TEMPORARY = ".elsi-tmp-"  # as fsio.new_directory names them


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """One cached model."""

    name: str
    path: Path
    size: int  # bytes on disk


def home() -> Path:
    """The cache directory, whether or not it exists."""
    if given := os.environ.get(HOME_VARIABLE):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "elsi-edge"


def models_dir() -> Path:
    """Where cached models lie, one directory each."""
    return home() / "models"


def find(name: str) -> Path | None:
    """The directory of a cached model, or None. Never waits and never writes."""
    path = models_dir() / name
    return path if path.is_dir() else None


def get_or_build(name: str, build: Callable[[Path], None]) -> Path:
    """The directory of a cached model; `build` fills it when it is not there.

    Two processes that build the same model at once both succeed: one waits for the other. What a killed process
    left behind is removed by the next one. Raises StorageError and whatever `build` raises.
    """
    if (found := find(name)) is not None:
        return found
    final = models_dir() / name
    try:
        with _lock(name):
            if not final.is_dir():
                remove_leftovers(name)
                with fsio.new_directory(final) as temporary:
                    build(temporary)
    except StorageError as error:
        raise StorageError(f"{error} (the model cache; {HOME_VARIABLE} moves it)") from error
    return final


def packed_dir() -> Path:
    """Where weights packed for this machine lie, one directory an entry (see `elsi_edge.runtime.packed`)."""
    return home() / "packed"


def entries() -> list[CacheEntry]:
    """Cached models, by name, then packed weights as packed/NAME."""
    found = []
    for root, prefix in ((models_dir(), ""), (packed_dir(), "packed/")):
        paths = sorted(root.iterdir()) if root.is_dir() else []
        found += [
            CacheEntry(name=f"{prefix}{path.name}", path=path, size=_size(path))
            for path in paths
            if path.is_dir() and not path.name.startswith(".")
        ]
    return found


def prune(names: list[str] | None = None) -> list[CacheEntry]:
    """Delete the named entries, or all, and leftovers of killed processes; gives what was deleted.

    Raises StorageError for a name that is not cached and for what cannot be deleted.
    """
    present = {entry.name: entry for entry in entries()}
    for name in names or []:
        if name not in present:
            raise StorageError(f"{name!r} is not in the cache {home()}; it has: {', '.join(present) or 'nothing'}")
    chosen = [present[name] for name in names] if names else list(present.values())
    for entry in chosen:
        with _lock(entry.name), fsio.storage_errors(entry.path):
            # Renamed first, so that no reader finds half a model under its name.
            doomed = entry.path.with_name(f"{_TEMPORARY}{entry.path.name}-pruned")
            entry.path.rename(doomed)
            shutil.rmtree(doomed)
    if not names and models_dir().is_dir():
        for path in models_dir().glob(f"{_TEMPORARY}*"):
            name = path.name.removeprefix(_TEMPORARY).rsplit("-", 1)[0]
            with _lock(name):
                remove_leftovers(name)
    return chosen


def remove_leftovers(name: str) -> None:
    """Delete temporary directories of builds of `name` that were killed. Call it under that name's lock."""
    for path in models_dir().glob(f"{_TEMPORARY}{name}-*"):
        if "-" not in path.name.removeprefix(f"{_TEMPORARY}{name}-"):  # else it is of a longer name
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Hold `name` alone. The kernel drops the lock when its process ends, so a stale one never blocks."""
    path = home() / "locks" / f"{name}.lock"
    with fsio.storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that is fetching %s", name)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
