"""Memory by component, from fresh processes."""

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsi_edge.artifacts import BYTES_PER_WEIGHT
from elsi_edge.bundle import BundleManifest
from elsi_edge.errors import BundleError
from elsi_edge.runtime.memory import Footprint, footprint
from elsi_edge.runtime.options import SessionSettings

PROCESSES = 3  # fresh ones, of which the median counts
_SAMPLE_S = 0.01  # seconds between two looks at a child's memory
_LITTLE = 0.02  # of a bundle
_COMPONENTS = ("interpreter", "tokenizer", "target", "draft", "activations")


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What a bundle takes when it runs, bytes: medians over fresh processes.

    What a component takes is what the process grew by when it was opened or first ran: `pss` with the file pages that
    it mapped, `anonymous` without. Caches grow with the tokens; here per 1,000 of them, the draft's included.
    """

    components: Mapping[str, Footprint]
    cache_per_1000_tokens: Footprint
    steady: Footprint  # all of it, with the cache of `steady_tokens`
    steady_tokens: int
    peak: Footprint  # the most seen at any moment, loading included
    processes: int


@dataclass(frozen=True, kw_only=True)
class OneTap:
    """What a draft on its taps saves against one on EAGLE-3's three, which differs in its projection alone."""

    taps: int  # m
    projection_bytes: int
    three_taps_bytes: int
    saved_bytes: int
    saved_share: float  # of the bundle

    @property
    def words(self) -> str:
        """One sentence."""
        if self.saved_bytes <= 0:
            return f"the draft reads {self.taps} taps; its projection takes {self.projection_bytes / 1e6:.2f} MB"
        little = ", which is little on this model" if self.saved_share < _LITTLE else ""
        return (
            f"a draft on {self.taps} tap{'' if self.taps == 1 else 's'} instead of three saves "
            f"{self.saved_bytes / 1e6:.2f} MB of projection, {self.saved_share:.1%} of the bundle{little}"
        )


def one_tap(manifest: BundleManifest) -> OneTap | None:
    """From a bundle's numbers; None without a draft. Norms and the rest of a draft do not depend on the taps."""
    draft = manifest.draft
    if draft is None:
        return None
    per_tap = draft.width * draft.embedding_width * BYTES_PER_WEIGHT[manifest.draft_precision]
    saved = round((3 - draft.m) * per_tap)
    return OneTap(
        taps=draft.m,
        projection_bytes=round(draft.m * per_tap),
        three_taps_bytes=round(3 * per_tap),
        saved_bytes=saved,
        saved_share=saved / sum(entry.bytes for entry in manifest.files.values()),
    )


def child_command(job: Mapping[str, Any]) -> list[str]:
    """How to start `elsi_edge.runtime.bench.child`."""
    return [sys.executable, "-m", "elsi_edge.runtime.bench.child", json.dumps(job)]


def measure_memory(
    bundle: Path,
    settings: SessionSettings,
    *,
    exact: bool = True,
    processes: int = PROCESSES,
    advance: Callable[[], None] = lambda: None,
) -> MemoryReport | None:
    """Open and run the bundle in so many fresh processes; None where the system does not tell what a process takes.

    Raises BundleError with the child's last words when it fails.
    """
    if footprint() is None:
        return None
    job = {
        "do": "components",
        "bundle": str(bundle),
        "threads": settings.threads,
        "provider": settings.provider,
        "exact": exact,
    }
    runs = []
    for _ in range(processes):
        runs.append(_watch(child_command(job)))
        advance()
    return _report(runs)


@dataclass(frozen=True, kw_only=True)
class _Watched:
    lines: Sequence[Mapping[str, Any]]
    peak: Footprint


def _watch(command: Sequence[str]) -> _Watched:
    """Run a child to its end, looking at its memory all the while."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        ended, seen = threading.Event(), Footprint(pss=0, anonymous=0)

        def look() -> None:
            nonlocal seen
            while not ended.wait(_SAMPLE_S):
                now = footprint(child.pid)
                if now is not None:
                    seen = Footprint(pss=max(seen.pss, now.pss), anonymous=max(seen.anonymous, now.anonymous))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            out, err = child.communicate()
        except BaseException:
            child.kill()
            raise
        finally:
            ended.set()
            watcher.join()
    if child.returncode != 0:
        raise BundleError(f"measuring memory failed, exit code {child.returncode}: {last_line(err)}")
    lines = [json.loads(line) for line in out.splitlines()]
    for line in lines:  # a moment between two looks may have been the highest
        seen = Footprint(pss=max(seen.pss, line["pss"]), anonymous=max(seen.anonymous, line["anonymous"]))
    return _Watched(lines=lines, peak=seen)


def last_line(text: str) -> str:
    """The last line of what a program said, which in a traceback is the reason."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _report(runs: Sequence[_Watched]) -> MemoryReport:
    grown: dict[str, list[Footprint]] = {name: [] for name in (*_COMPONENTS, "cache")}
    for run in runs:
        before = {"pss": 0, "anonymous": 0, "cache": 0}
        for line in run.lines:
            # The cache that the first round allocated is no activation.
            cached = line.get("cache", 0) - before["cache"] if line["part"] == "activations" else 0
            per_1000 = 1000.0 / line["tokens"] if line["part"] == "cache" else 1.0
            grown[line["part"]].append(
                Footprint(
                    pss=round((line["pss"] - before["pss"] - cached) * per_1000),
                    anonymous=round((line["anonymous"] - before["anonymous"] - cached) * per_1000),
                )
            )
            before = {"pss": line["pss"], "anonymous": line["anonymous"], "cache": line.get("cache", 0)}
    last = [run.lines[-1] for run in runs]
    return MemoryReport(
        components={name: _median(grown[name]) for name in _COMPONENTS},
        cache_per_1000_tokens=_median(grown["cache"]),
        steady=_median([Footprint(pss=line["pss"], anonymous=line["anonymous"]) for line in last]),
        steady_tokens=int(runs[0].lines[-1]["tokens"]) + _first_tokens(runs[0].lines),
        peak=_median([run.peak for run in runs]),
        processes=len(runs),
    )


def _first_tokens(lines: Sequence[Mapping[str, Any]]) -> int:
    return next(int(line["first_tokens"]) for line in lines if line["part"] == "activations")


def _median(values: Sequence[Footprint]) -> Footprint:
    return Footprint(
        pss=round(statistics.median(value.pss for value in values)),
        anonymous=round(statistics.median(value.anonymous for value in values)),
    )
