"""What this process takes."""

import resource
import sys


def peak_resident_bytes() -> int:
    """Peak resident set of this process since it started, bytes: anonymous memory and the mapped file pages in use."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
