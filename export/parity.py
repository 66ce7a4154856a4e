"""Does the bundle compute what the source model computes? Measured before a bundle may appear.

The graphs are run by the runtime's own classes, so that what was checked is what will run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import Precision
from elsi_edge.bundle import BundleManifest
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.errors import ParityError
from elsi_edge.export.reference import Reference
from elsi_edge.models import SourceModel
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.draft import OrtDraft, log_softmax
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.target import OrtTarget, Target
from elsi_edge.runtime.tree import ROOT, Tree
from elsi_edge.text import TextCodec

Floats = NDArray[np.float32]

# What passes, by precision. fp32 differs in the order of sums alone. At 4 bits a 135M model's next-token distributions
# part by about half a nat, which says nothing against the graph; a wrong position, mask or tap costs several nats.
MAX_DIVERGENCE: dict[Precision, float] = {"fp32": 1e-3, "int8": 0.1, "int4": 1.5}  # nats, mean over a text's rows
MAX_STATE_ERROR: dict[Precision, float] = {"fp32": 2e-3, "int8": 0.1, "int4": 0.5}  # of taps and draft, relative
_LAST = 20  # rows that are compared at the end of a sequence which passes a window
_ROW_SLACK = 4.0  # a single row of a tree scatters more than the mean over texts


def limits(precision: Precision, draft_precision: Precision) -> dict[str, float]:
    """What passes, by name of what `check` measures, for weights of these precisions."""
    return {
        "divergence_nats": MAX_DIVERGENCE[precision],
        "tree_divergence_nats": _ROW_SLACK * MAX_DIVERGENCE[precision],
        "taps_relative_error": MAX_STATE_ERROR[precision],
        "draft_entry_relative_error": MAX_STATE_ERROR[draft_precision],
        "draft_node_relative_error": MAX_STATE_ERROR[draft_precision],
    }


# Several scripts, code, spaces and line breaks: one English line hides faults of scale, rotary base and cache.
TEXTS = (
    "A heron stood in the shallow water for most of the morning. When the tide turned, small silver fish came in over "
    "the sandbar, and the bird began to walk, one slow step at a time, watching the light move on the surface.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n"
    "\n\nprint(mean([1.5, 2.5, 4.0]))\n",
    "Der Zug nach Bremen fährt um 7:42 Uhr von Gleis 12 ab. Bitte vergessen Sie nicht, Ihre Fahrkarte zu entwerten.",
    "باران دیشب تا صبح بارید و کوچه‌ها پر از آب شد.",
    "今朝は駅前の公園で、古い友人と偶然会って、二人でコーヒーを飲んだ。",
    "x" + " " * 60 + "y" + "\n" * 20 + "z 1234567890 3.14159 \t\t🙂🚲",
)


@dataclass(kw_only=True)
class Sums:
    """Running sums over texts, of a graph beside the source model."""

    squared_error: float = 0.0
    squared: float = 0.0
    largest: float = 0.0
    agree: int = 0
    rows: int = 0
    loss: float = 0.0
    loss_source: float = 0.0
    divergence: float = 0.0  # of the graph's next-token distributions from the source's, nats
    predicted: int = 0
    taps: list[float] = field(default_factory=list)

    def add(self, got: Floats, want: Floats, ids: Sequence[int]) -> None:
        """Logits [T, V] of a text and the reference's."""
        self.squared_error += float(np.square(got - want, dtype=np.float64).sum())
        self.squared += float(np.square(want - want.mean(-1, keepdims=True), dtype=np.float64).sum())
        self.largest = max(self.largest, float(np.abs(got - want).max()))
        self.agree += int((got.argmax(-1) == want.argmax(-1)).sum())
        self.rows += len(ids)
        self.divergence += divergence(got, want)
        places = np.arange(len(ids) - 1), np.asarray(ids[1:])
        self.loss -= float(log_softmax(got[:-1])[places].sum())
        self.loss_source -= float(log_softmax(want[:-1])[places].sum())
        self.predicted += len(ids) - 1

    def within(self, allowed: Mapping[str, float]) -> dict[str, Any]:
        """What was measured, for the manifest. Raises ParityError for what is not allowed (see `limits`)."""
        mean = self.divergence / self.rows
        require_close("next-token distributions", mean, allowed["divergence_nats"], "nats")
        measured: dict[str, Any] = {
            "texts": len(TEXTS),
            "tokens": self.rows,
            "logits_relative_error": math.sqrt(self.squared_error / max(self.squared, 1e-30)),
            "logits_max_error": self.largest,
            "top1_agreement": self.agree / self.rows,
            "divergence_nats": mean,
            "perplexity": math.exp(self.loss / self.predicted),
            "perplexity_source": math.exp(self.loss_source / self.predicted),
        }
        if self.taps:
            measured["taps_relative_error"] = max(self.taps)
            require_close("taps", max(self.taps), allowed["taps_relative_error"], "relative")
        return measured


