"""What a process takes."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of a process at one moment, bytes."""

    pss: int  # resident, pages that n processes share counted as 1 / n
    anonymous: int  # resident and backed by no file: what cannot be given back


def footprint(process: int | str = "self") -> Footprint | None:
    """What a process takes now; None where the system does not say (Linux 4.14 and later do)."""
    values = _fields(_PROC / str(process) / "smaps_rollup")
    if "Pss" not in values or "Anonymous" not in values:
        return None
    return Footprint(pss=values["Pss"], anonymous=values["Anonymous"])


def peak_resident_bytes() -> int:
    """Peak resident set of this program since it started, bytes: anonymous memory and the mapped file pages in use.

    On Linux VmHWM, which an exec resets; getrusage's figure would carry over what a large parent had at the fork.
    """
    if (peak := _fields(_PROC / "self" / "status").get("VmHWM")) is not None:
        return peak
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024  # Linux counts in KiB, macOS in bytes


def _fields(path: Path) -> dict[str, int]:
    """The lines "Name: 123 kB" of a file of /proc, in bytes; empty where it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in lines if len(parts) == 3 and parts[2] == "kB"}
