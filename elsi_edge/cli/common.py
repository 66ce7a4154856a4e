"""What every verb shares: results on stdout, progress on stderr, JSON last."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console

from elsi_edge.artifacts import to_plain
from elsi_edge.cli.progress import Advance, bar_on, lines_on, size_text

__all__ = ["emit_json", "err", "next_command", "note", "out", "progress", "size_text"]

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


def counted(count: int, noun: str) -> str:
    """ "1 answer", "2 answers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def note(text: str) -> None:
    """One line for the user on stderr."""
    err.print(text, soft_wrap=True)


def next_command(text: str) -> None:
    """Say on stderr which command comes next."""
    note(f"Next: {text}")


@contextlib.contextmanager
def progress(description: str, total: float | None, unit: str) -> Iterator[Advance]:
    """Share, rate and time left on stderr: a bar on a terminal, elsewhere a line at the start and now and then.

    `total` in `unit`, None when it is not known; `unit` is a plural noun such as "tokens", or "bytes", or "" for a
    share of 1.
    """
    with bar_on(err, description, total, unit) if err.is_terminal else lines_on(note, description, total, unit) as bar:
        yield bar
