"""Speculative over plain decoding by category and precision, paired and interleaved, with 95 % intervals.

    python -m tests.figures.speedup BUNDLE... --prompts FILE --out FILE [--limit 240] [--tokens 128] [--repeats 5]

Both arms are of the same mode and are as a user has them: with the tuning file beside the bundle, where there is one.
Every repeat answers every prompt both ways, back to back and taking turns at going first. A category's ratio in a
repeat is plain seconds over speculative seconds, all its answers together, without prefill (and with it beside it); the
interval is Student's over the repeats. The file is written after each repeat; the same command goes on from it.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import t as student

from elsi_edge.artifacts import PromptRow
from elsi_edge.loops import is_looping
from elsi_edge.runtime.bench.run import BenchSettings, warm_up
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.result import GenerationResult
from elsi_edge.runtime.session import Session
from tests.figures.common import arguments, prompts, save

PARTS = ("propose", "verify", "other")
Sums = dict[str, dict[str, dict[str, float]]]  # by category, arm and what is summed


def seconds(result: GenerationResult) -> float:
    """After the first token."""
    timings = result.timings
    return timings.propose + timings.verify + timings.other


def add(sums: Sums, category: str, arm: str, result: GenerationResult) -> None:
    """Add an answer to a category's sums and to those of all."""
    for name in (category, "all", *(["looping"] if is_looping(result.token_ids) else ["without loops"])):
        one = sums.setdefault(name, {}).setdefault(arm, {})
        values = {
            "answers": 1,
            "tokens": len(result.token_ids) - 1,
            "seconds": seconds(result),
            "end_to_end": seconds(result) + result.timings.prefill,
            "verifications": result.verifications,
            "drafted": result.drafted,
            "empty": result.empty_rounds,
            "switched_off": result.switched_off,
            **{part: getattr(result.timings, part) for part in PARTS},
        }
        for source, counts in result.by_source.items():
            values |= {f"{source} drafted": counts.drafted, f"{source} accepted": counts.accepted}
        for key, value in values.items():
            one[key] = one.get(key, 0) + value


def repeat(
    session: Session, rows: list[PromptRow], number: int, arms: Mapping[str, GenerateOptions]
) -> tuple[Sums, int]:
    """One repeat of two arms, taking turns at going first: sums by category, and how many token lists differed."""
    sums: Sums = {}
    different = 0
    for place, row in enumerate(rows):
        order = list(arms)[:: -1 if (place + number) % 2 else 1]
        results = {arm: session.generate(row.turns[0], arms[arm]) for arm in order}
        different += len({result.token_ids for result in results.values()}) > 1
        for arm, result in results.items():
            add(sums, row.category or "uncategorised", arm, result)
    return sums, different


def interval(values: list[float]) -> dict[str, float | None]:
    """Mean and 95 % interval over repeats."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"ratio": mean, "low": None, "high": None}
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return {"ratio": mean, "low": mean - half, "high": mean + half}


def table(repeats: list[Sums]) -> dict[str, Any]:
    """By category: the ratio and its interval, and where a token's time goes."""
    found = {}
    for name in repeats[0]:
        ratios = [one[name]["plain"]["seconds"] / one[name]["fast"]["seconds"] for one in repeats if name in one]
        whole = [one[name]["plain"]["end_to_end"] / one[name]["fast"]["end_to_end"] for one in repeats if name in one]
        total = {
            arm: {key: sum(one[name][arm].get(key, 0) for one in repeats) for key in repeats[0][name][arm]}
            for arm in ("plain", "fast")
        }
        fast, plain = total["fast"], total["plain"]
        sources = {key.split()[0] for key in fast if key.endswith(" drafted")}
        found[name] = {
            **interval(ratios),
            "end_to_end": interval(whole)["ratio"],
            "answers": repeats[0][name]["fast"]["answers"],
            "tau": fast["tokens"] / fast["verifications"],
            "nodes_per_round": fast["drafted"] / fast["verifications"],
            "empty_share": fast["empty"] / fast["verifications"],
            "switched_off": fast["switched_off"],
            "tokens_per_s": fast["tokens"] / fast["seconds"],
            "plain_tokens_per_s": plain["tokens"] / plain["seconds"],
            "ms_per_token": {part: 1e3 * fast[part] / fast["tokens"] for part in PARTS},
            "plain_ms_per_token": {part: 1e3 * plain[part] / plain["tokens"] for part in PARTS},
            "accepted": {source: fast[f"{source} accepted"] / fast[f"{source} drafted"] for source in sorted(sources)},
        }
    return found


def main() -> None:
    """Measure every bundle named."""
    options = arguments(__doc__ or "", limit=240, tokens=128, repeats=5)
    rows = [replace(row, turns=row.turns[:1]) for row in prompts(options, options.limit)]
    figures: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    figures |= {"prompts": len(rows), "tokens": options.tokens}
    arms = {"plain": GenerateOptions(plain=True, max_tokens=options.tokens)}
    arms["fast"] = GenerateOptions(max_tokens=options.tokens)
    for path in options.bundles:
        session = Session.open(path)
        kept = figures.setdefault(session.precision, {"repeats": [], "different": 0})
        kept["choice"] = None if session.tuning is None else session.tuning.to_json()["choice"]
        warm_up(session, rows[0], BenchSettings(max_tokens=options.tokens))
        while len(kept["repeats"]) < options.repeats:
            sums, different = repeat(session, rows, len(kept["repeats"]), arms)
            kept["repeats"].append(sums)
            kept["different"] += different
            kept["table"] = table(kept["repeats"])
            save(options.out, figures)
            for name, line in kept["table"].items():
                shown = " ".join(f"{key} {line[key]:.3f}" for key in ("ratio", "low", "high", "tau") if line[key])
                print(f"{session.precision} {name}: {shown}", file=sys.stderr)  # noqa: T201 - a script's progress


if __name__ == "__main__":
    main()
