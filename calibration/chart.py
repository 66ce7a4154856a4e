"""The entropy wave, matrix entropy over taps, as text and as a picture; and what a calibration found."""

import importlib.util
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elsi_edge import fsio
from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration import words
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.errors import ConfigError, MissingExtraError

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .#"  # empty, up to half, full
_AXIS = 7  # columns left of the bars
_LABEL_EVERY = 5  # taps
_MOST_OF_ONE = 7  # lines of one sentence of the verdict
_MOST_RULES = 10  # lines of its table
_MOST_CELL = 24  # characters
PICTURE_FORMATS = (".png", ".svg")


def wave(selection: LayerSelection, *, width: int = 80, height: int = 8, ascii_only: bool = False) -> str:
    """The curve as lines of text, at most `width` columns: a bar per tap, chosen taps marked below it by ^.

    Bars start somewhat under the lowest value, so that the wave shows. Where taps outnumber the columns, neighbours
    share one bar, the highest of them. No colour is used. Raises ConfigError for a selection without measurements.
    """
    found = [value for value in selection.entropy if math.isfinite(value)]
    if not found:
        raise ConfigError("this selection holds no measured entropies to draw; calibrate again")
    values = [value if math.isfinite(value) else min(found) for value in selection.entropy]
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
    from elsi_edge.calibration import plots

    def draw(axes: Any) -> None:
        plots.draw_wave(selection, axes, selection.settings.get("final_norm_entropy"))
        axes.set_title(f"{selection.model}: {words.method(selection)}, {selection.describe()}")
        axes.legend()

    fsio.write_bytes(path, plots.picture(draw, height=3.2, kind=path.suffix.lower().lstrip(".")))


def summary(analysis: Analysis, width: int = 80, ascii_only: bool = False) -> str:
    """The wave, the pick, the verdict and the rules, as some 40 lines of at most `width` columns.

    What does not fit into the lines ends in "..."; the HTML report has all of it. Raises ConfigError as `wave` does.
    """
    selection = analysis.selection
    lines = wave(selection, width=width, ascii_only=ascii_only).splitlines()
    nats = "" if selection.joint_entropy is None else f", {words.number(selection.joint_entropy)} nats"
    lines += [
        "",
        *_wrapped([f"Pick ({words.method(selection)}, m = {selection.m}): {selection.describe()}{nats}"], width, 3),
    ]
    text = "answers of the target" if selection.settings.get("text") == "answers" else "prompts"
    lines += _wrapped([f"measured on {selection.prompts} {text}: {words.counted(selection)}"], width, 4)
    table = _rules(analysis, width)[:_MOST_RULES]
    for sentence in analysis.verdict:
        lines += textwrap.wrap(
            f"- {sentence}", width, subsequent_indent="  ", max_lines=_MOST_OF_ONE, placeholder=" ..."
        )
    if table:
        rows = selection.settings.get("reservoir")
        head = f"The rules, all on {rows} positions (elsi sets not asked for: a quick search):"[:width]
        lines += ["", *([head] if rows else []), *table]
    whole = "\n".join(line.rstrip() for line in lines)
    return whole.encode("ascii", "replace").decode() if ascii_only else whole


def _wrapped(sentences: Sequence[str], width: int, most: int) -> list[str]:
    lines = textwrap.wrap(" ".join(sentences), width)
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], textwrap.shorten(" ".join(lines[most - 1 :]), width, placeholder=" ...")]


def _rules(analysis: Analysis, width: int) -> list[str]:
    """A heading and a line per rule, the chosen one starred; columns that do not fit are left out from the right."""
    rows = [("", "rule", "taps", "nats", "mean CKA", "probe")]
    for rule in sorted(analysis.rules, key=lambda rule: not rule.chosen):  # the chosen one is never cut off
        taps = ", ".join(map(str, rule.taps)) if rule.state == "residual" else "after norm"
        cka = words.number(rule.mean_cka, 2) if len(rule.taps) > 1 else words.NOTHING
        mark = "*" if rule.chosen else ""
        rows.append((mark, rule.name, taps, words.number(rule.joint_entropy), cka, words.percent(rule.probe)))
    if len(rows) == 1:
        return []
    widths = [min(_MOST_CELL, max(map(len, column))) for column in zip(*rows, strict=True)]
    while len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()
    lines = []
    for row in rows:
        cells = [f"{cell[:w]:{'>' if i > 2 else '<'}{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=False))]
        lines.append(f"{cells[0]} {'  '.join(cells[1:])}"[:width])
    return lines
