"""What this machine offers: cores that may be used, CPU features that matter, memory limits. Linux."""

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
# What ONNX Runtime's quantised kernels choose by, x86 and ARM.
_FEATURES = (
    *("sse4_1", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


@dataclass(frozen=True, kw_only=True)
class Cores:
    """How many cores a process may use, and why."""

    affinity: int  # cores that the process may run on
    quota: float | None  # cores' worth of time that its control group allows, None when unlimited
    usable: int  # min of both, rounded down, at least 1: the default number of threads


def cores() -> Cores:
    """Cores by affinity and by CPU quota, which affinity does not show."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cpu_quota()
    usable = affinity if quota is None else min(affinity, math.floor(quota))
    return Cores(affinity=affinity, quota=quota, usable=max(usable, 1))


def cpu_quota(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The tightest CPU quota of the process's control group and its parents, in cores; None without one."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    quotas: list[float] = []
    for _, controllers, name in (line for line in lines if len(line) == 3):
        base = root if not controllers else root / controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the name is the host's, and the group's own files lie at the root.
        for directory in (base, *_below(base, name)):
            quotas += [quota for quota in (_quota_v2(directory), _quota_v1(directory)) if quota is not None]
    return min(quotas, default=None)


def cpu_features(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those features of this CPU that decide which kernels run, in a fixed order."""
    flags = {flag for line in _cpuinfo(path, ("flags", "Features")) for flag in line.split()}
    return [feature for feature in _FEATURES if feature in flags]


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name, or its architecture."""
    return next(iter(_cpuinfo(path, ("model name",))), platform.machine())


def _cpuinfo(path: Path, keys: tuple[str, ...]) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() in keys]


def _below(base: Path, name: str) -> list[Path]:
    parts = [part for part in name.split("/") if part]
    return [base.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]


def _quota_v2(directory: Path) -> float | None:
    try:
        limit, period = (directory / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(directory: Path) -> float | None:
    try:
        limit = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
        return limit / period if limit > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
