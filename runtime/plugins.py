"""Execution providers that come as plugins: packages beside a stock ONNX Runtime, registered when first asked for."""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from elsi_edge.errors import ProviderError

# Provider to the module that brings it; each names its library with `get_library_path`.
MODULES: Mapping[str, str] = {
    "OpenVINOExecutionProvider": "onnxruntime_ep_openvino",
    "QNNExecutionProvider": "onnxruntime_qnn",
}
# The chip that QNN's library simulates where there is none: SM8550, whose HTP computes in float16. Without a name it
# refuses float graphs of ordinary sizes ("memory allocation related error").
_SIMULATED = "43"
_PREFERRED = ("NPU", "GPU", "CPU")


def is_installed(provider: str) -> bool:
    """Whether a plugin of this provider is installed; nothing is loaded."""
    module = MODULES.get(provider)
    try:
        return module is not None and importlib.util.find_spec(module) is not None
    except ValueError:  # a module that was made unimportable
        return False


@functools.cache
def device(provider: str) -> Any:
    """The device that a provider's plugin would use: an NPU where it finds one, else a GPU, else its CPU device.

    Raises ProviderError when the plugin cannot be loaded or finds no device.
    """
    module = importlib.import_module(MODULES[provider])
    try:
        ort.register_execution_provider_library(provider, module.get_library_path())
    except Exception as error:  # of several unrelated types
        raise ProviderError(
            f"the plugin {module.__name__} cannot be loaded: {' '.join(str(error).split())}; "
            "install the version that fits this ONNX Runtime"
        ) from error
    found = {one.device.type.name: one for one in ort.get_ep_devices() if one.ep_name == provider}
    for kind in _PREFERRED:
        if kind in found:
            return found[kind]
    raise ProviderError(
        f"provider {provider}: its plugin {module.__name__} is installed and finds no device of its kind here; "
        "use --provider cpu"
    )


def use(options: ort.SessionOptions, provider: str) -> None:
    """Let a session run on the plugin's device. Raises ProviderError."""
    module = importlib.import_module(MODULES[provider])
    chosen, settings = device(provider), {}
    if hasattr(module, "get_qnn_htp_path"):
        settings["backend_path"] = module.get_qnn_htp_path()
        if chosen.device.type.name != "NPU":
            settings["soc_model"] = _SIMULATED
    options.add_provider_for_devices([chosen], settings)
