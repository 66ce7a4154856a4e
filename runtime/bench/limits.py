"""How little memory a bundle can live with: children that answer a prompt under a real limit.

A control group is charged for a file's page if one of its processes was the first to read it. Pages that are in the
page cache already would be free, so the files that a child will map are evicted before it starts.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from elsi_edge.bundle import read_manifest
from elsi_edge.errors import ConfigError, StorageError
from elsi_edge.runtime.bench.memory import child_command, last_line
from elsi_edge.runtime.bench.pages import evict, mapped_files
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
_FIRST_SECONDS, _LEAST_SECONDS = 300.0, 5.0  # that a child is given without a limit, and under one
_CLOSE = 1.04  # the search ends when what works is within this of what does not
_STEP = 1 << 20  # bytes
_HELD = 0.05  # of the weights; when other processes hold more of them, the smallest limit is too low
_CGROUPS = Path("/sys/fs/cgroup")
_PREFIX = "elsi-edge-"  # of control groups
_UNITS = (("MB", 10**6), ("GB", 10**9))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A child under a limit."""

    limit_bytes: int | None  # None: without
    works: bool
    why: str  # what happened where it does not
    seconds: float  # from start to end
    tokens_per_s: float | None
    peak_resident_bytes: int | None  # as the child says; in a control group file pages may be read again and again
    charged_bytes: int | None  # the most that the control group was charged for at once; None without one
    held_bytes: int | None  # of its files, that other processes held in memory: free for it; None where not known


@dataclass(frozen=True, kw_only=True)
class LimitReport:
    """Whether the bundle runs under the limit that was asked for, and what the smallest one is."""

    kind: Kind
    kind_words: str
    asked_bytes: int
    works: bool  # with what was asked
    smallest_bytes: int  # that worked
    smallest_tokens_per_s: float | None  # under it; `without` has the speed without a limit
    note: str | None  # why the smallest limit may be too low; None where nothing says so
    without: Trial
    trials: tuple[Trial, ...]  # in the order in which they ran


@dataclass(frozen=True, kw_only=True)
class Limiter:
    """Runs children under limits of one kind."""

    kind: Kind
    parent: Path | None  # where control groups of our own may be made; None for RLIMIT_DATA

    @contextlib.contextmanager
    def group(self, limit: int | None) -> Iterator["_Group | None"]:
        """A control group for one child, which counts even without a limit, and is gone afterwards."""
        if self.parent is None:
            yield None
            return
        group = _Group(kind=self.kind, path=Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.parent)))
        try:
            if limit is not None:
                group.set(limit)
            yield group
        finally:
            _remove(group.path)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A control group, new for every child, so that its counters are of that child alone."""

    kind: Kind
    path: Path

    def joined(self, command: Sequence[str]) -> list[str]:
        """The command, in this group: it joins before it becomes Python, so that the interpreter counts too."""
        join = f"echo $$ > {shlex.quote(str(self.path / 'cgroup.procs'))} && exec {shlex.join(command)}"
        return ["/bin/sh", "-c", join]

    def set(self, limit: int) -> None:
        if self.kind == "cgroup-v2":
            (self.path / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):  # there is none without swap
                (self.path / "memory.swap.max").write_text("0")
        else:
            (self.path / "memory.limit_in_bytes").write_text(str(limit))

    def charged(self) -> int | None:
        """The most at once, bytes; None before Linux 5.19 in version 2."""
        name = "memory.peak" if self.kind == "cgroup-v2" else "memory.max_usage_in_bytes"
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / name).read_text())
        return None


def require_limit(limit: int) -> None:
    """Refuse a limit in bytes that no bundle could run under, or that is none. Raises ConfigError."""
    if LEAST_BYTES <= limit <= MOST_BYTES:
        return
    named = next((f"{limit}{unit}" for unit, size in _UNITS if LEAST_BYTES <= limit * size <= MOST_BYTES), "300MB")
    raise ConfigError(
        f"--memory-limit is {limit} byte{'' if limit == 1 else 's'}, it must be {LEAST_BYTES} (8 MiB) to {MOST_BYTES} "
        f"(1 TiB); write it with a unit, e.g. {named}"
    )


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

    A child works if it answers within 4 times the seconds that it takes without a limit. In a control group every child
    reads the bundle's files anew, and other processes that map them, this one too, make the figure too low (`note`).
    Raises ConfigError for a limit out of range, StorageError if the bundle does not even run without one.
    """
    require_limit(limit)
    used = limiter(kind)
    job = {"do": "answer", "bundle": str(bundle), "threads": settings.threads, "provider": settings.provider}
    job |= {"exact": exact, "tokens": _TOKENS}

    def run(tried: int | None, seconds: float) -> Trial:
        held = None if used.parent is None else evict(mapped_files(bundle))
        trial = _try(used, job, tried, held, seconds=seconds)
        advance()
        return trial

    without = run(None, _FIRST_SECONDS)
    if not without.works:
        raise StorageError(f"the bundle does not run without a limit either: {without.why}")
    trials: list[Trial] = []

    def works(tried: int) -> bool:
        trials.append(run(tried, max(_LEAST_SECONDS, _SLOW * without.seconds)))
        return trials[-1].works

    asked = works(limit)
    smallest = _search(works, limit, asked, start=without.peak_resident_bytes or limit)
    best = next(trial for trial in trials if trial.works and trial.limit_bytes == smallest)
    return LimitReport(
        kind=used.kind,
        kind_words=WORDS[used.kind],
        asked_bytes=limit,
        works=asked,
        smallest_bytes=smallest,
        smallest_tokens_per_s=best.tokens_per_s,
        note=None if used.parent is None else _note(best.held_bytes, bundle),
        without=without,
        trials=tuple(trials),
    )