def check(
    directory: Path,
    manifest: BundleManifest,
    source: SourceModel,
    draft: LoadedDraft | None,
    draft_precision: Precision,
) -> dict[str, Any]:
    """Compare every graph of a bundle being made with torch. Raises ParityError naming the output and both numbers.

    Returns what was measured, for the manifest: relative error, agreement of the most likely token and perplexity
    beside the source's, of taps and draft too; whether the chain form gives the same bits for one row and several.
    """
    codec = TextCodec.open(directory)
    reference = Reference(source.directory)
    allowed = limits(manifest.precision, draft_precision)
    target = _open_target(directory, manifest, "target-tree")
    sums = Sums()
    for text in TEXTS:
        ids = codec.encode_raw(text)[: min(96, manifest.context - 1)]
        want, want_taps = reference.run(ids, manifest.selection)
        target.keep(0)
        step = target.run(Tree.chain(ids[1:]), ids[0], logit_rows=range(len(ids)))
        sums.add(step.logits, want, ids)
        if manifest.selection is not None:
            sums.taps.append(relative_error(step.taps, want_taps))
    measured = sums.within(allowed)
    ids = codec.encode_raw(TEXTS[0])[:40]
    worst = tree_divergence(target, reference, manifest, ids)
    measured["tree_divergence_nats"] = worst
    require_close("a tree's distributions", worst, allowed["tree_divergence_nats"], "nats")
    long = long_ids(codec, target.windows, manifest.context)
    if long:
        beyond = window_divergence(target, reference, long)
        measured["window_divergence_nats"] = beyond
        require_close("distributions beyond the window", beyond, allowed["tree_divergence_nats"], "nats")
    if "target-chain" in manifest.graphs:
        chain = _open_target(directory, manifest, "target-chain")
        check_chain(chain, ids)
        if long:
            check_chain(chain, long, past=len(long) - _LAST)
        measured["chain_bit_identical"] = True
    if "target-native" in manifest.graphs and native_ops.report().available:
        _check_native(directory, manifest, target, [ids, long] if long else [ids], allowed["tree_divergence_nats"])
        measured["native_bit_identical"] = True
    if draft is not None:
        measured |= _check_draft(directory, manifest, reference, draft, ids, allowed)
    return measured


def divergence(got: Floats, want: Floats) -> float:
    """Kullback-Leibler divergence of the rows of `got` [T, V] from those of `want`, summed, nats."""
    log_got, log_want = log_softmax(got), log_softmax(want)
    return float((np.exp(log_want) * (log_want - log_got)).sum(dtype=np.float64))


def relative_error(got: Floats, want: Floats) -> float:
    """Root mean square of the difference over that of the reference."""
    wide = got.astype(np.float64) - want
    return float(np.sqrt(np.square(wide).sum() / max(float(np.square(want, dtype=np.float64).sum()), 1e-30)))


def _open_target(directory: Path, manifest: BundleManifest, role: str) -> OrtTarget:
    session = open_session(directory / manifest.graphs[role], SessionSettings())
    return OrtTarget(session, shape=manifest.shape, tap_width=manifest.tap_width)


def tree_divergence(
    target: Target, reference: Reference, manifest: BundleManifest, ids: list[int], nodes: int = 6
) -> float:
    """A tree with two branches after a past against its paths run whole (positions, mask, cache): worst row, nats.

    Of the tree only the first `nodes` nodes, for targets that verify few rows.
    """
    past, root, rest = ids[:16], ids[16], ids[17:23]
    # Nodes 0-2 follow the text, 3 is another first token, 4 and 5 hang below 0 and 3.
    tree = Tree(tokens=tuple(rest[:nodes]), parents=(-1, 0, 1, -1, 0, 3)[:nodes])
    target.keep(0)
    target.prefill(past)
    logits = target.verify(root, tree).logits.copy()
    worst = 0.0
    for row in range(tree.size + 1):
        path = [tree.tokens[node] for node in np.flatnonzero(tree.ancestors()[row, 1:])]
        want, _ = reference.run([*past, root, *path], manifest.selection)
        worst = max(worst, divergence(logits[row : row + 1], want[-1:]))
    return worst


def long_ids(codec: TextCodec, windows: Sequence[int], context: int) -> list[int]:
    """A sequence that passes the end of each window: tokens of all texts, shuffled; empty without windows."""
    if not windows:
        return []
    ids = [token for text in TEXTS for token in codec.encode_raw(text)]
    draw, found = np.random.default_rng(0), list[int]()
    while len(found) < max(windows) + 2 * _LAST:
        found += draw.permutation(ids).tolist()
    return found[: min(max(windows) + 2 * _LAST, context - 1)]


