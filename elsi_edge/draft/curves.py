"""A run's curves: one line a measurement in `log.jsonl`, and what they look like in `curves.png` beside it."""

import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elsi_edge.fsio import storage_errors, write_bytes, write_text

LOG = "log.jsonl"
CURVES = "curves.png"
_SIZE = (7.0, 8.0)  # inches
_DPI = 120
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by the colour-blind (Okabe and Ito)
_MARKERS = "os^D"


def append(directory: Path, entry: Mapping[str, Any]) -> None:
    """Add a line to a run's log. Raises StorageError."""
    path = directory / LOG
    with storage_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(entry) + "\n")


def read_log(directory: Path) -> list[dict[str, Any]]:
    """A run's measurements in order; a line that a kill cut short is left out."""
    path = directory / LOG
    entries: list[dict[str, Any]] = []
    with storage_errors(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def cut_log(directory: Path, step: int) -> None:
    """Forget what was measured after `step`, which a run that continues from there measures again."""
    if (directory / LOG).is_file():
        kept = [entry for entry in read_log(directory) if entry["step"] <= step]
        write_text(directory / LOG, "".join(json.dumps(entry) + "\n" for entry in kept))


def draw(directory: Path) -> Path | None:
    """Write `curves.png` from the log beside it; None where matplotlib is not installed or nothing was measured."""
    entries = read_log(directory)
    if not entries or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib import rc_context
    from matplotlib import style as sheets
    from matplotlib.figure import Figure

    with (
        sheets.context("default", after_reset=True),
        rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}),
    ):
        figure = Figure(figsize=_SIZE, layout="constrained")
        loss, agreement, tau = figure.subplots(3, 1, sharex=True)
        _line(loss, entries, "loss", "training loss", 0)
        loss.set_ylabel("loss, nats")
        for index in range(4):
            hours, values = _points(entries, "agreement", index)
            _plot(agreement, hours, values, f"step {index + 1}", index)
        agreement.set_ylabel("agreement, held out")
        _line(tau, entries, "tau_chain4", "chain of 4, teacher-forced", 0, line="--")
        names = dict.fromkeys(name for entry in entries for name in entry.get("tau", {}))
        for index, name in enumerate(names):
            _plot(tau, *_points(entries, "tau", name), name.replace("-", " of "), index)
        tau.set_ylabel("tokens per verification")
        tau.set_xlabel("hours of training")
        for axes in (loss, agreement, tau):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="best", fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    write_bytes(directory / CURVES, buffer.getvalue())
    return directory / CURVES


def _line(axes: Any, entries: Sequence[Mapping[str, Any]], key: str, label: str, colour: int, line: str = "-") -> None:
    found = [(entry["minutes"] / 60, entry[key]) for entry in entries if entry.get(key) is not None]
    if found:
        axes.plot(*zip(*found, strict=True), line, color=_COLOURS[colour], linewidth=1.2, label=label)


def _points(entries: Sequence[Mapping[str, Any]], key: str, part: Any) -> tuple[list[float], list[float]]:
    """Hours and one part of a measured list or mapping."""
    hours, values = [], []
    for entry in entries:
        whole = entry.get(key)
        if whole and (part in whole if isinstance(whole, dict) else part < len(whole)):
            hours.append(entry["minutes"] / 60)
            values.append(float(whole[part]))
    return hours, values


def _plot(axes: Any, hours: list[float], values: list[float], label: str, index: int) -> None:
    if hours:
        look = {"color": _COLOURS[index % 4], "marker": _MARKERS[index % 4], "markersize": 3, "linewidth": 1.2}
        axes.plot(hours, values, label=label, **look)
