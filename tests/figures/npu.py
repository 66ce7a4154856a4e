"""What static bundles say on an execution provider: perplexity and agreement beside the source model, and equal tokens.

    python -m tests.figures.npu STATIC... --prompts FILE --out FILE [--dynamic BUNDLE] [--provider cpu]
        [--limit 20] [--window 128] [--answers 3] [--tokens 48] [--threads 0]

The text is the prompts' own, raw, cut into one window each; the first token of a window is not predicted. The source is
the model under torch in float32; its figures come from the same windows. With --dynamic, answers of each static bundle
(plain, chain, and at fp32 a tree) are held against the dynamic bundle's plain answers, token by token. Results of the
last run are kept for bundles that this one does not name, so that providers of several environments fill one file.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from elsi_edge.artifacts import PromptRow
from elsi_edge.bundle import Bundle
from elsi_edge.prompts import read_prompts, spread_over_categories
from elsi_edge.runtime.bench.perplexity import joined, perplexity_of, scores_of, target_scores
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import resolve_provider
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.static_target import open_static_target
from elsi_edge.text import TextCodec
from tests.figures.common import save

_SHORTEST = 48  # tokens of a text that is worth a window


def main() -> None:
    """Measure every bundle named; with torch installed, the source model beside them."""
    options = _arguments()
    rows = spread_over_categories(read_prompts(options.prompts), 10_000)
    first = Bundle.load(options.bundles[0])
    codec = TextCodec.open(first.directory)
    texts = [codec.encode_raw(row.turns[0])[: options.window] for row in rows]
    windows = [ids for ids in texts if len(ids) >= _SHORTEST][: options.limit]
    source = _source_argmax(first, windows, options.out)
    settings = SessionSettings(threads=options.threads, provider=options.provider)
    wanted = [] if options.dynamic is None else _dynamic_answers(options, rows[: options.answers])
    for path in options.bundles:
        bundle = Bundle.load(path)
        form = bundle.manifest.static
        assert form is not None, f"{path} is no static bundle"
        target = open_static_target(bundle, settings)
        scores = target_scores(target, windows, rows=target.rows)
        name = f"{bundle.manifest.precision}, activations {form.activation_bits}, {resolve_provider(options.provider)}"
        figures = {
            "perplexity": perplexity_of(scores),
            "top1_agreement": float((scores.likeliest == np.array(source["argmax"])).mean()),
            "rows": [form.prefill_rows, form.verify_rows, form.level_rows],
            "onnxruntime": onnxruntime.__version__,
        }
        del target  # a session opens its own
        if wanted:
            figures |= _answers(path, options, rows[: options.answers], wanted, settings)
        every = _before(options.out) | {"source fp32 (torch)": {"perplexity": source["perplexity"]}, name: figures}
        save(options.out, {"windows": len(windows), "tokens": sum(map(len, windows)), "figures": every})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", help="static bundles of one model")
    for name in ("--prompts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--dynamic", type=Path)
    parser.add_argument("--provider", default="cpu")
    for name, default in (("limit", 20), ("window", 128), ("answers", 3), ("tokens", 48), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _before(out: Path) -> dict[str, Any]:
    """Figures of runs before, by what they are of."""
    if not out.is_file():
        return {}
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))["figures"]
    return found


def _source_argmax(bundle: Bundle, windows: list[list[int]], out: Path) -> dict[str, Any]:
    """The source model's likeliest tokens and perplexity; kept beside `out` for environments without torch."""
    file = Path(f"{out}.ids.json")
    if file.is_file():
        kept: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if kept["windows"] == windows:
            return kept
    from elsi_edge.export.reference import Reference
    from elsi_edge.models import resolve

    reference = Reference(resolve(bundle.manifest.model).directory)
    scores = joined([scores_of(reference.run(ids, None)[0][:-1], ids[1:]) for ids in windows])
    made = {"windows": windows, "argmax": scores.likeliest.tolist(), "perplexity": perplexity_of(scores)}
    file.write_text(json.dumps(made))
    return made


def _dynamic_answers(options: argparse.Namespace, rows: Sequence[PromptRow]) -> list[list[int]]:
    """The dynamic bundle's plain answers on the CPU provider; kept beside `out` for other environments."""
    file, asked = Path(f"{options.out}.answers.ids.json"), [options.tokens, *(row.turns[0] for row in rows)]
    kept: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if kept.get("asked") != asked:
        session = Session.open(options.dynamic, SessionSettings(threads=options.threads))
        how = GenerateOptions(plain=True, max_tokens=options.tokens)
        kept = {"asked": asked, "ids": [list(session.generate(row.turns[0], how).token_ids) for row in rows]}
        file.write_text(json.dumps(kept))
    found: list[list[int]] = kept["ids"]
    return found


def _answers(
    path: Path,
    options: argparse.Namespace,
    rows: Sequence[PromptRow],
    wanted: Sequence[list[int]],
    settings: SessionSettings,
) -> dict[str, Any]:
    """Answers that equal the dynamic bundle's plain ones, and those that equal the bundle's own plain ones."""
    static = Session.open(path, settings)
    kinds: dict[str, dict[str, Any]] = {"plain": {"plain": True}, "chain": {"shape": "chain"}}
    if static.precision == "fp32":
        kinds["tree"] = {"shape": "tree"}
    found: dict[str, Any] = {"answers": len(rows), "answer_tokens": options.tokens}
    equal = {kind: [0, 0] for kind in kinds}  # to the dynamic bundle's, to its own
    taus: dict[str, list[float]] = {kind: [] for kind in kinds}
    for row, want in zip(rows, wanted, strict=True):
        own: tuple[int, ...] = ()
        for kind, extra in kinds.items():
            got = static.generate(row.turns[0], GenerateOptions(max_tokens=options.tokens, **extra))
            own = own or got.token_ids
            equal[kind][0] += list(got.token_ids) == want
            equal[kind][1] += got.token_ids == own
            taus[kind].append(got.tau or 1.0)
    for kind, (theirs, itself) in equal.items():
        found[kind] = {"as_dynamic": theirs, "as_own_plain": itself, "tau": float(np.median(taus[kind]))}
    return found


if __name__ == "__main__":
    main()
