"""Was the machine steady and alone while it was measured?"""

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # columns of the first line of /proc/stat (proc(5)), in ticks
MUCH_SPREAD = 0.05  # relative; what is measured within less is called steady
MUCH_LOAD = 0.05  # share of the machine's cores
_FALL = 1.15  # times what more rows took, above which fewer rows are called odd


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the cores did in a stretch of time, as shares of all of them; None where /proc says nothing."""

    own: float | None  # this process
    others: float | None  # other processes
    steal: float | None  # taken by the host of a virtual machine


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """Counters at one moment."""

    busy: float | None  # seconds of all cores
    steal: float | None
    own: float  # seconds of this process
    at: float  # seconds, monotonic

    @classmethod
    def now(cls, path: Path = _STAT) -> Self:
        """Read the counters."""
        spent = os.times()
        own, at = spent.user + spent.system, time.perf_counter()
        try:
            columns = [int(value) for value in path.read_text().splitlines()[0].split()[1:9]]
            per_second = os.sysconf("SC_CLK_TCK")
            idle, steal = columns[_IDLE] + columns[_IOWAIT], columns[_STEAL]
            return cls(busy=(sum(columns) - idle - steal) / per_second, steal=steal / per_second, own=own, at=at)
        except (OSError, ValueError, IndexError):
            return cls(busy=None, steal=None, own=own, at=at)


def load_between(start: Ticks, end: Ticks, *, cores: int) -> Load:
    """What the cores did from `start` to `end`."""
    capacity = (end.at - start.at) * cores
    if capacity <= 0.0 or None in (start.busy, end.busy, start.steal, end.steal):
        return Load(own=None, others=None, steal=None)
    assert start.busy is not None and end.busy is not None and start.steal is not None and end.steal is not None
    own = end.own - start.own
    others = max(0.0, end.busy - start.busy - own)
    return Load(own=own / capacity, others=others / capacity, steal=(end.steal - start.steal) / capacity)


def falls(times: Mapping[int, float]) -> str:
    """Where fewer rows took clearly longer than more, by the times of numbers of rows; nothing where they never did.

    No kernel does that, so something else ran.
    """
    worst, fewer, more = max(
        ((times[one] / times[other], one, other) for one, other in itertools.combinations(sorted(times), 2)),
        default=(1.0, 0, 0),
    )
    if worst <= _FALL:
        return ""
    return f"{fewer} row{'s' * (fewer > 1)} took {worst:.2f} times as long as {more}"


def load_since(start: Ticks) -> Load:
    """What the cores did from `start` until now."""
    return load_between(start, Ticks.now(), cores=os.cpu_count() or 1)


def spread_of_repeats(runs: Sequence[Sequence[float]]) -> float | None:
    """Median over answers of (slowest - fastest) / median of an answer's repeats; None with one repeat each."""
    spreads = [(max(times) - min(times)) / statistics.median(times) for times in runs if len(times) > 1]
    return statistics.median(spreads) if spreads else None


def noise_words(load: Load | None, spread: float | None, drift: float | None) -> list[str]:
    """What casts doubt on the figures, a sentence each; empty for a steady machine. No load: not looked at."""
    said = []
    load = load or Load(own=None, others=None, steal=None)
    if load.others is not None and load.others > MUCH_LOAD:
        said.append(f"other processes used {load.others:.0%} of the cores while this ran; measure on an idle machine")
    if load.steal is not None and load.steal > MUCH_LOAD:
        said.append(f"the virtual machine's host took {load.steal:.0%} of the cores while this ran")
    if spread is not None and spread > 2 * MUCH_SPREAD:
        said.append(
            f"repeats of the same answer differ by {spread:.0%} (median); take differences below that for noise"
        )
    if drift is not None and abs(drift - 1.0) > MUCH_SPREAD:
        said.append(f"the machine's speed moved: plain decoding was {drift:.2f} times as fast in the second half")
    return said
