"""Packed weights, written once and mapped into memory afterwards.

ONNX Runtime rearranges the weights of its matrix products each time a session opens: time, and memory that belongs to
the process alone. Here the graph as it was optimised and its packed weights are kept in the cache directory, and later
sessions map that file: the pages are shared between processes and are given back when memory is short. Only what
computes the same is ever taken: an entry is named by a hash of the graph, its weights, ONNX Runtime's version and the
CPU with its features. The bundle itself is never touched.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from elsi_edge import cache
from elsi_edge.bundle import Bundle, GraphRole
from elsi_edge.errors import ElsiError
from elsi_edge.fsio import new_directory, require_free, write_json
from elsi_edge.machine import cpu_features, cpu_name
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_graph, resolve_provider, session_options

_log = logging.getLogger(__name__)

_GRAPH, _WEIGHTS, _ENTRY = "graph.onnx", "packed.weights", "entry.json"
_WORTH = 16 << 20  # bytes of weights below which packing takes no time worth saving
_GROWTH = 2.5  # bytes on disk, of those of the weights: the original and the packed ones
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class _Key:
    """All that packed weights depend on."""

    graph_sha256: str
    weights_sha256: str
    onnxruntime: str
    cpu: str
    features: str
    format: int = _FORMAT

    def name(self) -> str:
        """The entry's directory."""
        return hashlib.sha256(json.dumps(self.__dict__, sort_keys=True).encode()).hexdigest()[:24]


def open_packed(bundle: Bundle, role: GraphRole, settings: SessionSettings) -> ort.InferenceSession:
    """Open a graph of a bundle from its packed weights; without an entry, open it as it is and write one.

    Small graphs, other providers than the CPU, a cache that cannot be written or is short of space: opened as they are.
    Raises as `elsi_edge.runtime.ort.open_session` does.
    """
    path, weights = bundle.graph(role), _weights_bytes(bundle)
    if weights < _WORTH or resolve_provider(settings.provider) != "CPUExecutionProvider":
        return open_graph(path, session_options(settings), settings)
    key = _key(bundle, role)
    place = cache.packed_dir() / key.name()
    if (session := _mapped(place, key, settings)) is not None:
        return session
    try:
        return _write(path, place, key, weights, settings)
    except (OSError, ElsiError) as error:  # what is wrong with the graph itself is said below
        _log.info("packed weights are not kept: %s", error)
        return open_graph(path, session_options(settings), settings)


def _weights_bytes(bundle: Bundle) -> int:
    return sum(entry.bytes for name, entry in bundle.manifest.files.items() if name.startswith("target.weights"))


def _key(bundle: Bundle, role: GraphRole) -> _Key:
    files, weights = bundle.manifest.files, hashlib.sha256()
    for name in sorted(name for name in files if name.startswith("target.weights")):
        weights.update(files[name].sha256.encode())
    return _Key(
        graph_sha256=files[bundle.manifest.graphs[role]].sha256,
        weights_sha256=weights.hexdigest(),
        onnxruntime=str(ort.__version__),
        cpu=cpu_name(),
        features=" ".join(cpu_features()),
    )


def _mapped(place: Path, key: _Key, settings: SessionSettings) -> ort.InferenceSession | None:
    """The session of a whole entry; None where there is none, or one that is damaged and goes."""
    try:
        entry: Mapping[str, Any] = json.loads((place / _ENTRY).read_text("utf-8"))
        whole = entry["key"] == key.__dict__ and all(
            (place / name).stat().st_size == size for name, size in entry["bytes"].items()
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if whole:
        options = session_options(settings)
        # It was optimised when it was written; doing so again finds nothing and takes time.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return open_graph(place / _GRAPH, options, settings)
        except Exception as error:  # a damaged file shows itself in several types
            _log.info("packed weights %s cannot be opened (%s); they are written again", place, error)
    shutil.rmtree(place, ignore_errors=True)
    return None


def _write(path: Path, place: Path, key: _Key, weights: int, settings: SessionSettings) -> ort.InferenceSession:
    """Open the graph as it is, keeping what ONNX Runtime made of it; the entry appears whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    require_free(place.parent, int(_GROWTH * weights), "packed weights")
    _forget_older(place.parent, key)
    with new_directory(place, replace=True) as temporary:
        options = session_options(settings)
        options.optimized_model_filepath = str(temporary / _GRAPH)
        for name, value in (
            ("optimized_model_external_initializers_file_name", _WEIGHTS),
            ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
            ("save_external_prepacked_constant_initializers", "1"),
        ):
            options.add_session_config_entry(f"session.{name}", value)
        session = open_graph(path, options, settings)
        sizes = {name: (temporary / name).stat().st_size for name in (_GRAPH, _WEIGHTS)}
        entry = {"key": key.__dict__, "bytes": sizes, "bundle": str(path.parent), "written": int(time.time())}
        write_json(temporary / _ENTRY, entry)
    return session


def _forget_older(root: Path, key: _Key) -> None:
    """Delete entries of the same graph by another version of ONNX Runtime or for another CPU: nothing reads them."""
    for path in root.glob(f"*/{_ENTRY}"):
        try:
            other = json.loads(path.read_text("utf-8"))["key"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        same = all(other.get(name) == getattr(key, name) for name in ("graph_sha256", "weights_sha256"))
        if same and other != key.__dict__:
            shutil.rmtree(path.parent, ignore_errors=True)
