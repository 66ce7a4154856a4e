"""ONNX Runtime sessions: threads, providers, and calls whose buffers are bound once."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.errors import BundleError, ProviderError, StorageError, UsageError
from elsi_edge.machine import cores
from elsi_edge.runtime import plugins
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.options import SessionSettings

# Short names that users type, the provider behind each, and the package that brings it.
PROVIDERS: Mapping[str, tuple[str, str]] = {
    "cpu": ("CPUExecutionProvider", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
    "openvino": ("OpenVINOExecutionProvider", "onnxruntime-openvino"),
    "qnn": ("QNNExecutionProvider", "onnxruntime-qnn"),
    "dml": ("DmlExecutionProvider", "onnxruntime-directml"),
    "coreml": ("CoreMLExecutionProvider", "onnxruntime"),
    "xnnpack": ("XnnpackExecutionProvider", "onnxruntime"),
}


_MOST_VALUES = 128  # bindings of a graph that are kept for use again


def resolve_provider(name: str) -> str:
    """Full name of an execution provider that is installed.

    Raises UsageError for a name nobody knows, ProviderError for one that is known and not there. There is no silent
    fall-back to the CPU.
    """
    known = {full.lower(): (full, package) for full, package in PROVIDERS.values()}
    known |= dict(PROVIDERS)
    available = ort.get_available_providers()
    if name.lower() not in known:
        raise UsageError(f"unknown provider {name!r}; installed here: {', '.join(available)}")
    full, package = known[name.lower()]
    if full not in available and plugins.is_installed(full):
        plugins.device(full)
    elif full not in available:
        raise ProviderError(
            f"provider {full} is not in this ONNX Runtime, which has {', '.join(available)}; pip install {package}"
        )
    return full


def open_session(path: Path, settings: SessionSettings) -> ort.InferenceSession:
    """Open one graph. Raises BundleError when ONNX Runtime refuses it, ProviderError or UsageError for the provider."""
    resolve_provider(settings.provider)
    return open_graph(path, session_options(settings), settings)


def session_options(settings: SessionSettings) -> ort.SessionOptions:
    """ONNX Runtime's options as every session here has them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads or cores().usable
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails raises as well, and is said once
    # Two sessions' pools would spin against each other between calls, and an idle chat would burn a core.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Every length is new: shape-keyed memory patterns would only pile up.
    options.enable_mem_pattern = False
    return options


def open_graph(path: Path, options: ort.SessionOptions, settings: SessionSettings) -> ort.InferenceSession:
    """Open one graph with options of the caller's. Raises as `open_session` does."""
    provider = resolve_provider(settings.provider)
    try:
        if plugins.is_installed(provider):
            plugins.use(options, provider)
            session = ort.InferenceSession(str(path), options)
        else:
            session = ort.InferenceSession(str(path), options, providers=[provider])
    except ProviderError:
        raise
    except Exception as error:  # ONNX Runtime raises several unrelated types
        line = str(error).splitlines()[0]
        if _is_memory(line):
            raise StorageError(
                f"too little memory to load {path} ({line}); `bench --memory-limit` finds how much would do"
            ) from error
        raise BundleError(f"ONNX Runtime cannot load {path}: {line}; export the bundle again") from error
    if provider not in session.get_providers():
        raise ProviderError(
            f"provider {provider} refused {path.name}; ONNX Runtime fell back to {session.get_providers()}"
        )
    return session


class BoundGraph:
    """A session with persistent bindings: buffers are bound by name and stay bound until replaced."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.session = session
        self._binding = session.io_binding()
        # ONNX Runtime does not own numpy's memory: keep it alive.
        self._bound: dict[str, tuple[NDArray[Any], Any]] = {}  # what each name is bound to now
        self._values: dict[tuple[str, tuple[int, ...]], tuple[NDArray[Any], Any]] = {}  # made before, by shape
        self._in_place: dict[str, Any] = {}  # the same for arrays bound as input and output
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.outputs = {value.name: value for value in session.get_outputs()}

    def bind_input(self, name: str, array: NDArray[Any]) -> None:
        """Bind a C-contiguous array; later changes of its content are seen by the next run."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._bound[name] = (array, value)
        self._binding.bind_ortvalue_input(name, value)

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        """Bind a C-contiguous array that the next runs write into."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._bound[name] = (array, value)
        self._binding.bind_ortvalue_output(name, value)

    def use(self, name: str, array: NDArray[Any]) -> None:
        """Bind an array that will be bound again, as input or output: free where it is bound already, cheap later."""
        bound = self._bound.get(name)
        if bound is not None and bound[0] is array:
            return
        known = self._values.get((name, array.shape))
        if known is None or known[0] is not array:
            if known is not None:  # the buffer was replaced by a larger one: let the old one go
                self._values = {key: value for key, value in self._values.items() if key[0] != name}
            if len(self._values) >= _MOST_VALUES:
                self._values.clear()
            known = self._values[name, array.shape] = (array, ort.OrtValue.ortvalue_from_numpy(array))
        self._bound[name] = known
        if name in self.inputs:
            self._binding.bind_ortvalue_input(name, known[1])
        else:
            self._binding.bind_ortvalue_output(name, known[1])

    def bind_in_place(self, source: str, result: str, array: NDArray[Any]) -> None:
        """Bind one array as a past input and its present output: the operator then appends in place, without a copy."""
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._binding.bind_ortvalue_input(source, value)
        self._binding.bind_ortvalue_output(result, value)
        self._in_place[source] = (array, value)

    def reserve(self, cache: KvCache, slots: int) -> None:
        """Make room for `slots` slots in `cache` and bind its buffers in place.

        Old buffers are let go one by one, so that growing takes one cache and one buffer more, not two caches. An
        interrupt on the way leaves the rest to the next call.
        """
        if slots > cache.capacity:
            self._in_place.clear()
            cache.reserve(slots)
        if len(self._in_place) < len(cache.buffers):
            for index, buffer in enumerate(cache.buffers):
                name = f"{index // 2}.{'value' if index % 2 else 'key'}"
                self.bind_in_place(f"past_key_values.{name}", f"present.{name}", buffer)

    def run(self) -> None:
        """One call over what is bound. Raises BundleError when the graph refuses it, MemoryError."""
        try:
            self.session.run_with_iobinding(self._binding)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            if _is_memory(said):
                raise MemoryError(said) from error
            raise BundleError(f"a graph of this bundle cannot be run ({said}); export the bundle again") from error


def _is_memory(said: str) -> bool:
    """Whether ONNX Runtime's words mean that memory ran out."""
    return "allocat" in said or "bad_alloc" in said


class Scratch:
    """Reusable flat buffers by name, grown by doubling: arrays of changing shape without an allocation per call."""

    def __init__(self) -> None:
        self._flat: dict[str, NDArray[Any]] = {}
        self._views: dict[tuple[str, tuple[int, ...]], NDArray[Any]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """An uninitialised C-contiguous view of `shape`, the same object for the same shape while the buffer lasts.

        Its content is valid until the next call with the same name. For shapes of which there are few.
        """
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            view = self._views[name, shape] = self.flat(name, size, dtype)[:size].reshape(shape)
        return view

    def flat(self, name: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
        """The whole buffer, of at least `size` items."""
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            grown = size if flat is None or flat.size * 2 < size else flat.size * 2
            flat = self._flat[name] = np.empty(max(grown, 1), dtype)
            for key in [key for key in self._views if key[0] == name]:
                del self._views[key]  # views of the old buffer
        return flat
