"""How the long stages tell the command line where they are."""

from typing import Protocol


class Reporter(Protocol):
    """Receives progress; the command line draws a bar, tests pass `Silent`."""

    def advance(self, amount: float) -> None:
        """More of the stage's own unit is done (rows for distillation, share of this sitting for training)."""
        ...

    def note(self, text: str) -> None:
        """A line worth keeping on the screen."""
        ...


class Silent:
    """A reporter that says nothing."""

    def advance(self, amount: float) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""
