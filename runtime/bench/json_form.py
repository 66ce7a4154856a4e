"""A bench's report as one JSON object: the format that `bench.schema.json` describes."""

from collections.abc import Mapping, Sequence
from typing import Any

from elsi_edge.artifacts import to_plain
from elsi_edge.runtime.bench.answers import BenchAnswer, by_category, decode_seconds
from elsi_edge.runtime.bench.report import BenchReport, median_speedup, ratio, totals
from elsi_edge.runtime.result import GenerationResult

FORMAT = "elsi-edge-bench"
FORMAT_VERSION = 1


def report_json(report: BenchReport) -> dict[str, Any]:
    """Plain values under the contract's names; the speculative totals stand at the top."""
    first = report.answers[0].speculative
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **to_plain(report.speculative),
        "speedup": report.speedup,
        "speedup_interval": to_plain(report.speedup_interval),
        "speedup_total": report.speedup_total,
        "end_to_end": report.end_to_end,
        "end_to_end_interval": to_plain(report.end_to_end_interval),
        "identical": report.identical,
        "exact": first.exact,
        "exactness": first.exactness,
        "mode": first.mode,
        "draft_nodes": first.draft_nodes,
        "precision": first.precision,
        "provider": first.provider,
        "threads": first.threads,
        "tuned": first.tuned,
        "by_source": {name: to_plain(counts) for name, counts in report.by_source.items()},
        "empty_share": report.empty_share,
        "switched_off": sum(answer.speculative.switched_off for answer in report.answers),
        "peak_memory_bytes": report.peak_memory_bytes,
        "drift": report.drift,
        "spread": report.spread,
        "looping": {
            "answers": report.looping,
            "tau_without": report.tau_without_looping,
            "speedup_without": report.speedup_without_looping,
        },
        "warnings": list(report.warnings),
        "plain": to_plain(report.plain),
        "categories": {name: _category(group) for name, group in by_category(report.answers).items()},
        "prompts": [_answer(answer) for answer in report.answers],
    }


def windows(answers: Sequence[BenchAnswer], count: int = 10) -> list[Mapping[str, Any]]:
    """A long run cut into stretches of equal time, empty ones left out: does the device throttle?"""
    if not answers or answers[-1].at_s <= 0.0:
        return []
    span = answers[-1].at_s / count
    found: list[Mapping[str, Any]] = []
    for place in range(count):
        inside = [a for a in answers if min(count - 1, int(a.at_s / span)) == place]
        if inside:
            fast, plain = totals(inside, plain=False), totals(inside, plain=True)
            found.append(
                {
                    "until_s": (place + 1) * span,
                    "answers": len(inside),
                    "tokens_per_s": fast.tokens_per_s,
                    "plain_tokens_per_s": plain.tokens_per_s,
                }
            )
    return found


def _category(group: Sequence[BenchAnswer]) -> dict[str, Any]:
    fast, plain = totals(group, plain=False), totals(group, plain=True)
    return {
        "answers": fast.answers,
        "tokens": fast.tokens,
        "tau": fast.tau,
        "tokens_per_s": fast.tokens_per_s,
        "plain_tokens_per_s": plain.tokens_per_s,
        "speedup": median_speedup(group),
        "identical": all(answer.identical for answer in group),
    }


def _answer(answer: BenchAnswer) -> dict[str, Any]:
    def arm(result: GenerationResult, runs: Sequence[GenerationResult]) -> dict[str, Any]:
        after_first, seconds = len(result.token_ids) - 1, sum(map(decode_seconds, runs)) / len(runs)
        return {
            "token_ids": list(result.token_ids),
            "text": result.text,
            "finish_reason": result.finish_reason,
            "tokens_per_s": ratio(after_first, seconds) if after_first else None,
            "time_to_first_token_ms": result.time_to_first_token_ms,
            "seconds": [decode_seconds(run) for run in runs],
        }

    return {
        "id": answer.id,
        "category": answer.category,
        "turn": answer.turn,
        "prompt_tokens": answer.plain.prompt_tokens,
        **arm(answer.speculative, answer.speculative_runs),
        "tau": answer.speculative.tau,
        "speedup": answer.speedup,
        "end_to_end": answer.end_to_end,
        "identical": answer.identical,
        "looping": answer.looping,
        "plain": arm(answer.plain, answer.plain_runs),
    }
