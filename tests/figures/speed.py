"""tau and the paired speed ratio by budget, as the README's table.

    python -m tests.figures.speed BUNDLE... --prompts FILE --out FILE [--limit 40] [--repeats 1]

Plain and speculative runs of the same mode alternate, answer by answer; the ratio is the median over answers of
speculative over plain tokens/s without prefill, with the quartiles beside it.
"""

from dataclasses import asdict, replace
from statistics import quantiles
from typing import Any

from elsi_edge.artifacts import PromptRow
from elsi_edge.loops import is_looping
from elsi_edge.runtime.bench.run import BenchSettings, measure, warm_up
from elsi_edge.runtime.session import Session
from tests.figures.common import arguments, prompts, save

BUDGETS = (1, 2, 3, 4, 8)


def budget_figures(session: Session, rows: list[PromptRow], settings: BenchSettings) -> dict[str, Any]:
    """One line of the table: a budget on a bundle."""
    answers = list(measure(session, rows, settings))
    ratios = [a.plain_seconds / a.speculative_seconds for a in answers if len(a.plain.token_ids) > 1]
    low, median, high = quantiles(ratios, n=4)
    fast = [a.speculative for a in answers]
    verifications = sum(r.verifications for r in fast)
    sober = [r for r in fast if not is_looping(r.token_ids)]
    return {
        "draft_nodes": settings.draft_nodes,
        "mode": fast[0].mode,
        "identical": all(a.identical for a in answers),
        "tau": _tau(fast),
        "tau_without_loops": _tau(sober),
        "looping": len(fast) - len(sober),
        "speedup": median,
        "speedup_quartiles": [low, high],
        "speedup_total": sum(a.plain_seconds for a in answers) / sum(a.speculative_seconds for a in answers),
        "plain_tokens_per_s": sum(len(a.plain.token_ids) - 1 for a in answers) / sum(a.plain_seconds for a in answers),
        "ms_per_round": {
            part: 1e3 * sum(asdict(r.timings)[part] for r in fast) / verifications
            for part in ("propose", "verify", "other")
        },
    }


def _tau(results: list[Any]) -> float | None:
    verifications = sum(r.verifications for r in results)
    return sum(len(r.token_ids) - 1 for r in results) / verifications if verifications else None


def main() -> None:
    """Measure every bundle named at every budget."""
    options = arguments(__doc__ or "", limit=40, tokens=128, repeats=1)
    rows = [replace(row, turns=row.turns[:1]) for row in prompts(options, options.limit)]
    figures: dict[str, Any] = {"prompts": len(rows), "categories": len({row.category for row in rows})}
    for path in options.bundles:
        session = Session.open(path)
        table = []
        for budget in BUDGETS:
            settings = BenchSettings(draft_nodes=budget, max_tokens=options.tokens, repeats=options.repeats)
            warm_up(session, rows[0], settings)
            table.append(budget_figures(session, rows, settings))
        figures[session.precision] = table
    save(options.out, figures)


if __name__ == "__main__":
    main()
