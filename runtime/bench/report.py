"""What a bench measured, and what follows from it. Pure, no I/O.

Definitions. `tokens_per_s` counts the tokens after the first over the seconds after the first, so without prefill, over
all answers together. `speedup` is the median over answers of speculative over plain tokens/s, each pair measured back
to back; `speedup_total` is the ratio of the two totals; `end_to_end` is the median with prefill. `tau` is tokens
emitted per verification, the bonus included. A round that brings k tokens in t ms gives k tokens of t / k ms each;
percentiles of `ms_per_token` are over tokens, those of `ms_per_round` over rounds: what someone who watches the text
waits between two pieces of it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from elsi_edge.runtime.bench.answers import BenchAnswer, decode_seconds, end_to_end_seconds
from elsi_edge.runtime.bench.intervals import interval_of_median, interval_of_ratio, percentiles
from elsi_edge.runtime.bench.noise import spread_of_repeats
from elsi_edge.runtime.result import GenerationResult, SourceCounts
from elsi_edge.runtime.tree import Source

_CARRIED = 0.9  # a speed-up that falls below this share of itself without looping answers was carried by them
_PERCENTILES = (0.5, 0.9, 0.99)

Interval = tuple[float, float]  # 95 %, percentile bootstrap over answers


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of milliseconds; None where nothing was decoded after the first token."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of the time after the first token: drafting, the target's calls, and the rest (sampling, commit, text)."""

    propose: float
    verify: float
    other: float


