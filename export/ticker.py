"""How far long work of an export is, said in words."""

import time
from collections.abc import Callable

_EVERY = 5.0  # seconds


class Ticker:
    """Says now and then how far long work is, and how long the rest will take."""

    def __init__(self, say: Callable[[str], None], what: str, *, total: int) -> None:
        self._say, self._what, self._total = say, what, total
        self._done = 0
        self._begun = self._said = time.monotonic()

    def step(self, count: int = 1) -> None:
        """So much more is done."""
        self._done += count
        now = time.monotonic()
        if now - self._said < _EVERY or self._done >= self._total:
            return
        self._said = now
        left = (now - self._begun) / self._done * (self._total - self._done)
        self._say(f"{self._what}, {self._done / self._total:.0%}, {left:.0f} s left")
