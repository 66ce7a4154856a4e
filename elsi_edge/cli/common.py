"""What every verb shares: results on stdout, progress on stderr, JSON last."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from elsi_edge.artifacts import to_plain

_PIPE_WIDTH = 120  # columns when nobody looks; a terminal says its own


def _console(stream: TextIO, *, stderr: bool) -> Console:
    # No markup and no highlighting: model text and file names hold brackets and numbers.
    return Console(
        stderr=stderr, markup=False, highlight=False, emoji=False, width=None if stream.isatty() else _PIPE_WIDTH
    )


out = _console(sys.stdout, stderr=False)
err = _console(sys.stderr, stderr=True)


def emit_json(value: Any) -> None:
    """Print one JSON object on one line of stdout; call it last. Floats that JSON cannot hold become null."""
    # A terminal that cannot show a character would damage it; escapes stay valid JSON everywhere.
    ascii_only = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(to_plain(value), ensure_ascii=ascii_only, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """One line for the user on stderr."""
    err.print(text, soft_wrap=True)


def next_command(text: str) -> None:
    """Say on stderr which command comes next."""
    note(f"Next: {text}")


def size_text(size: float) -> str:
    """Bytes for people, in decimal units, e.g. "98.4 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


class Advance:
    """Handle of a running progress bar."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, n: float = 1.0) -> None:
        """Say that `n` more units are done."""
        self._bar.advance(self._task, n)


@contextlib.contextmanager
def progress(description: str, total: float | None, unit: str) -> Iterator[Advance]:
    """A bar with rate and time left on stderr, and nothing at all when stderr is no terminal.

    `total` in `unit`, None when it is not known; `unit` is a plural noun such as "tokens", or "bytes".
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        yield Advance(bar, bar.add_task(description, total=total))


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if self._unit == "bytes":
            done = size_text(task.completed) + (f" of {size_text(task.total)}" if task.total else "")
            return Text(done + (f", {size_text(speed)}/s" if speed else ""))
        done = f"{task.completed:.0f}" + (f" of {task.total:.0f}" if task.total else "") + f" {self._unit}"
        return Text(done + (f", {speed:.1f}/s" if speed else ""))
