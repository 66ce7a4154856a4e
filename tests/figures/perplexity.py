"""Perplexity of each precision beside the source model's, on held-out text.

    python -m tests.figures.perplexity BUNDLE... --prompts FILE --out FILE [--limit 60] [--window 256]

Rows are named as the bundles' directories are. The text is the prompts' own, raw, cut into one window each; the first
token of a window is not predicted. The windows' token ids go to OUT.ids.json, which perplexity_peers.py reads to
measure other runtimes on them.
"""

import json
from pathlib import Path

import numpy as np

from elsi_edge.bundle import Bundle
from elsi_edge.export.reference import Reference
from elsi_edge.models import resolve
from elsi_edge.runtime.bench.perplexity import joined, perplexity_of, scores_of
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree
from elsi_edge.text import TextCodec
from tests.figures.common import arguments, prompts, save

_SHORTEST = 64  # tokens of a text that is worth a window


def main() -> None:
    """Measure every bundle named, and the source model of the first."""
    options = arguments(__doc__ or "", limit=60, window=256)
    first = Bundle.load(options.bundles[0])
    codec = TextCodec.open(first.directory)
    texts = [codec.encode_raw(row.turns[0])[: options.window] for row in prompts(options, 10_000)]
    windows = [ids for ids in texts if len(ids) >= _SHORTEST][: options.limit]
    Path(f"{options.out}.ids.json").write_text(json.dumps(windows))
    reference = Reference(resolve(first.manifest.model).directory)
    source = [reference.run(ids, None)[0] for ids in windows]
    figures = {"source fp32 (torch)": {"perplexity": _perplexity(source, windows), "top1_agreement": 1.0}}
    for path in options.bundles:
        bundle = Bundle.load(path)
        session = open_session(bundle.graph("target-tree"), SessionSettings())
        target = OrtTarget(session, shape=bundle.manifest.shape, tap_width=bundle.manifest.tap_width)
        logits = []
        for ids in windows:
            target.keep(0)
            logits.append(target.run(Tree.chain(ids[1:]), ids[0], logit_rows=range(len(ids))).logits.copy())
        agree = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(logits, source, strict=True)])
        figures[path.name] = {
            "perplexity": _perplexity(logits, windows),
            "top1_agreement": float(agree.mean()),
        }
    save(options.out, {"windows": len(windows), "tokens": sum(map(len, windows)), "perplexity": figures})


def _perplexity(logits: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]], windows: list[list[int]]) -> float:
    return perplexity_of(joined([scores_of(rows[:-1], ids[1:]) for rows, ids in zip(logits, windows, strict=True)]))


if __name__ == "__main__":
    main()
