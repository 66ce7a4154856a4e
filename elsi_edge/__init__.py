"""EAGLE-style tree speculative decoding on ONNX Runtime, with the tapped layer chosen from data (ELSI).

The public names load when first used, so that `import elsi_edge` costs nothing and never needs torch.
"""

import os
from typing import TYPE_CHECKING, Any

from elsi_edge._version import __version__
from elsi_edge.errors import ElsiError

if TYPE_CHECKING:
    from elsi_edge.runtime.options import GenerateOptions, SessionSettings
    from elsi_edge.runtime.result import GenerationEvent, GenerationResult
    from elsi_edge.runtime.session import Session

__all__ = [
    "ElsiError",
    "GenerateOptions",
    "GenerationEvent",
    "GenerationResult",
    "Session",
    "SessionSettings",
    "__version__",
]

# ONNX Runtime's own wheels keep a database of usage events under ~/.cache/Microsoft and send it away. It reads this
# variable once, when it is imported; set it to 0 beforehand to let it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOME = {
    "GenerateOptions": "elsi_edge.runtime.options",
    "SessionSettings": "elsi_edge.runtime.options",
    "GenerationEvent": "elsi_edge.runtime.result",
    "GenerationResult": "elsi_edge.runtime.result",
    "Session": "elsi_edge.runtime.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'elsi_edge' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
