"""What lies in a work directory, with the command that shows each."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_DEPTH = 2  # directories below the one named: a work directory holds models, and these hold what was made of them
_KINDS = {"elsi-edge-selection": "selection", "elsi-edge-shards": "shards", "elsi-edge-calibration": "calibration"}


def holdings(place: Path) -> list[dict[str, str]]:
    """What `inspect` can show in and below a directory, and reports: "path" below it, "what" it is, and "command"."""
    found = list(_found(place, _DEPTH))
    if not found and (place.parent / "selection.json").is_file():  # an interrupted run's calibration directory
        found = [(place.parent / "selection.json", "selection")]
    return [
        {"path": str(path.relative_to(place) if path.is_relative_to(place) else path), "what": what,
         "command": _command(path, what)}
        for path, what in found
    ]  # fmt: skip


def _command(path: Path, what: str) -> str:
    quoted = shlex.quote(str(path))
    return f"open in a browser: {quoted}" if path.suffix == ".html" else f"elsi-edge inspect {quoted}"


def _found(place: Path, depth: int) -> Iterator[tuple[Path, str]]:
    try:
        inside = sorted(path for path in place.iterdir() if not path.name.startswith("."))
    except OSError:
        return
    for path in inside:
        if path.is_dir():
            if what := _directory(path):
                yield path, what
            elif depth > 0:
                yield from _found(path, depth - 1)
        elif path.name == "report.html":
            yield path, "report of a calibration"
        elif path.suffix == ".json" and format_of(path) in ("elsi-edge-selection", "elsi-edge-calibration"):
            yield path, _KINDS[format_of(path)]


def _directory(path: Path) -> str:
    """What a directory is, "" for one that is nothing by itself."""
    if (path / "draft.json").is_file():
        return "draft"
    if (path / "manifest.json").is_file():
        return _KINDS.get(format_of(path / "manifest.json"), "bundle")
    return ""


def format_of(path: Path) -> str:
    """What a JSON file says it is, "" where it says nothing or cannot be read."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(value.get("format", "")) if isinstance(value, Mapping) else ""
