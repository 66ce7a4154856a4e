"""Pages of files in the system's cache: which files a bundle maps, and how to drop their pages. Linux."""

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from elsi_edge import cache
from elsi_edge.bundle import read_manifest


def mapped_files(bundle: Path) -> list[Path]:
    """The bundle's files, and those of weights that were packed from its graphs."""
    hashes = {entry.sha256 for entry in read_manifest(bundle).files.values()}
    found = [path for path in bundle.iterdir() if path.is_file()]
    for entry in cache.packed_dir().glob("*/entry.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged, or being written or removed
            if json.loads(entry.read_text("utf-8"))["key"]["graph_sha256"] in hashes:
                found += [path for path in entry.parent.iterdir() if path.is_file()]
    return found


def evict(paths: Sequence[Path]) -> int | None:
    """Write files out and drop their pages from the page cache; the bytes that stay, None where that is not told.

    What stays is mapped by another process.
    """
    held: int | None = 0
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:  # one that was just removed
            with contextlib.suppress(OSError):  # of a file system that is read-only
                os.fsync(file.fileno())  # a page that is not written yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = _resident(path, file.fileno())
            held = None if held is None or found is None else held + found
    return held


def _resident(path: Path, file: int) -> int | None:
    """Bytes of an open file that lie in the page cache, whoever brought them there; None where that is not told."""
    status = os.fstat(file)
    if not status.st_size:
        return 0
    if os.geteuid() not in (0, status.st_uid) and not os.access(path, os.W_OK):
        return None  # mincore(2) calls every page of such a file resident
    with mmap.mmap(file, 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-status.st_size // mmap.PAGESIZE), np.uint8)  # a flag a page
        view = np.frombuffer(mapped, np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(status.st_size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view  # or the mapping cannot be closed
    return None if failed else int((pages & 1).sum()) * mmap.PAGESIZE
