"""Perplexity of other runtimes, and of bundles as they run, on the windows of perplexity.py, beside the source model's.

    python -m tests.figures.perplexity_peers BUNDLE... --prompts FIGURES.ids.json --out FILE
        [--against NAME,NAME] [--threads 1]

Rows of bundles are named as their directories are, with native and with ONNX Runtime's own kernels. Agreement is with
the source's likeliest token, over the places where a token is predicted. Losses do not depend on the number of threads;
one is steady beside other work.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elsi_edge.bundle import read_manifest
from elsi_edge.cli.bench_extras import find_peer
from elsi_edge.export.reference import Reference
from elsi_edge.models import resolve
from elsi_edge.runtime.bench.peers import Peer, require_peers, score_report
from elsi_edge.runtime.bench.perplexity import Scores, joined, scores_of, target_scores
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.session import Session
from tests.figures.common import save

_ALL = "llama.cpp,onnxruntime-genai,openvino-genai"


def main() -> None:
    """Measure the source model, every bundle named, and every runtime."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="+", help="bundle directories of one model")
    parser.add_argument("--prompts", type=Path, required=True, help="windows of token ids, as perplexity.py wrote them")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--against", default=_ALL, help="other runtimes")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    windows: list[list[int]] = json.loads(options.prompts.read_text())
    names = options.against.split(",")
    require_peers(names)
    model = read_manifest(options.bundles[0]).model
    source = _source(model, windows)
    rows: dict[str, Any] = {"source fp32 (torch)": score_report(source, source)}
    for path in options.bundles:
        for native in (True, False):
            session = Session.open(path, SessionSettings(threads=options.threads, native=native))
            form = "native" if session.exact_trees else "stock"
            found = target_scores(session.engine(exact=True).target, windows)
            rows[f"{path.name}, {form} kernels"] = {"with": session.precision, **(score_report(found, source) or {})}
    for name in names:
        with Peer(name, find_peer(name, model), threads=options.threads, context=session.context) as peer:
            scored = peer.score(windows)
            rows[name] = {"with": f"{peer.version}, {peer.flags}", **(score_report(scored, source) or {})}
        print(name, rows[name], flush=True)  # noqa: T201 - this takes minutes
    predicted = sum(len(ids) - 1 for ids in windows)
    save(options.out, {"windows": len(windows), "predicted_tokens": predicted, "perplexity": rows})


def _source(model: str, windows: Sequence[Sequence[int]]) -> Scores:
    reference = Reference(resolve(model).directory)
    return joined([scores_of(reference.run(ids, None)[0][:-1], ids[1:]) for ids in windows])


if __name__ == "__main__":
    main()
