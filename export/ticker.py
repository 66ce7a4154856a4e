"""How far long work of an export is, said in words."""

import time
from collections.abc import Callable

_EVERY = 5.0  # seconds


class Ticker:
    """Says now and then how far long work is, and how long the rest will take."""

    def __init__(self, say: Callable[[str], None], what: str, *, total: int) -> None:
        self._say, self._what, self._total = say, what, total
        self._done = self._first = 0
        self._begun = self._said = time.monotonic()

    def step(self, count: int = 1) -> None:
        """So much more is done. Time counts from the end of the first step, before which something else may run."""
        now = time.monotonic()
        self._done += count
        if self._first == 0:
            self._first, self._begun = self._done, now
        if now - self._said < _EVERY or not self._first < self._done < self._total:
            return
        self._said = now
        left = (now - self._begun) / (self._done - self._first) * (self._total - self._done)
        self._say(f"{self._what}, {self._done / self._total:.0%}, {left:.0f} s left")
