"""Two bench reports side by side: what changed beyond noise. Pure but for reading the files."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elsi_edge.errors import DataError
from elsi_edge.runtime.bench.intervals import interval_of_median
from elsi_edge.runtime.bench.json_form import FORMAT, FORMAT_VERSION
from elsi_edge.runtime.bench.noise import MUCH_SPREAD

Verdict = Literal["better", "worse", "within noise"]

# What must be the same for two reports to measure the same thing; what differs is said.
_SETTINGS = (
    *("model", "precision", "taps", "target_fingerprint", "max_tokens", "prompts_sha256", "threads", "provider"),
    *("cpu", "mode", "draft_nodes", "tuned"),
)
# Figures of a whole report: name, where it stands, whether more is better.
_FIGURES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("tau", ("tau",), True),
    ("speed-up over plain", ("speedup",), True),
    ("first token, ms", ("time_to_first_token_ms",), False),
    ("ms per token, p50", ("ms_per_token", "p50"), False),
    ("ms per token, p99", ("ms_per_token", "p99"), False),
    ("peak memory, bytes", ("peak_memory_bytes",), False),
    ("steady anonymous memory, bytes", ("memory", "steady", "anonymous"), False),
    ("steady memory (Pss), bytes", ("memory", "steady", "pss"), False),
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure in both reports."""

    name: str
    before: float
    after: float
    ratio: float  # after / before
    interval: tuple[float, float] | None  # 95 %, of the median ratio over the answers that both gave
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is to be said of two reports."""

    changes: tuple[Change, ...]
    differing: Mapping[str, tuple[Any, Any]]  # settings that are not the same
    shared: int  # answers that both gave
    other_tokens: int  # of those, how many have other tokens
    noise: float  # relative difference that is taken for noise


def read_report(path: Path) -> dict[str, Any]:
    """What `bench --out` wrote, or the last line of what `bench --json` printed. Raises DataError."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for text in ("\n".join(lines), lines[-1] if lines else ""):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("format") == FORMAT:
            if value.get("format_version") != FORMAT_VERSION:
                raise DataError(
                    f"{path} is a bench report of format version {value.get('format_version')!r}, this reads "
                    f"{FORMAT_VERSION}; measure again with this version"
                )
            return value
    raise DataError(f"{path} holds no bench report; write one with: elsi-edge bench BUNDLE --out {path.name}")


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Speeds are paired answer by answer; a change counts when its interval excludes 1 and it is more than noise."""
    noise = max(MUCH_SPREAD, *(_unsteadiness(report) for report in (before, after)))
    old, new = (_by_answer(report) for report in (before, after))
    shared = [key for key in old if key in new]
    changes = [
        _paired("tokens/s, speculative", old, new, shared, lambda a: a["tokens_per_s"], noise),
        _paired("tokens/s, plain", old, new, shared, lambda a: a["plain"]["tokens_per_s"], noise),
        *(_figure(name, place, up, before, after, noise) for name, place, up in _FIGURES),
    ]
    return Comparison(
        changes=tuple(change for change in changes if change is not None),
        differing={
            name: (before.get(name), after.get(name)) for name in _SETTINGS if before.get(name) != after.get(name)
        },
        shared=len(shared),
        other_tokens=sum(old[key]["token_ids"] != new[key]["token_ids"] for key in shared),
        noise=noise,
    )


def _unsteadiness(report: Mapping[str, Any]) -> float:
    """How far a report's own figures moved while it was made."""
    return float(max(report.get("spread") or 0.0, abs((report.get("drift") or 1.0) - 1.0)))


def _by_answer(report: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(answer["id"], answer["turn"]): answer for answer in report.get("prompts", ())}


def _paired(
    name: str,
    old: Mapping[tuple[str, int], Mapping[str, Any]],
    new: Mapping[tuple[str, int], Mapping[str, Any]],
    shared: Sequence[tuple[str, int]],
    value: Callable[[Mapping[str, Any]], float | None],
    noise: float,
) -> Change | None:
    pairs = [(value(old[key]), value(new[key])) for key in shared]
    known = [(one, other) for one, other in pairs if one and other]
    if not known:
        return None
    ratios = [other / one for one, other in known]
    middle, interval = statistics.median(ratios), interval_of_median(ratios)
    beyond = interval is not None and not interval[0] <= 1.0 <= interval[1] and abs(middle - 1.0) > noise
    return Change(
        name=name,
        before=statistics.median(one for one, _ in known),
        after=statistics.median(other for _, other in known),
        ratio=middle,
        interval=interval,
        verdict=("better" if middle > 1.0 else "worse") if beyond else "within noise",
    )


def _figure(
    name: str,
    place: Sequence[str],
    more_is_better: bool,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    noise: float,
) -> Change | None:
    one, other = _at(before, place), _at(after, place)
    if one is None or other is None or one <= 0.0:
        return None
    ratio: float = other / one
    # tau does not depend on the clock, and memory hardly: any change that a reader would see counts.
    floor = 0.01 if name == "tau" or "memory" in name else noise
    if abs(ratio - 1.0) <= floor:
        verdict: Verdict = "within noise"
    else:
        verdict = "better" if (ratio > 1.0) == more_is_better else "worse"
    return Change(name=name, before=one, after=other, ratio=ratio, interval=None, verdict=verdict)


def _at(report: Mapping[str, Any], place: Sequence[str]) -> float | None:
    value: Any = report
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
