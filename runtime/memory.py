"""What this process takes."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Peak resident set of this program since it started, bytes: anonymous memory and the mapped file pages in use.

    On Linux VmHWM, which an exec resets; getrusage's figure would carry over what a large parent had at the fork.
    """
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
