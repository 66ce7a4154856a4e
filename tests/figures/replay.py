"""tau at T = 0 by replay on recorded greedy answers, by category, with a paired bootstrap against another draft.

    python -m tests.figures.replay DRAFT SHARDS --nodes 30,60 --chains 2,4 [--against DRAFT] [--prompts FILE]
        [--rounded int4] --out FILE

SHARDS are distilled shards that hold the taps of every draft named; rows made at temperature 0 count. `--prompts` names
the categories (Spec-Bench's layout). The file is written as it goes; the same command goes on from it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elsi_edge.artifacts import FINAL_NORM, PRECISIONS
from elsi_edge.draft.checkpoint import LoadedDraft, load_draft
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.replay import Drafting, greedy, replay
from elsi_edge.draft.rounding import rounded
from elsi_edge.draft.shards import require_made_for
from elsi_edge.draft.source import read_source
from elsi_edge.errors import DataError
from elsi_edge.fsio import write_json
from elsi_edge.models import resolve
from elsi_edge.prompts import read_prompts

Counts = dict[str, list[int]]  # by drafting: tokens and verifications of one answer

_ROWS = 16  # answers between two writes
_RESAMPLES = 2_000


def main() -> None:
    """Replay, write, print."""
    options = _options()
    draftings = [Drafting(nodes=n, chain=True) for n in _numbers(options.chains)]
    draftings += [Drafting(nodes=n, chain=False) for n in _numbers(options.nodes)]
    if options.threads:
        torch.set_num_threads(options.threads)
    figures: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for path in (options.draft, *options.against):
        _replay_draft(path, draftings, options, figures)
    categories = {row.id: row.category for row in read_prompts(options.prompts)} if options.prompts else {}
    drafts = {path: figures[str(path)]["rows"] for path in map(str, (options.draft, *options.against))}
    for path, rows in drafts.items():
        figures[path]["tau"] = by_category(rows, categories)
        if path != str(options.draft):
            figures[path]["difference"] = differences(drafts[str(options.draft)], rows, categories)
    write_json(options.out, figures)
    shown = {path: {k: v for k, v in figures[path].items() if k != "rows"} for path in drafts}
    print(json.dumps(shown))  # noqa: T201 - a script's result


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("draft", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--nodes", default="30,60", help="budgets of trees")
    parser.add_argument("--chains", default="2,4", help="budgets of chains")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other drafts, compared with the first")
    parser.add_argument("--prompts", type=Path, help="JSONL prompts that name the categories")
    parser.add_argument("--model", help="the target (default: the one that the shards name)")
    parser.add_argument("--limit", type=int, help="tokens that decoding may emit, which limits depth")
    parser.add_argument("--rounded", choices=PRECISIONS, default="fp32", help="weights as a bundle of it holds them")
    parser.add_argument("--out", type=Path, default=Path("replay.json"))
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def _replay_draft(
    path: Path, draftings: Sequence[Drafting], options: argparse.Namespace, figures: dict[str, Any]
) -> None:
    """Add a draft's answers that are not in `figures` yet, writing them as they come."""
    draft = load_draft(path)
    selection = draft.config.selection
    taps = (FINAL_NORM,) if selection.state == "final-norm" else selection.taps
    data = ShardSet(options.shards, taps=taps, max_length=1 << 30)
    fingerprint, template = draft.config.target_fingerprint, draft.config.template_sha256
    require_made_for(options.shards, data.manifest, target_fingerprint=fingerprint, template_sha256=template)
    rows = greedy(data.rows)
    if not rows:
        raise DataError(f"{options.shards} holds no row made at temperature 0")
    made_from = {"draft": draft.config.training["tensors_sha256"], "limit": options.limit, "shards": _sha256(data)}
    if options.rounded != "fp32":
        made_from["rounded"] = options.rounded
    names = sorted(d.name for d in draftings)
    kept = figures.get(str(path), {})
    if any(kept.get(key) != made_from.get(key) for key in ("draft", "limit", "shards", "rounded")):
        kept = {**made_from, "rows": {}}
    figures[str(path)] = kept
    kept |= {"taps": list(selection.taps), "state": selection.state, "size": draft.config.training.get("size")}
    left = [row for row in rows if not set(names) <= set(kept["rows"].get(row.key, {}))]
    network, ids = network_of(draft, options.model or data.manifest.model, data), draft.draft_to_target_ids
    with rounded(network, options.rounded):
        found = replay(network, data, left, torch.from_numpy(ids), draftings, limit=options.limit)
        for count, (row, result) in enumerate(found, start=1):
            own = {name: [one.tokens, one.verifications] for name, one in result.items()}
            kept["rows"][row.key] = {**kept["rows"].get(row.key, {}), **own}
            if count % _ROWS == 0:
                write_json(options.out, figures)
    write_json(options.out, figures)


def network_of(draft: LoadedDraft, model: str, data: ShardSet) -> DraftNetwork:
    """The draft as a network."""
    network = DraftNetwork(draft.config, read_source(resolve(model).directory, data.manifest.shape).embeddings)
    network.load_state_dict({name: torch.from_numpy(value) for name, value in draft.tensors.items()})
    return network.eval()


def _sha256(data: ShardSet) -> str:
    return data.manifest.shards[0].sha256[:16] + f"+{len(data.manifest.shards)}"


def by_category(rows: Mapping[str, Counts], categories: Mapping[str, str]) -> dict[str, Any]:
    """tau by category and drafting, with the number of answers."""
    return {
        name: {"answers": len(keys), **{d: _tau(counts) for d, counts in _counts(rows, keys).items()}}
        for name, keys in _groups(rows, categories).items()
    }


def differences(
    first: Mapping[str, Counts], other: Mapping[str, Counts], categories: Mapping[str, str]
) -> dict[str, Any]:
    """First draft's tau less the other's, with the 95 % interval over resampled answers, by category and drafting."""
    shared = {key: first[key] for key in first if key in other}
    found: dict[str, Any] = {}
    for name, keys in _groups(shared, categories).items():
        mine, theirs = _counts(first, keys), _counts(other, keys)
        draws = np.random.default_rng(0).integers(0, len(keys), (_RESAMPLES, len(keys)))
        found[name] = {}
        for d in sorted(set(mine) & set(theirs)):
            spread = _tau(mine[d][draws].sum(1)[:, None]) - _tau(theirs[d][draws].sum(1)[:, None])
            low, high = np.quantile(spread, (0.025, 0.975))
            change = _tau(mine[d]) - _tau(theirs[d])
            found[name][d] = {"difference": float(change), "low": float(low), "high": float(high)}
    return found


def _groups(rows: Mapping[str, Counts], categories: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys of answers by category; all of them under "all"."""
    groups: dict[str, list[str]] = {"all": sorted(rows)}
    for key in sorted(rows):
        category = categories.get(key.rpartition("@")[0])
        if category:
            groups.setdefault(category, []).append(key)
    return groups


def _counts(rows: Mapping[str, Counts], keys: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Tokens and verifications [answers, 2] by drafting."""
    return {d: np.array([rows[key][d] for key in keys], np.int64) for d in rows[keys[0]]}


def _tau(counts: NDArray[np.int64]) -> Any:
    """Tokens over verifications: of [answers, 2] one number, of [draws, 1, 2] one each."""
    sums = counts.sum(-2)
    return float(sums[0] / max(1, sums[1])) if sums.ndim == 1 else sums[:, 0] / np.maximum(1, sums[:, 1])


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
