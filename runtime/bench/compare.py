"""Two bench reports side by side: what changed beyond noise. Pure but for reading the files.

Figures are over the answers that both reports hold, so that they are of the same prompts. One figure of A, the same of
B, their ratio and its interval come from one function (`interval_of_change`), so they cannot contradict each other.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import DataError
from elsi_edge.runtime.bench.intervals import Figure, interval_of_change, median_of_ratios, ratio_of_sums
from elsi_edge.runtime.bench.json_form import FORMAT, FORMAT_VERSION
from elsi_edge.runtime.bench.noise import MUCH_SPREAD

Verdict = Literal["better", "worse", "within noise", "not judged"]

_TAU_NOISE = 0.01  # tau does not depend on the clock
_PROCESS_NOISE = 0.03  # of what is measured once a process
_FIRST_NOISE = 0.10  # of the time to a first token, which an answer has once, with nothing to even it out
# What must be the same for two reports to measure the same thing; what differs is said.
_SETTINGS = (
    *("model", "precision", "taps", "target_fingerprint", "max_tokens", "prompts_sha256", "threads", "provider"),
    *("cpu", "mode", "draft_nodes", "tuned", "exact", "partial"),
)
# Figures that a report holds once: name, where it stands, whether its noise is that of speeds too, whether it is judged
# at all. How much the slowest rounds of a run differ from those of the next is not to be had from one run of each.
_FIGURES: tuple[tuple[str, tuple[str, ...], bool, bool], ...] = (
    ("ms per token, p50", ("ms_per_token", "p50"), True, True),
    ("ms per token, p99", ("ms_per_token", "p99"), True, False),
    ("peak memory, bytes", ("peak_memory_bytes",), False, True),
    ("steady anonymous memory, bytes", ("memory", "steady", "anonymous"), False, True),
    ("steady memory (Pss), bytes", ("memory", "steady", "pss"), False, True),
)

_Answer = Mapping[str, Any]
_Answers = Sequence[_Answer]  # one or more to the same turn of a prompt: a long run asks again and again


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure in both reports."""

    name: str
    before: float
    after: float
    ratio: float  # after / before
    interval: tuple[float, float] | None  # 95 %, of the ratio, over the answers that both gave
    noise: float  # |ratio - 1| that is taken for noise
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is to be said of two reports, A and B."""

    changes: tuple[Change, ...]
    differing: Mapping[str, tuple[Any, Any]]  # settings that are not the same
    shared: int  # answers that both gave
    other_tokens: int  # of those, how many have other tokens, as far as both go
    only: tuple[int, int]  # answers that A alone gave, and B alone
    noise: float  # relative difference of speeds that is taken for noise
    notes: tuple[str, ...]  # what else a reader must know, a line each


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
    """Figures are paired answer by answer; a change counts when its interval excludes 1 and it is more than noise."""
    noise = max(MUCH_SPREAD, *(_unsteadiness(report) for report in (before, after)))
    old, new = (_by_turn(report) for report in (before, after))
    pairs = [(old[key], new[key]) for key in old if key in new]
    only = (len(old) - len(pairs), len(new) - len(pairs))
    pairs = [(one[: len(other)], other[: len(one)]) for one, other in pairs]  # as often in both
    alike = not any(only) and before.get("max_tokens") == after.get("max_tokens")
    changes = [
        *(_paired(name, pairs, values, figure, up, noise) for name, values, figure, up in _PAIRED),
        _paired("tau", pairs, _rounds, ratio_of_sums, True, _TAU_NOISE),
        _paired("first token, ms", pairs, _first_token, median_of_ratios, False, max(noise, _wavering(pairs))),
        *(
            _once(name, place, before, after, max(_PROCESS_NOISE, noise if timed else 0.0), judged and alike)
            for name, place, timed, judged in _FIGURES
        ),
    ]
    return Comparison(
        changes=tuple(change for change in changes if change is not None),
        differing={
            name: (before.get(name), after.get(name)) for name in _SETTINGS if before.get(name) != after.get(name)
        },
        shared=len(pairs),
        other_tokens=sum(_other_tokens(one[0], other[0]) for one, other in pairs),
        only=only,
        noise=noise,
        notes=(*_notes_of_reports(before, after), *_notes_of_verdicts(len(pairs), alike)),
    )


def _unsteadiness(report: Mapping[str, Any]) -> float:
    """How far a report's own figures moved while it was made, or may have: what others took of the cores is lost."""
    load = (report.get("noise") or {}).get("load") or {}
    moved = abs((report.get("drift") or 1.0) - 1.0)
    return float(max(report.get("spread") or 0.0, moved, load.get("others") or 0.0, load.get("steal") or 0.0))


def _wavering(pairs: Sequence[tuple[_Answers, _Answers]]) -> float:
    """How much the time to a first token differs between two readings of a prompt in one report, at least 10 %.

    Every prompt is read twice, plain and not. What the draft adds is the same for all, so it is no noise.
    """
    found = [_FIRST_NOISE]
    for side in (0, 1):
        answers = [answer for pair in pairs for answer in pair[side]]
        ratios = [
            answer["time_to_first_token_ms"] / plain
            for answer in answers
            if (plain := answer["plain"]["time_to_first_token_ms"]) > 0.0
        ]
        middle = statistics.median(ratios) if ratios else 0.0
        if middle > 0.0:
            found.append(statistics.median(abs(ratio / middle - 1.0) for ratio in ratios))
    return max(found)