@dataclass(frozen=True, kw_only=True)
class ArmTotals:
    """One way of decoding over a set of answers."""

    answers: int
    tokens: int  # of the first repeat
    tau: float | None
    accepted_per_verification: float | None  # drafts alone
    accepted_by_depth: tuple[float, ...]  # share of verifications that accepted a node at depth 1, 2, ...
    verifications: int
    tokens_per_s: float | None
    tokens_per_s_interval: Interval | None
    end_to_end_tokens_per_s: float  # prefill included
    time_to_first_token_ms: float | None  # median
    ms_per_token: Percentiles
    ms_per_round: Percentiles
    shares: Shares | None
    joules_per_token: float | None  # None where energy cannot be read


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What `bench` says; `to_json` puts the speculative totals at the top."""

    answers: tuple[BenchAnswer, ...]
    speculative: ArmTotals
    plain: ArmTotals
    speedup: float | None
    speedup_interval: Interval | None
    speedup_total: float | None
    end_to_end: float | None
    end_to_end_interval: Interval | None
    identical: bool
    drift: float | None  # plain tokens/s of the second half of the answers over the first half
    spread: float | None  # of repeats of the same answer, relative
    looping: int  # answers that loop
    tau_without_looping: float | None
    speedup_without_looping: float | None
    warnings: tuple[str, ...]

    @property
    def by_source(self) -> dict[Source, SourceCounts]:
        """What became of the speculative arm's nodes, by who proposed them."""
        results = [answer.speculative for answer in self.answers]
        names = dict.fromkeys(name for result in results for name in result.by_source)
        return {name: _add([r.by_source[name] for r in results if name in r.by_source]) for name in names}

    @property
    def empty_share(self) -> float | None:
        """Share of verifications without candidates."""
        empty = sum(answer.speculative.empty_rounds for answer in self.answers)
        return ratio(empty, self.speculative.verifications)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak resident set of the process, which ran both arms."""
        return max(answer.speculative.peak_memory_bytes for answer in self.answers)


def summarise(answers: Sequence[BenchAnswer]) -> BenchReport:
    """Totals over answers, at least one. Pure."""
    straight = [answer for answer in answers if not answer.looping]
    plain, speculative = totals(answers, plain=True), totals(answers, plain=False)
    half = len(answers) // 2
    early, late = (totals(part, plain=True).tokens_per_s if part else None for part in (answers[:half], answers[half:]))
    speedup, without = median_speedup(answers), median_speedup(straight)
    end_to_end = [answer.end_to_end for answer in answers]
    return BenchReport(
        answers=tuple(answers),
        speculative=speculative,
        plain=plain,
        speedup=speedup,
        speedup_interval=interval_of_median(_speedups(answers)),
        speedup_total=ratio(speculative.tokens_per_s, plain.tokens_per_s),
        end_to_end=statistics.median(end_to_end),
        end_to_end_interval=interval_of_median(end_to_end),
        identical=all(answer.identical for answer in answers),
        drift=ratio(late, early),
        spread=spread_of_repeats([[decode_seconds(run) for run in answer.plain_runs] for answer in answers]),
        looping=len(answers) - len(straight),
        tau_without_looping=totals(straight, plain=False).tau if straight else None,
        speedup_without_looping=without,
        warnings=tuple(_warnings(answers, straight, speedup, without)),
    )


def totals(answers: Sequence[BenchAnswer], *, plain: bool) -> ArmTotals:
    """One way of decoding over answers, at least one."""
    results = [answer.plain if plain else answer.speculative for answer in answers]
    every = [answer.plain_runs if plain else answer.speculative_runs for answer in answers]
    runs = [run for group in every for run in group]
    verifications = sum(result.verifications for result in results)
    emitted = sum((result.tau or 0.0) * result.verifications for result in results)
    depths = max((len(result.accepted_by_depth) for result in results), default=0)
    accepted = [sum(r.accepted_by_depth[d] for r in results if d < len(r.accepted_by_depth)) for d in range(depths)]
    after_first = [float(sum(len(run.token_ids) - 1 for run in group)) for group in every]
    seconds = [sum(map(decode_seconds, group)) for group in every]
    tokens = sum(len(run.token_ids) for run in runs)
    joules = [answer.joules[0 if plain else 1] for answer in answers if answer.joules is not None]
    return ArmTotals(
        answers=len(results),
        tokens=sum(len(result.token_ids) for result in results),
        tau=ratio(emitted, verifications),
        accepted_per_verification=ratio(sum(accepted), verifications),
        accepted_by_depth=tuple(count / verifications for count in accepted),
        verifications=verifications,
        tokens_per_s=ratio(sum(after_first), sum(seconds)) if sum(after_first) else None,
        tokens_per_s_interval=interval_of_ratio(after_first, seconds) if sum(after_first) else None,
        end_to_end_tokens_per_s=tokens / sum(map(end_to_end_seconds, runs)),
        time_to_first_token_ms=statistics.median(run.time_to_first_token_ms for run in runs),
        ms_per_token=_percentiles(runs, lambda tokens: [1.0 / count for count in tokens], lambda tokens: tokens),
        ms_per_round=_percentiles(runs, lambda tokens: [1.0] * len(tokens), lambda tokens: [1.0] * len(tokens)),
        shares=_shares(runs),
        joules_per_token=sum(joules) / tokens if joules else None,
    )


def median_speedup(answers: Sequence[BenchAnswer]) -> float | None:
    """None without any answer of two tokens."""
    speedups = _speedups(answers)
    return statistics.median(speedups) if speedups else None


def ratio(value: float | None, base: float | None) -> float | None:
    """None where there is nothing to divide, or nothing to divide by."""
    return value / base if value is not None and base else None


def _speedups(answers: Sequence[BenchAnswer]) -> list[float]:
    return [answer.speedup for answer in answers if answer.speedup is not None]


def _percentiles(
    runs: Sequence[GenerationResult],
    share: Callable[[Sequence[int]], Sequence[float]],
    weight: Callable[[Sequence[int]], Sequence[float]],
) -> Percentiles:
    """Of the rounds' milliseconds times `share`, each counted `weight` times."""
    tokens = [count for run in runs for count in run.round_tokens]
    took = [ms for run in runs for ms in run.round_ms]
    values = [ms * part for ms, part in zip(took, share(tokens), strict=True)]
    return Percentiles(
        **dict(zip(("p50", "p90", "p99"), percentiles(values, weight(tokens), _PERCENTILES), strict=True))
    )


def _shares(runs: Sequence[GenerationResult]) -> Shares | None:
    parts = [sum(getattr(run.timings, name) for run in runs) for name in ("propose", "verify", "other")]
    if not sum(parts):
        return None
    propose, verify, other = (part / sum(parts) for part in parts)
    return Shares(propose=propose, verify=verify, other=other)


def _warnings(
    answers: Sequence[BenchAnswer], straight: Sequence[BenchAnswer], speedup: float | None, without: float | None
) -> Iterator[str]:
    yield from sorted({line for answer in answers for line in answer.speculative.warnings})
    if len(straight) == len(answers):
        return
    if not straight:
        yield "every answer repeats itself; nothing here says how fast other text is"
    elif speedup and without and speedup > 1.0 and without < max(1.0, speedup * _CARRIED):
        yield f"looping answers carry the speed-up: {speedup:.2f} with them, {without:.2f} without"


def _add(counts: Sequence[SourceCounts]) -> SourceCounts:
    def by_depth(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(column) for column in zip_longest(*parts, fillvalue=0))

    return SourceCounts(
        drafted=sum(one.drafted for one in counts),
        accepted=sum(one.accepted for one in counts),
        drafted_by_depth=by_depth([one.drafted_by_depth for one in counts]),
        accepted_by_depth=by_depth([one.accepted_by_depth for one in counts]),
    )
