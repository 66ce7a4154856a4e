"""tau at T = 1 from real runs of a draft, and what one of its levels costs: `python -m tests.figures.table_sample ...`.

    python -m tests.figures.table_sample DRAFT --prompts spec_bench_dev.jsonl --out sampled.json

Exports the draft with the built-in target at int4 beside itself, answers five prompts a category at temperature 1,
64 tokens, with a chain of 4 and a tree of 30 nodes, draft nodes only; then times one level of one node, and checks
the replay's tau at T = 0 against real runs of the same prompts where asked (`--greedy`).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elsi_edge import GenerateOptions, Session, SessionSettings
from elsi_edge.artifacts import PromptRow
from elsi_edge.builtin import NAME
from elsi_edge.fsio import write_json
from elsi_edge.prompts import read_prompts, spread_over_categories
from elsi_edge.runtime.options import DraftShape
from elsi_edge.runtime.tree import ROOT

SHAPES: tuple[tuple[str, int, DraftShape], ...] = (("chain-4", 4, "chain"), ("tree-30", 30, "tree"))
_PROMPTS = 65  # five a category
_TOKENS = 64
_LEVELS = 200  # timed


def main() -> None:
    """Export, run, write."""
    options = _options()
    bundle = options.draft / "bundle"
    if not bundle.is_dir():
        command = [sys.executable, "-m", "elsi_edge", "export", NAME, "--draft", str(options.draft)]
        command += ["--out", str(bundle), *(["--recipe", str(options.recipe)] if options.recipe else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    session = Session.open(bundle, SessionSettings(threads=options.threads, tuning=False))
    rows = spread_over_categories(read_prompts(options.prompts), _PROMPTS)
    figures: dict[str, Any] = {"prompts": len(rows), "tokens": _TOKENS, "level_ms": level_ms(session)}
    for name, nodes, shape in SHAPES:
        figures[name] = tau(session, rows, nodes, shape, temperature=1.0)
        if options.greedy:
            figures[f"{name} at T = 0"] = tau(session, rows, nodes, shape, temperature=0.0)
    write_json(options.out, figures)
    print(json.dumps(figures))  # noqa: T201 - a script's result


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--greedy", action="store_true", help="real runs at T = 0 too, to compare with the replay")
    parser.add_argument("--recipe", type=Path, help="the target's, where the shards were made with one")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def tau(session: Session, rows: Sequence[PromptRow], nodes: int, shape: DraftShape, *, temperature: float) -> float:
    """Tokens per verification over all prompts, draft nodes only."""
    emitted, verifications = 0.0, 0
    for seed, row in enumerate(rows):
        options = GenerateOptions(
            draft_nodes=nodes, shape=shape, proposals=("draft",), exact=shape == "chain", max_tokens=_TOKENS,
            temperature=temperature, seed=seed,
        )  # fmt: skip
        result = session.generate(row.turns[0], options)
        if result.tau is not None:
            emitted += result.tau * result.verifications
            verifications += result.verifications
    return emitted / verifications


def level_ms(session: Session) -> float:
    """Median milliseconds of one draft level of one node, after a short prompt."""
    session.generate("Name a river.", GenerateOptions(max_tokens=8, draft_nodes=1, proposals=("draft",)))
    draft = session.engine(exact=True).proposer.drafter.draft  # type: ignore[union-attr]
    states = np.zeros((1, draft.config.width), np.float32)
    times = []
    for _ in range(_LEVELS):
        start = time.perf_counter()
        draft.expand([1], states, 1, [ROOT])
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
