"""Whether what a verb needs beyond the base install is there; asked before anything that takes long."""

import importlib.util
from collections.abc import Sequence

from elsi_edge.errors import MissingExtraError

TORCH = ("torch", "safetensors", "transformers")
EXPORT = (*TORCH, "onnx", "onnx_ir", "onnxruntime_genai")


def require_build(feature: str, modules: Sequence[str]) -> None:
    """Raise MissingExtraError, naming the build extra, for the first of `modules` that is not installed."""
    for module in modules:
        if not is_installed(module):
            raise MissingExtraError(feature, extra="build", module=module)


def is_installed(module: str) -> bool:
    """Whether it can be imported; nothing is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module that was made unimportable
        return False
