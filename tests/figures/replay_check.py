"""Whether the replay's verifications are those of real runs: the same answers, the same limits, answer by answer.

    python -m tests.figures.replay_check BUNDLE DRAFT SHARDS --prompts FILE [--limit 65] [--out FILE]

SHARDS are distilled from the prompts at temperature 0, with the bundle's target. Only answers that the bundle gives
token by token as they were recorded count (batches of distillation round otherwise); the bundle runs with the draft's
nodes alone, as long as the recorded answer is. The replay's draft is rounded as the bundle's is; what is left between
the two are its 8-bit activations, and the rows of a long prompt that the runtime does not let it read.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elsi_edge.bundle import read_manifest
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.replay import DRAFTINGS, greedy, replay
from elsi_edge.draft.rounding import rounded
from elsi_edge.draft.search import Drafting
from elsi_edge.prompts import read_prompts, spread_over_categories
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from tests.figures.common import save
from tests.figures.replay import network_of

_DRAFTINGS = tuple(drafting for drafting in DRAFTINGS if drafting.nodes in (4, 30))


def main() -> None:
    """Replay and run every answer, sum up, write."""
    options = _options()
    draft = load_draft(options.draft)
    data = ShardSet(options.shards, taps=draft.config.selection.taps, max_length=1 << 30)
    session = Session.open(options.bundle, SessionSettings(tuning=False))
    network = network_of(draft, data.manifest.model, data)
    ids = torch.from_numpy(draft.draft_to_target_ids)
    by_id = {row.id: row for row in spread_over_categories(read_prompts(options.prompts), options.limit)}
    real: dict[str, list[int]] = {drafting.name: [] for drafting in _DRAFTINGS}
    replayed: dict[str, list[int]] = {drafting.name: [] for drafting in _DRAFTINGS}
    tokens, asked = 0, 0
    for row in greedy(data.rows):
        prompt, answer = by_id.get(row.key.removesuffix("@0")), data.answer(row)
        if prompt is None or len(answer) < 2:
            continue
        asked += 1
        runs = {one.name: _run(session, prompt.turns[0], len(answer), one) for one in _DRAFTINGS}
        if any(token_ids != answer for token_ids, _ in runs.values()):
            continue
        with rounded(network, read_manifest(options.bundle).draft_precision):
            [(_, found)] = replay(network, data, [row], ids, _DRAFTINGS, limit=len(answer))
        tokens += len(answer) - 1
        for name, (_, verifications) in runs.items():
            real[name].append(verifications)
            replayed[name].append(found[name].verifications)
    figures = {name: _compare(tokens, real[name], replayed[name]) for name in real}
    save(options.out, {"answers": len(real[_DRAFTINGS[0].name]), "asked": asked, "tokens": tokens, "figures": figures})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("bundle", "draft", "shards"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="what SHARDS were distilled from")
    parser.add_argument("--limit", type=int, default=65)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/replay_check.json"))
    return parser.parse_args()


def _run(session: Session, text: str, tokens: int, drafting: Drafting) -> tuple[tuple[int, ...], int]:
    """Tokens and verifications of a real answer."""
    options = GenerateOptions(
        draft_nodes=drafting.nodes,
        shape="chain" if drafting.chain else "tree",
        proposals=("draft",),
        max_tokens=tokens,
        temperature=0.0,
    )
    result = session.generate(text, options)
    return result.token_ids, result.verifications


def _compare(tokens: int, real: list[int], replayed: list[int]) -> dict[str, Any]:
    """Tau of both over all answers, and how far single answers lie apart."""
    apart = np.abs(np.array(replayed) / np.maximum(real, 1) - 1.0)
    return {
        "tau real": tokens / sum(real),
        "tau replayed": tokens / sum(replayed),
        "answers with equal verifications": int(np.sum(np.array(real) == np.array(replayed))),
        "median difference of an answer": float(np.median(apart)),
        "largest": float(apart.max()),
    }


if __name__ == "__main__":
    main()
