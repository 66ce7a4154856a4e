"""The entropy wave: matrix entropy over taps, as text for a terminal and as a picture."""

import importlib.util
import io
import math
from pathlib import Path
from typing import Any

from elsi_edge import fsio
from elsi_edge.artifacts import LayerSelection
from elsi_edge.errors import ConfigError, MissingExtraError

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .#"  # empty, up to half, full
_AXIS = 7  # columns left of the bars
_LABEL_EVERY = 5  # taps
PICTURE_FORMATS = (".png", ".svg")


def wave(selection: LayerSelection, *, width: int = 80, height: int = 8, ascii_only: bool = False) -> str:
    """The curve as lines of text, at most `width` columns: a bar per tap, chosen taps marked below it by ^.

    Bars start somewhat under the lowest value, so that the wave shows. Where taps outnumber the columns, neighbours
    share one bar, the highest of them. No colour is used. Raises ConfigError for a selection without measurements.
    """
    values = selection.entropy
    if not values:
        raise ConfigError("this selection holds no measured entropies to draw; calibrate again")
    room = max(1, width - _AXIS)
    shared = math.ceil(len(values) / room)  # taps per bar
    bars = [max(values[i : i + shared]) for i in range(0, len(values), shared)]
    pitch = 2 if 2 * len(bars) <= room else 1  # columns per bar
    low, high = min(bars), max(bars)
    floor = low - 0.15 * (high - low or 1.0)
    glyphs = _ASCII if ascii_only else _BLOCKS
    levels = [(value - floor) / (high - floor or 1.0) * height for value in bars]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = [glyphs[_level(level - row, len(glyphs) - 1)] for level in levels]
        label = f"{floor + (high - floor) * (row + 1) / height:.2f}" if row % 2 else ""
        lines.append(f"{label:>{_AXIS - 2}} |" + "".join(cell.ljust(pitch) for cell in cells))
    marked = {tap // shared for tap in selection.taps} if selection.state == "residual" else set()
    lines.append(
        f"{'nats':>{_AXIS - 2}} |" + "".join(("^" if bar in marked else " ").ljust(pitch) for bar in range(len(bars)))
    )
    lines.append(f"{'tap':>{_AXIS - 2}}  " + _tap_labels(len(bars), shared, pitch, room))
    return "\n".join(line.rstrip() for line in lines)


def _level(height: float, most: int) -> int:
    return min(most, max(0, round(height * most)))


def _tap_labels(bars: int, shared: int, pitch: int, room: int) -> str:
    cells = [" "] * room
    every = _LABEL_EVERY * max(1, math.ceil(4 / (pitch * _LABEL_EVERY)))  # labels of three digits must not touch
    for bar in range(0, bars, every):
        for offset, digit in enumerate(str(bar * shared)):
            if bar * pitch + offset < room:
                cells[bar * pitch + offset] = digit
    return "".join(cells)


def check_picture(path: Path) -> None:
    """Raise ConfigError for a suffix that is no picture's, MissingExtraError where nothing can draw."""
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ConfigError(f"{path} ends in {path.suffix!r}; a picture is written as {' or '.join(PICTURE_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("drawing", extra="build", module="matplotlib")


def save_wave(selection: LayerSelection, path: Path) -> None:
    """Write the curve as PNG or SVG, by the file's suffix. The same selection gives the same file.

    Raises ConfigError for a selection without measurements, StorageError, and what `check_picture` raises.
    """
    check_picture(path)
    if not selection.entropy:
        raise ConfigError("this selection holds no measured entropies to draw; calibrate again")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "elsi-edge", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.0, 3.2), layout="constrained")
        _draw(figure.subplots(), selection)
        buffer = io.BytesIO()
        kind = path.suffix.lower().lstrip(".")
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    fsio.write_bytes(path, buffer.getvalue())


def _draw(axes: Any, selection: LayerSelection) -> None:
    taps = list(range(len(selection.entropy)))
    axes.plot(taps[1:], selection.entropy[1:], marker="o", markersize=3, color="#1f5fa8", label="taps 1 to L")
    axes.plot(taps[:1], selection.entropy[:1], "o", color="#999999", markersize=4, label="tap 0, not eligible")
    final = selection.settings.get("final_norm_entropy")
    if final is not None:
        axes.plot(taps[-1:], [final], "s", color="#999999", markersize=4, label="after the final norm")
    if selection.state == "residual":
        chosen = [selection.entropy[tap] for tap in selection.taps]
        axes.plot(selection.taps, chosen, "o", color="#c0392b", markersize=8, fillstyle="none", label="chosen")
    axes.set_xlabel("tap (residual stream entering block t)")
    axes.set_ylabel("matrix entropy, nats")
    axes.set_title(f"{selection.model}: {selection.method}, {selection.describe()}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
