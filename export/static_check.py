"""Does a static bundle compute what the source model computes? The checks of `elsi_edge.export.parity`, in its form."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elsi_edge.bundle import Bundle, BundleManifest
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.export import parity
from elsi_edge.export.parity import Floats
from elsi_edge.export.reference import Reference
from elsi_edge.models import SourceModel
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.static_draft import open_static_draft
from elsi_edge.runtime.static_target import StaticTarget, open_static_target
from elsi_edge.runtime.target import TargetStep
from elsi_edge.runtime.tree import ROOT, Tree
from elsi_edge.text import TextCodec

_STEPS = (1, 2, 5)  # rows a step that must give the same bits, beside all that the graph has
_FINE = {"taps_relative_error": 0.2}  # at 16-bit activations: SmolLM2's massive token alone is off by a tenth
# What passes at 8-bit activations: they part from a model by more than 8-bit weights do (SmolLM2: 0.15 nats), which the
# manifest records; the check then finds a wrong graph, not a coarse one.
_COARSE = {
    "divergence_nats": 2.0,
    "tree_divergence_nats": 4.0,
    "taps_relative_error": 1.0,
    "draft_entry_relative_error": 0.5,
    "draft_node_relative_error": 0.5,
}


def check(directory: Path, manifest: BundleManifest, source: SourceModel, draft: LoadedDraft | None) -> dict[str, Any]:
    """Compare the graphs of a static bundle being made with torch. Raises ParityError. Returns what was measured."""
    static = manifest.static
    assert static is not None
    codec, reference = TextCodec.open(directory), Reference(source.directory)
    allowed = limits(manifest)
    bundle, settings = Bundle(directory=directory, manifest=manifest), SessionSettings()
    target = open_static_target(bundle, settings)
    sums = parity.Sums()
    for text in parity.TEXTS:
        ids = codec.encode_raw(text)[: min(96, manifest.context - 1)]
        want, want_taps = reference.run(ids, manifest.selection)
        step = teacher_forced(target, ids)
        sums.add(step.logits, want, ids)
        if manifest.selection is not None:
            sums.taps.append(parity.relative_error(step.taps, want_taps))
    measured = sums.within(allowed)
    ids = codec.encode_raw(parity.TEXTS[0])[:40]
    worst = parity.tree_divergence(target, reference, manifest, ids, min(6, static.verify_rows - 1))
    measured["tree_divergence_nats"] = worst
    parity.require_close("a tree's distributions", worst, allowed["tree_divergence_nats"], "nats")
    if manifest.precision != "fp32":
        steps = sorted({1, *(step for step in _STEPS if step <= static.verify_rows), min(16, static.verify_rows)})
        parity.check_chain(target, ids, tuple(steps))
        measured["chain_bit_identical"] = True
    if draft is not None:
        measured |= _check_draft(bundle, reference, draft, ids, allowed)
    return measured


def limits(manifest: BundleManifest) -> dict[str, float]:
    """What passes, by name of what `check` measures."""
    allowed = parity.limits(manifest.precision, manifest.precision)
    bits = 32 if manifest.static is None else manifest.static.activation_bits
    return allowed | {8: _COARSE, 16: _FINE}.get(bits, {})


def teacher_forced(target: StaticTarget, ids: Sequence[int]) -> TargetStep:
    """Logits [T, V] and taps [T, M*E] of a whole sequence from an empty cache, through the verify graph."""
    target.keep(0)
    logits: list[Floats] = []
    taps: list[Floats] = []
    for start in range(0, len(ids), target.rows):
        block = ids[start : start + target.rows]
        step = target.verify(block[0], Tree.chain(block[1:]))
        logits.append(step.logits.copy())
        taps.append(step.taps.copy())
        target.commit(range(len(block)))
    return TargetStep(logits=np.concatenate(logits), taps=np.concatenate(taps))


def _check_draft(
    bundle: Bundle,
    reference: Reference,
    draft: LoadedDraft,
    ids: list[int],
    allowed: dict[str, float],
) -> dict[str, float]:
    """Entries on the target's states, then one node on the draft's own, against the torch network."""
    from elsi_edge.export.reference import DraftReference

    _, taps = reference.run(ids[:-1], draft.config.selection)
    graph = open_static_draft(bundle, draft.config, draft.draft_to_target_ids, SessionSettings())
    first = graph.extend(ids[1:], taps)
    token = int(draft.draft_to_target_ids[first.likeliest(0, 1)[0]])
    second = graph.expand([token], first.states, 1, [ROOT])
    wanted = DraftReference(draft, reference.embeddings).rollout(ids[1:], taps, token)
    errors: dict[str, float] = {}
    for name, got, want in (("entry", first, wanted[0]), ("node", second, wanted[1])):
        key = f"draft_{name}_relative_error"
        errors[key] = parity.relative_error(got.log_probs[0], want)
        parity.require_close(f"the draft's {name}", errors[key], allowed[key], "relative")
    return errors
