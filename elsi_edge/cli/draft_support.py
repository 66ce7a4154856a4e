"""What `distill` and `train` share."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsi_edge.cli.progress import Advance


def quoted(text: str | Path) -> str:
    """As one word of a shell command."""
    return shlex.quote(str(text))


def flags(**paths: Path | None) -> str:
    """Those of some path options that were given, to be added to a command: " --out x --work y"."""
    return "".join(f" --{name} {quoted(path)}" for name, path in paths.items() if path is not None)


class BarReporter:
    """A draft stage's progress on the command line's bar and its notes on stderr."""

    def __init__(self, bar: "Advance") -> None:
        self._bar = bar

    def advance(self, amount: float) -> None:
        """Move the bar."""
        self._bar.advance(amount)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        from elsi_edge.cli import common

        common.note(text)


def reporter(bar: "Advance") -> BarReporter:
    """A reporter for a running bar."""
    return BarReporter(bar)
