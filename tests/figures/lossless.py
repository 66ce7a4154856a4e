"""The same tokens: whole token lists of plain and speculative decoding, on the real model.

    python -m tests.figures.lossless BUNDLE... --prompts FILE --out FILE [--limit 40] [--tokens 128] [--scripted 64]

fp32, and with the native operators every precision, with trees of 1, 4, 8 and 30 drafted nodes; int4 and int8
without them with chains of 1, 3 and 7; each with the bundle's draft, with an oracle that is always right and with a
liar that is always wrong (their answers are cut to --scripted tokens, as a liar makes every verification bring one
token; 0 leaves both out). Budgets below --smallest run without the draft, whose token lists at those budgets speed.py
compares too. Exits with 1 when any list differs.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

from elsi_edge.artifacts import PromptRow
from elsi_edge.runtime.options import DraftShape, GenerateOptions
from elsi_edge.runtime.proposal import Proposer
from elsi_edge.runtime.result import GenerationResult
from elsi_edge.runtime.session import Session
from tests.figures.common import arguments, prompts, save
from tests.toy_proposers import LiarProposer, OracleProposer

TREES, CHAINS = (1, 4, 8, 30), (1, 3, 7)


def with_proposer(session: Session, proposer: Proposer) -> Session:
    """The same target with another source of candidates."""
    engine = session.engine(exact=True)
    return Session(
        codec=session.codec,
        engines={True: replace(engine, proposer=proposer)},
        precision=session.precision,
        context=session.context,
        settings=session.settings,
        has_draft=True,
        exact_trees=session.exact_trees,
    )


def run_budget(
    session: Session,
    rows: list[PromptRow],
    plain: list[GenerationResult],
    budget: int,
    shape: DraftShape,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Every prompt with the draft, the oracle and the liar at one budget."""
    figures: dict[str, Any] = {"draft_nodes": budget}
    sources = ("draft", "oracle", "liar") if options.scripted else ("draft",)
    for source in sources[budget < options.smallest :]:
        limit = options.tokens if source == "draft" else min(options.tokens, options.scripted)
        generate = GenerateOptions(draft_nodes=budget, shape=shape, max_tokens=limit)
        results = []
        for row, expected in zip(rows, plain, strict=True):
            run = session
            if source != "draft":
                kind = OracleProposer if source == "oracle" else LiarProposer
                run = with_proposer(session, kind(expected.token_ids))
            results.append(run.generate(row.turns[0], generate))
        same = [r.token_ids == p.token_ids[:limit] for r, p in zip(results, plain, strict=True)]
        depths = [0] * max(len(r.accepted_by_depth) for r in results)
        for result in results:
            for depth, count in enumerate(result.accepted_by_depth):
                depths[depth] += count
        emitted = sum((r.tau or 0) * r.verifications for r in results)
        figures[source] = {
            "identical": sum(same),
            "of": len(same),
            "tokens": sum(len(r.token_ids) for r in results),
            "tau": emitted / sum(r.verifications for r in results),
            "accepted_by_depth": depths,
            "mode": results[0].mode,
        }
    return figures


def main() -> None:
    """Check every bundle named."""
    options = arguments(__doc__ or "", limit=40, tokens=128, scripted=64, smallest=1)
    rows = prompts(options, options.limit)
    figures: dict[str, Any] = {"prompts": len(rows), "categories": len({row.category for row in rows})}
    whole = True
    for path in options.bundles:
        session = Session.open(path)
        trees = session.precision == "fp32" or session.exact_trees
        budgets = TREES if trees else CHAINS
        shape: DraftShape = "tree" if trees else "chain"  # whatever a tuning file prefers
        plain = [session.generate(r.turns[0], GenerateOptions(plain=True, max_tokens=options.tokens)) for r in rows]
        table = [run_budget(session, rows, plain, n, shape, options) for n in budgets]
        results = [result for line in table for result in line.values() if isinstance(result, dict)]
        whole &= all(result["identical"] == result["of"] for result in results)
        figures[session.precision] = {"tokens": sum(len(r.token_ids) for r in plain), "budgets": table}
    save(options.out, {**figures, "all_identical": whole})
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
