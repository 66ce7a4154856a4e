"""Energy of the CPU package from RAPL counters, where the system lets one read them (Linux, Intel and AMD)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/class/powercap")
ABSENT = (
    "no readable RAPL counter (intel-rapl:*/energy_uj): virtual machines and most boards have none, root may be needed"
)


@dataclass(frozen=True, kw_only=True)
class _Counter:
    path: Path
    wraps_at: int  # microjoules


class EnergyMeter:
    """Joules of all packages since it was made; of the whole machine, so other load counts too."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._counters = tuple(_counters(root))
        self._last = [_microjoules(counter) for counter in self._counters]
        self._sum = 0

    @property
    def readable(self) -> bool:
        """Whether there is any counter."""
        return bool(self._counters)

    def joules(self) -> float:
        """Since the meter was made; to be asked more often than a counter wraps, at full load a minute at the least."""
        for place, counter in enumerate(self._counters):
            now = _microjoules(counter)
            self._sum += (now - self._last[place]) % counter.wraps_at
            self._last[place] = now
        return self._sum / 1e6


def _counters(root: Path) -> Sequence[_Counter]:
    """Package domains; their subdomains (cores, uncore) are parts of them and have two colons."""
    found = []
    for directory in sorted(root.glob("intel-rapl:*")) if root.is_dir() else ():
        if directory.name.count(":") != 1:
            continue
        try:
            counter = _Counter(
                path=directory / "energy_uj", wraps_at=int((directory / "max_energy_range_uj").read_text()) + 1
            )
            _microjoules(counter)
        except (OSError, ValueError):
            continue
        found.append(counter)
    return found


def _microjoules(counter: _Counter) -> int:
    return int(counter.path.read_text())