def _note(held: int | None, bundle: Path) -> str | None:
    if held is None:
        return "whether other processes hold the bundle in memory is not told here; if one does, the limit is too low"
    files = read_manifest(bundle).files
    weights = sum(one.bytes for name, one in files.items() if name.startswith(("target.weights", "draft.weights")))
    if held <= _HELD * weights:
        return None
    return (
        f"other processes hold {held / 1e6:.0f} MB of the bundle's pages in memory, which are charged to them: the "
        "smallest limit is too low by up to so much; end what runs this bundle and measure again"
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


def _try(used: Limiter, job: dict[str, object], limit: int | None, held: int | None, *, seconds: float) -> Trial:
    """One child, ended when it takes longer than `seconds`."""
    own = {**job, "data_limit": limit} if used.kind == "rlimit-data" else job
    with used.group(limit) as group:
        command = child_command(own)
        start = time.perf_counter()
        said, why = _answer(command if group is None else group.joined(command), seconds)
        return Trial(
            limit_bytes=limit,
            works=not why,
            why=why,
            seconds=time.perf_counter() - start,
            tokens_per_s=said.get("tokens_per_s"),
            peak_resident_bytes=said.get("peak_resident"),
            charged_bytes=None if group is None else group.charged(),
            held_bytes=held,
        )


def _answer(command: list[str], seconds: float) -> tuple[dict[str, Any], str]:
    """What a child says last; nothing, and why, where it fails or takes too long."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {}, f"not done after {seconds:.0f} s: it reads the same file pages again and again"
    except BaseException:
        child.kill()
        child.communicate()
        raise
    if child.returncode != 0:
        return {}, _why(child.returncode, err)
    return json.loads(out.splitlines()[-1]), ""


def _why(code: int, err: str) -> str:
    if code == -signal.SIGKILL or code == 128 + signal.SIGKILL:
        return "killed by the limit"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}: an allocation was refused"
    return f"exit code {code}: {last_line(err)}"


def limiter(kind: Kind | None = None) -> Limiter:
    """The strictest kind of limit that may be set here, or the one asked for. Raises StorageError."""
    for name in (kind,) if kind is not None else get_args(Kind):
        parent = None if name == "rlimit-data" else _parent(name)
        if name == "rlimit-data" or parent is not None:
            return Limiter(kind=name, parent=parent)
    raise StorageError(f"limits of the kind {kind} cannot be set here: no control group that may be written to")


def _parent(kind: Kind) -> Path | None:
    """A directory below which control groups can be made and joined, None where that is not allowed."""
    for parent in _parents(kind):
        try:
            group = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError:
            continue
        needed = "memory.max" if kind == "cgroup-v2" else "memory.limit_in_bytes"
        usable = (group / needed).exists() and os.access(group / "cgroup.procs", os.W_OK)
        _remove(group)
        if usable:
            return parent
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
