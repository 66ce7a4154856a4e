"""ONNX Runtime sessions: threads, providers, options."""

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort

from elsi_edge.errors import BundleError, ProviderError, StorageError, UsageError
from elsi_edge.machine import cores
from elsi_edge.runtime import plugins
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
        if is_memory(line):
            raise StorageError(
                f"too little memory to load {path} ({line}); `bench --memory-limit` finds how much would do"
            ) from error
        raise BundleError(f"ONNX Runtime cannot load {path}: {line}; export the bundle again") from error
    if provider not in session.get_providers():
        raise ProviderError(
            f"provider {provider} refused {path.name}; ONNX Runtime fell back to {session.get_providers()}"
        )
    return session


def is_memory(said: str) -> bool:
    """Whether ONNX Runtime's words mean that memory ran out."""
    return "allocat" in said or "bad_alloc" in said
