"""How little memory a bundle can live with: children that answer a prompt under a real limit."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from elsi_edge.errors import ConfigError, StorageError
from elsi_edge.runtime.bench.memory import child_command, last_line
from elsi_edge.runtime.options import SessionSettings

Kind = Literal["cgroup-v2", "cgroup-v1", "rlimit-data"]

WORDS = {
    "cgroup-v2": "a control group: all memory, file pages included; no swap",
    "cgroup-v1": "a control group (version 1): all memory, file pages included",
    "rlimit-data": "RLIMIT_DATA: anonymous memory only, mapped files do not count",
}
LEAST_BYTES, MOST_BYTES = 8 << 20, 1 << 40
_TOKENS = 32  # that a child answers
_SLOW = 4.0  # times the seconds without a limit, beyond which a child is thought to live from reading pages again
_FIRST_SECONDS = 300.0  # without a limit
_CLOSE = 1.04  # the search ends when what works is within this of what does not
_STEP = 1 << 20  # bytes
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A child under a limit."""

    limit_bytes: int | None  # None: without
    works: bool
    why: str  # what happened where it does not
    seconds: float  # from start to end
    tokens_per_s: float | None
    peak_resident_bytes: int | None  # as the child says; in a control group file pages may be read again and again


@dataclass(frozen=True, kw_only=True)
class LimitReport:
    """Whether the bundle runs under the limit that was asked for, and what the smallest one is."""

    kind: Kind
    kind_words: str
    asked_bytes: int
    works: bool  # with what was asked
    smallest_bytes: int  # that worked
    without: Trial
    trials: tuple[Trial, ...]  # in the order in which they ran


@dataclass(frozen=True, kw_only=True)
class Limiter:
    """Runs children under limits of one kind."""

    kind: Kind
    group: Path | None  # a control group of our own

    def start(self, command: list[str], limit: int | None) -> "subprocess.Popen[str]":
        """Start a child that can never take more than `limit` bytes."""
        if self.group is not None and limit is not None:
            self._set(limit)
            # It joins before it becomes Python, so that the interpreter counts too.
            joined = f"echo $$ > {shlex.quote(str(self.group / 'cgroup.procs'))} && exec {shlex.join(command)}"
            command = ["/bin/sh", "-c", joined]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _set(self, limit: int) -> None:
        assert self.group is not None
        if self.kind == "cgroup-v2":
            (self.group / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):  # there is none without swap
                (self.group / "memory.swap.max").write_text("0")
        else:
            (self.group / "memory.limit_in_bytes").write_text(str(limit))


def find_smallest(
    bundle: Path,
    settings: SessionSettings,
    limit: int,
    *,
    exact: bool = True,
    kind: Kind | None = None,
    advance: Callable[[], None] = lambda: None,
) -> LimitReport:
    """Try the limit, then search for the smallest that works, within 4 %.

    A child works if it answers within 4 times the seconds that it takes without a limit. Raises ConfigError for a limit
    out of range, StorageError if the bundle does not even run without one.
    """
    if not LEAST_BYTES <= limit <= MOST_BYTES:
        raise ConfigError(f"--memory-limit is {limit} bytes, it must be {LEAST_BYTES} (8 MiB) to {MOST_BYTES}")
    with limiter(kind) as used:
        job = {"do": "answer", "bundle": str(bundle), "threads": settings.threads, "provider": settings.provider}
        job |= {"exact": exact, "tokens": _TOKENS}
        without = _try(used, job, None, seconds=_FIRST_SECONDS)
        advance()
        if not without.works:
            raise StorageError(f"the bundle does not run without a limit either: {without.why}")
        trials: list[Trial] = []

        def works(tried: int) -> bool:
            trials.append(_try(used, job, tried, seconds=max(5.0, _SLOW * without.seconds)))
            advance()
            return trials[-1].works

        asked = works(limit)
        smallest = _search(works, limit, asked, start=without.peak_resident_bytes or limit)
    return LimitReport(
        kind=used.kind,
        kind_words=WORDS[used.kind],
        asked_bytes=limit,
        works=asked,
        smallest_bytes=smallest,
        without=without,
        trials=tuple(trials),
    )


