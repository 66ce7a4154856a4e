"""How far a stage has come: a bar on a terminal, lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

_EVERY_S = 10.0  # seconds between two lines at least
_SILENT_S = 60.0  # seconds after which a line comes, however little was done
_WHOLE = 1 - 1e-9  # of sums of shares, which round
_STEP = 0.10  # share of the whole after which one comes


class Advance(Protocol):
    """Handle of a running stage."""

    def advance(self, n: float = 1.0) -> None:
        """Say that `n` more units are done."""


def size_text(size: float) -> str:
    """Bytes for people, in decimal units, e.g. "98.4 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


@contextlib.contextmanager
def bar_on(console: Console, description: str, total: float | None, unit: str) -> Iterator[Advance]:
    """A bar with rate and time left, gone when the stage ends; until something is done it moves without a share."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), _Rate(unit), TimeRemainingColumn(), console=console,
        transient=True,
    )  # fmt: skip
    with bar:
        yield _Bar(bar, bar.add_task(description, total=total, start=False))


@contextlib.contextmanager
def lines_on(say: Callable[[str], None], description: str, total: float | None, unit: str) -> Iterator[Advance]:
    """A line at the start, then one after 10 seconds and a tenth of the whole, or after a minute."""
    say(f"{description}: {_amount(total, unit)}" if total and unit else f"{description} ...")
    yield _Lines(say, description, total, unit)


def reaching(bar: Advance, total: float = 1.0) -> Callable[[float], None]:
    """Takes the share of `total` that is done so far, and moves the bar there, never back."""
    passed = 0.0

    def reach(share: float) -> None:
        nonlocal passed
        bar.advance(max(0.0, share * total - passed))
        passed = max(passed, share * total)

    return reach


def span_text(seconds: float) -> str:
    """A duration for people, e.g. "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Bar:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task, self._started = bar, task, False

    def advance(self, n: float = 1.0) -> None:
        if n <= 0:
            return
        if not self._started:  # a bar that stands at nothing looks stuck; one without a share only busy
            self._bar.start_task(self._task)
            self._started = True
        self._bar.advance(self._task, n)


class _Lines:
    def __init__(self, say: Callable[[str], None], description: str, total: float | None, unit: str) -> None:
        self._say, self._description, self._total, self._unit = say, description, total, unit
        self._start = self._last = time.monotonic()
        self._done = self._shown = 0.0

    def advance(self, n: float = 1.0) -> None:
        self._done += n
        now = time.monotonic()
        waited, whole = now - self._last, self._total is not None and self._done >= self._total * _WHOLE
        step = self._total is None or self._done - self._shown >= _STEP * self._total
        if whole or waited < _EVERY_S or not (step or waited >= _SILENT_S):
            return
        self._say(f"{self._description}: {self._state(now - self._start)}")
        self._last, self._shown = now, self._done

    def _state(self, elapsed: float) -> str:
        rate = self._done / max(elapsed, 1e-9)
        amount = _amount(self._done, self._unit)
        speed = f", {_rate(rate, self._unit)}" if self._unit else ""
        if not self._total:
            return amount + speed
        left = f", {span_text((self._total - self._done) / rate)} left" if rate > 0 else ""
        share = f"{self._done / self._total:.0%}"
        return share + (f" of {_amount(self._total, self._unit)}{speed}" if self._unit else "") + left


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        if not self._unit:
            return Text(f"{task.percentage:.0f}%")
        of = f" of {_amount(task.total, self._unit)}" if task.total else ""
        done = _amount(task.completed, "" if of and self._unit != "bytes" else self._unit)
        speed = task.finished_speed or task.speed
        return Text(f"{done}{of}" + (f", {_rate(speed, self._unit)}" if speed else ""))


def _amount(amount: float, unit: str) -> str:
    return size_text(amount) if unit == "bytes" else f"{amount:,.0f} {unit}".rstrip()


def _rate(rate: float, unit: str) -> str:
    if unit == "bytes":
        return f"{size_text(rate)}/s"
    return f"{rate:,.1f}/s" if rate < 100 else f"{rate:,.0f}/s"
