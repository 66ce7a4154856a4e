"""What a bench measured, and what follows from it. Pure, no I/O.

Definitions. `tokens_per_s` counts the tokens after the first over the seconds after the first, so without prefill, over
all answers together. `speedup` is the median over answers of speculative over plain tokens/s, each pair measured back
to back; `speedup_total` is the ratio of the two totals. `tau` is tokens emitted per verification, the bonus included.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from elsi_edge.artifacts import to_plain
from elsi_edge.loops import is_looping
from elsi_edge.runtime.result import GenerationResult, SourceCounts
from elsi_edge.runtime.tree import Source

_CARRIED = 0.9  # a speed-up that falls below this share of itself without looping answers was carried by them


@dataclass(frozen=True, kw_only=True)
class BenchAnswer:
    """One turn of one prompt, answered both ways."""

    id: str
    category: str
    turn: int  # from 0
    plain: GenerationResult  # of the first repeat
    speculative: GenerationResult
    plain_seconds: float  # after the first token, all repeats together
    speculative_seconds: float
    repeats: int
    identical: bool  # every repeat of both gave the same tokens

    @property
    def looping(self) -> bool:
        """Whether the plain answer repeats itself."""
        return is_looping(self.plain.token_ids)

    @property
    def speedup(self) -> float | None:
        """Speculative over plain tokens/s; None for answers of a single token."""
        if len(self.plain.token_ids) < 2 or len(self.speculative.token_ids) < 2:
            return None
        plain = (len(self.plain.token_ids) - 1) / self.plain_seconds
        return (len(self.speculative.token_ids) - 1) / self.speculative_seconds / plain


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
    time_to_first_token_ms: float | None  # median


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What `bench` says; `to_json` puts the speculative totals at the top."""

    answers: tuple[BenchAnswer, ...]
    speculative: ArmTotals
    plain: ArmTotals
    speedup: float | None
    speedup_total: float | None
    identical: bool
    drift: float | None  # plain tokens/s of the second half of the answers over the first half
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
        return _ratio(empty, self.speculative.verifications)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak resident set of the process, which ran both arms."""
        return max(answer.speculative.peak_memory_bytes for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """Plain values under the contract's names."""
        first = self.answers[0].speculative
        return {
            **to_plain(self.speculative),
            "speedup": self.speedup,
            "speedup_total": self.speedup_total,
            "identical": self.identical,
            "exact": first.exact,
            "exactness": first.exactness,
            "mode": first.mode,
            "draft_nodes": first.draft_nodes,
            "precision": first.precision,
            "provider": first.provider,
            "threads": first.threads,
            "tuned": first.tuned,
            "by_source": {name: to_plain(counts) for name, counts in self.by_source.items()},
            "empty_share": self.empty_share,
            "switched_off": sum(answer.speculative.switched_off for answer in self.answers),
            "peak_memory_bytes": self.peak_memory_bytes,
            "drift": self.drift,
            "looping": {
                "answers": self.looping,
                "tau_without": self.tau_without_looping,
                "speedup_without": self.speedup_without_looping,
            },
            "warnings": list(self.warnings),
            "plain": to_plain(self.plain),
            "categories": {name: _category(group) for name, group in by_category(self.answers).items()},
            "prompts": [_answer_json(answer) for answer in self.answers],
        }


def summarise(answers: Sequence[BenchAnswer]) -> BenchReport:
    """Totals over answers, at least one. Pure."""
    straight = [answer for answer in answers if not answer.looping]
    plain, speculative = _totals(answers, plain=True), _totals(answers, plain=False)
    half = len(answers) // 2
    early, late = (_totals(part, plain=True).tokens_per_s for part in (answers[:half], answers[half:]))
    speedup, without = _median_speedup(answers), _median_speedup(straight)
    return BenchReport(
        answers=tuple(answers),
        speculative=speculative,
        plain=plain,
        speedup=speedup,
        speedup_total=_ratio(speculative.tokens_per_s, plain.tokens_per_s),
        identical=all(answer.identical for answer in answers),
        drift=_ratio(late, early),
        looping=len(answers) - len(straight),
        tau_without_looping=_totals(straight, plain=False).tau,
        speedup_without_looping=without,
        warnings=tuple(_warnings(answers, straight, speedup, without)),
    )


def by_category(answers: Sequence[BenchAnswer]) -> dict[str, list[BenchAnswer]]:
    """Answers by category, in the order in which categories first appear."""
    groups: dict[str, list[BenchAnswer]] = {}
    for answer in answers:
        groups.setdefault(answer.category, []).append(answer)
    return groups


def _totals(answers: Sequence[BenchAnswer], *, plain: bool) -> ArmTotals:
    results = [answer.plain if plain else answer.speculative for answer in answers]
    seconds = sum(answer.plain_seconds if plain else answer.speculative_seconds for answer in answers)
    verifications = sum(result.verifications for result in results)
    emitted = sum((result.tau or 0.0) * result.verifications for result in results)
    depths = max((len(result.accepted_by_depth) for result in results), default=0)
    accepted = [sum(r.accepted_by_depth[d] for r in results if d < len(r.accepted_by_depth)) for d in range(depths)]
    after_first = sum(len(result.token_ids) - 1 for result in results)
    return ArmTotals(
        answers=len(results),
        tokens=sum(len(result.token_ids) for result in results),
        tau=_ratio(emitted, verifications),
        accepted_per_verification=_ratio(sum(accepted), verifications),
        accepted_by_depth=tuple(count / verifications for count in accepted),
        verifications=verifications,
        tokens_per_s=_ratio(after_first, seconds) if after_first else None,
        time_to_first_token_ms=_median([result.time_to_first_token_ms for result in results]),
    )


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


def _category(group: Sequence[BenchAnswer]) -> dict[str, Any]:
    totals, plain = _totals(group, plain=False), _totals(group, plain=True)
    return {
        "answers": totals.answers,
        "tokens": totals.tokens,
        "tau": totals.tau,
        "tokens_per_s": totals.tokens_per_s,
        "plain_tokens_per_s": plain.tokens_per_s,
        "speedup": _median_speedup(group),
        "identical": all(answer.identical for answer in group),
    }


def _answer_json(answer: BenchAnswer) -> dict[str, Any]:
    def arm(result: GenerationResult, seconds: float) -> dict[str, Any]:
        after_first = len(result.token_ids) - 1
        return {
            "token_ids": list(result.token_ids),
            "text": result.text,
            "finish_reason": result.finish_reason,
            "tokens_per_s": _ratio(after_first, seconds) if after_first else None,
            "time_to_first_token_ms": result.time_to_first_token_ms,
        }

    return {
        "id": answer.id,
        "category": answer.category,
        "turn": answer.turn,
        "prompt_tokens": answer.plain.prompt_tokens,
        **arm(answer.speculative, answer.speculative_seconds),
        "tau": answer.speculative.tau,
        "speedup": answer.speedup,
        "identical": answer.identical,
        "looping": answer.looping,
        "plain": arm(answer.plain, answer.plain_seconds),
    }


def _add(counts: Sequence[SourceCounts]) -> SourceCounts:
    def by_depth(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(column) for column in zip_longest(*parts, fillvalue=0))

    return SourceCounts(
        drafted=sum(one.drafted for one in counts),
        accepted=sum(one.accepted for one in counts),
        drafted_by_depth=by_depth([one.drafted_by_depth for one in counts]),
        accepted_by_depth=by_depth([one.accepted_by_depth for one in counts]),
    )


def _median_speedup(answers: Sequence[BenchAnswer]) -> float | None:
    return _median([answer.speedup for answer in answers if answer.speedup is not None])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