def _search(works: Callable[[int], bool], limit: int, asked: bool, *, start: int) -> int:
    """The smallest limit that works, by bisection between one that does and one that does not."""
    if asked:
        high, low = limit, LEAST_BYTES
    else:
        low, high = limit, max(start, int(limit * 1.25))
        while not works(high):
            low, high = high, int(high * 1.5)
            if high > MOST_BYTES:
                raise StorageError(f"nothing up to {MOST_BYTES} bytes works")
    while high > low * _CLOSE and high - low > _STEP:
        middle = max(low + _STEP // 2, int((low * high) ** 0.5))
        if works(middle):
            high = middle
        else:
            low = middle
    return high


def _try(used: Limiter, job: dict[str, object], limit: int | None, *, seconds: float) -> Trial:
    """One child, ended when it takes longer than `seconds`."""
    own = {**job, "data_limit": limit} if used.kind == "rlimit-data" else job
    start = time.perf_counter()
    child = used.start(child_command(own), limit)
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        why = f"not done after {seconds:.0f} s: it reads the same file pages again and again"
        return _failed(limit, why, time.perf_counter() - start)
    except BaseException:
        child.kill()
        child.communicate()
        raise
    took = time.perf_counter() - start
    if child.returncode != 0:
        return _failed(limit, _why(child.returncode, err), took)
    said = json.loads(out.splitlines()[-1])
    return Trial(
        limit_bytes=limit,
        works=True,
        why="",
        seconds=took,
        tokens_per_s=said["tokens_per_s"],
        peak_resident_bytes=said["peak_resident"],
    )


def _why(code: int, err: str) -> str:
    if code == -signal.SIGKILL or code == 128 + signal.SIGKILL:
        return "killed by the limit"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}: an allocation was refused"
    return f"exit code {code}: {last_line(err)}"


def _failed(limit: int | None, why: str, seconds: float) -> Trial:
    return Trial(limit_bytes=limit, works=False, why=why, seconds=seconds, tokens_per_s=None, peak_resident_bytes=None)


@contextlib.contextmanager
def limiter(kind: Kind | None = None) -> Iterator[Limiter]:
    """The strictest kind of limit that may be set here, or the one asked for. Raises StorageError."""
    for name in (kind,) if kind is not None else get_args(Kind):
        group = None if name == "rlimit-data" else _own_group(name)
        if name != "rlimit-data" and group is None:
            continue
        try:
            yield Limiter(kind=name, group=group)
        finally:
            if group is not None:
                _remove(group)
        return
    raise StorageError(f"limits of the kind {kind} cannot be set here: no control group that may be written to")


def _own_group(kind: Kind) -> Path | None:
    """A new control group below this process's own, None where that is not allowed."""
    for parent in _parents(kind):
        try:
            group = Path(tempfile.mkdtemp(prefix="elsi-edge-", dir=parent))
        except OSError:
            continue
        needed = "memory.max" if kind == "cgroup-v2" else "memory.limit_in_bytes"
        if (group / needed).exists() and os.access(group / "cgroup.procs", os.W_OK):
            return group
        _remove(group)
    return None


def _parents(kind: Kind) -> Iterator[Path]:
    """Where a group may be made: below this process's own group, else at the root of what is mounted."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if kind == "cgroup-v2" and not controllers:
            roots = [_CGROUPS, _CGROUPS / "unified"]
        elif kind == "cgroup-v1" and "memory" in controllers.split(","):
            roots = [_CGROUPS / "memory"]
        else:
            continue
        for root in roots:
            yield from (path for path in (root / name.lstrip("/"), root) if path.is_dir())


def _remove(group: Path) -> None:
    """A group can be removed once its processes are gone, which takes the kernel a moment."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.02)