def window_divergence(target: Target, reference: Reference, ids: list[int]) -> float:
    """The last rows of a long sequence after a past beside the source's, and a tree's there beside its paths: worst
    row, nats."""
    past, rest = ids[:-_LAST], ids[-_LAST:]
    target.keep(0)
    target.prefill(past)
    got = target.verify(rest[0], Tree.chain(rest[1:])).logits.copy()
    want, _ = reference.run(ids, None, last=_LAST)
    worst = max(divergence(got[row : row + 1], want[row : row + 1]) for row in range(_LAST))
    # Nodes 0 and 1 follow the text; 2 is another first token, under which the text goes on.
    tokens = [rest[1], rest[2], rest[5], *rest[3:]]
    tree = Tree(tokens=tuple(tokens), parents=(-1, 0, -1, *range(2, len(tokens) - 1)))
    logits = target.verify(rest[0], tree).logits.copy()
    branch = target.verify(rest[0], Tree.chain(tokens[2:])).logits
    worst = max(worst, *(divergence(logits[row : row + 1], got[row : row + 1]) for row in range(3)))
    return max(worst, *(divergence(logits[r + 2 : r + 3], branch[r : r + 1]) for r in range(1, len(branch))))


def check_chain(target: Target, ids: list[int], steps: tuple[int, ...] = (1, 2, 5, 16), past: int = 16) -> None:
    """One row a step and several must give the same bits, after `past` tokens: that is what exact mode stands on.

    Raises ParityError.
    """
    before, rest = ids[:past], ids[past : past + 16]
    results = []
    target.keep(0)
    target.prefill(before)
    for step in steps:
        target.keep(len(before))
        rows = []
        for start in range(0, len(rest), step):
            block = rest[start : start + step]
            rows.append(target.verify(block[0], Tree.chain(block[1:])).logits.copy())
            target.commit(range(len(block)))
        results.append(np.concatenate(rows))
    for step, result in zip(steps[1:], results[1:], strict=True):
        if not np.array_equal(result, results[0]):
            raise ParityError(
                f"exact mode: {step} rows a step and one differ by {np.abs(result - results[0]).max():.3g} in the "
                "logits on this machine, they must be equal; export on the device, or use --precision fp32"
            )


def _check_native(
    directory: Path, manifest: BundleManifest, stock: OrtTarget, texts: Sequence[list[int]], limit: float
) -> None:
    """The native graph against the stock one, and its rows against themselves in another company."""
    session = native_ops.open_native(directory / manifest.graphs["target-native"], SessionSettings())
    native = OrtTarget(session, shape=manifest.shape, tap_width=manifest.tap_width)
    for ids in texts:
        check_chain(native, ids, past=max(16, len(ids) - _LAST))
        start, logits = max(0, len(ids) - 2 * _LAST), []
        for target in (stock, native):
            target.keep(0)
            if start:
                target.prefill(ids[:start])
            step = target.run(Tree.chain(ids[start + 1 :]), ids[start], logit_rows=range(len(ids) - start))
            logits.append(step.logits.copy())
        apart = divergence(logits[1], logits[0]) / len(logits[0])
        require_close("the native graph's distributions", apart, limit, "nats")


def _check_draft(
    directory: Path,
    manifest: BundleManifest,
    reference: Reference,
    draft: LoadedDraft,
    ids: list[int],
    allowed: dict[str, float],
) -> dict[str, float]:
    """Entries on the target's states, then one node on the draft's own, against the torch network."""
    from elsi_edge.export.reference import DraftReference

    _, taps = reference.run(ids[:-1], manifest.selection)
    expected = DraftReference(draft, reference.embeddings)
    settings = SessionSettings()
    opened: list[tuple[Any, str | None]] = [
        (open_session(directory / manifest.graphs["draft"], settings), manifest.graphs["projection"])
    ]
    if native_ops.path_for(manifest.graphs, settings, role="draft-native"):
        opened.append((native_ops.open_native(directory / manifest.graphs["draft-native"], settings), None))
    errors: dict[str, float] = {}
    for blocks, projection in opened:
        graph = OrtDraft(
            blocks,
            None if projection is None else open_session(directory / projection, settings),
            config=draft.config,
            draft_to_target_ids=draft.draft_to_target_ids,
        )
        first = graph.extend(ids[1:], taps)
        token = int(draft.draft_to_target_ids[first.likeliest(0, 1)[0]])
        second = graph.expand([token], first.states, 1, [ROOT])
        wanted = expected.rollout(ids[1:], taps, token)
        for name, got, want in (("entry", first, wanted[0]), ("node", second, wanted[1])):
            key = f"draft_{name}_relative_error"
            error = relative_error(got.log_probs[0], want)
            require_close(f"the draft's {name}", error, allowed[key], "relative")
            errors[key] = max(error, errors.get(key, 0.0))
    return errors


def require_close(what: str, error: float, limit: float, unit: str) -> None:
    if not error <= limit:  # NaN fails too
        raise ParityError(
            f"{what} of the exported graph differ from the source model's by {error:.3g} ({unit}), {limit:g} is "
            "allowed; the bundle was not kept. Try a --precision of more bits; at fp32 this is a fault of the export, "
            "please report it"
        )
