"""Blocks that see the last W positions only, as transformers' own configuration says which.

The model builder knows of windows in some families alone; here they are set on the finished graph for all of them.
"""

from pathlib import Path

import onnx_ir as ir

from elsi_edge.errors import ModelError
from elsi_edge.export.surgery import attentions, set_window
from elsi_edge.model_shape import class_config

_EVERY_BLOCK = ("mistral", "phi3")  # families whose blocks all have the window, and no list of kinds


def attention_windows(model_dir: Path, blocks: int) -> tuple[int, ...]:
    """Positions that each of `blocks` blocks sees, its own included; -1 for all.

    From the configuration with its class's defaults, where a window may come from. Raises ModelError for kinds of
    blocks that are none of full and sliding attention.
    """
    config = class_config(model_dir)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window < 1:
        return (-1,) * blocks
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window if config.model_type in _EVERY_BLOCK else -1,) * blocks
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other or len(kinds) != blocks:
        raise ModelError(
            f"{model_dir / 'config.json'}: layer_types names {len(kinds)} blocks of the kinds "
            f"{', '.join(sorted(set(kinds)))}; exported are full_attention and sliding_attention, {blocks} in all"
        )
    return tuple(window if kind == "sliding_attention" else -1 for kind in kinds)


def set_windows(model: ir.Model, windows: tuple[int, ...], *, reach: int) -> None:
    """Give each attention its window, where one of `reach` columns, context and slack, can pass it."""
    for node, window in zip(attentions(model), windows, strict=True):
        set_window(node, window if window < reach else -1)