def _by_turn(report: Mapping[str, Any]) -> dict[tuple[str, int], list[_Answer]]:
    found: dict[tuple[str, int], list[_Answer]] = {}
    for answer in report.get("prompts", ()):
        found.setdefault((answer["id"], answer["turn"]), []).append(answer)
    return found


def _other_tokens(one: _Answer, other: _Answer) -> bool:
    """Whether the tokens differ before one of both ends; an end token is a token too."""
    return any(a != b for a, b in zip(one["token_ids"], other["token_ids"], strict=False))


def _notes_of_reports(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name, report in (("A", before), ("B", after)):
        count, first = len(report.get("by_threads") or ()), report.get("threads")
        if count > 1:
            yield (
                f"{name} holds {count} thread counts; the first, {first} thread{'' if first == 1 else 's'}, is compared"
            )
        yield from (f"{name}: {words}" for words in (report.get("noise") or {}).get("words", ()))


def _notes_of_verdicts(shared: int, alike: bool) -> Iterator[str]:
    if shared < 2:
        yield "not judged: figures of answers, for which at least two must be in both"
    if alike:
        yield "not judged: ms per token, p99, which is of the few slowest rounds of one run each"
    else:
        yield (
            "not judged: memory and ms per token, which are of whole reports, and these do not hold the same answers "
            "of the same length"
        )


# --- figures over answers: what an answer gives, its repeats together ------------------------------------------------


def _decoding(answer: _Answer) -> tuple[float, float]:
    """Tokens after the first, and the seconds that they took."""
    return float((len(answer["token_ids"]) - 1) * len(answer["seconds"])), float(sum(answer["seconds"]))


def _plain_decoding(answer: _Answer) -> tuple[float, float]:
    return _decoding(answer["plain"])


def _both_ways(answer: _Answer) -> tuple[float, ...]:
    return *_decoding(answer), *_decoding(answer["plain"])


def _first_token(answer: _Answer) -> tuple[float, float]:
    """Milliseconds, of one answer."""
    return float(answer["time_to_first_token_ms"]), 1.0


def _rounds(answer: _Answer) -> tuple[float, float]:
    """Tokens that verifications brought, and verifications; all tokens but the first come from one."""
    emitted = float(len(answer["token_ids"]) - 1)
    return (emitted, emitted / answer["tau"]) if answer["tau"] else (0.0, 0.0)


def _speedup(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return ratio_of_sums(values[..., :2]) / ratio_of_sums(values[..., 2:])


_PAIRED: tuple[tuple[str, Callable[[_Answer], Sequence[float]], Figure, bool], ...] = (
    ("tokens/s, speculative", _decoding, ratio_of_sums, True),
    ("tokens/s, plain", _plain_decoding, ratio_of_sums, True),
    ("speed-up over plain, total", _both_ways, _speedup, True),
)


def _paired(
    name: str,
    pairs: Sequence[tuple[_Answers, _Answers]],
    values: Callable[[_Answer], Sequence[float]],
    figure: Figure,
    more_is_better: bool,
    noise: float,
) -> Change | None:
    """A figure over the shared answers; None where there is nothing to take it of."""
    if not pairs:
        return None
    # float64 [shared answers, values]; several answers to one prompt are no more independent than one, so they are one.
    one, other = (np.array([np.sum([values(a) for a in pair[side]], axis=0) for pair in pairs]) for side in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        before, after = float(figure(one)), float(figure(other))
    if not (math.isfinite(before) and math.isfinite(after) and before > 0.0):
        return None
    interval = interval_of_change(one, other, figure)
    changed = interval is not None and not interval[0] <= 1.0 <= interval[1]
    return Change(
        name=name,
        before=before,
        after=after,
        ratio=after / before,
        interval=interval,
        noise=noise,
        verdict="not judged" if interval is None else _verdict(after / before, more_is_better, noise, changed),
    )


def _once(
    name: str,
    place: Sequence[str],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    noise: float,
    judged: bool,
) -> Change | None:
    """A figure that a report holds once, and less of it is better."""
    one, other = _at(before, place), _at(after, place)
    if one is None or other is None or one <= 0.0:
        return None
    ratio = other / one
    verdict = _verdict(ratio, False, noise, changed=True) if judged else "not judged"
    return Change(name=name, before=one, after=other, ratio=ratio, interval=None, noise=noise, verdict=verdict)


def _verdict(ratio: float, more_is_better: bool, noise: float, changed: bool) -> Verdict:
    if not changed or abs(ratio - 1.0) <= noise:
        return "within noise"
    return "better" if (ratio > 1.0) == more_is_better else "worse"


def _at(report: Mapping[str, Any], place: Sequence[str]) -> float | None:
    value: Any = report
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
