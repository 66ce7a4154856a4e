"""What `export` says: the bundle, how it was checked, and the commands that come next or out of a disagreement."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsi_edge.artifacts import LayerSelection, Precision
    from elsi_edge.bundle import BundleManifest
    from elsi_edge.workdir import WorkDir

_CHECKS = (  # key of the manifest's parity, what it is, its unit
    ("divergence_nats", "next-token distributions", "nats apart"),
    ("tree_divergence_nats", "the same in a tree, worst row", "nats apart"),
    ("taps_relative_error", "states at the taps", "relative error"),
    ("draft_entry_relative_error", "draft, on the target's states", "relative error"),
    ("draft_node_relative_error", "draft, on its own states", "relative error"),
)


def show(manifest: "BundleManifest", out: Path, draft_precision: "Precision", *, json: bool) -> None:
    """A new bundle on stdout: its parts with their sizes, and the verdict of every check."""
    from elsi_edge.cli import common
    from elsi_edge.cli.bundle_report import components, size_lines

    if json:
        sizes = components(manifest)
        common.emit_json(
            {
                "path": str(out),
                "model": manifest.model,
                "precision": manifest.precision,
                "context": manifest.context,
                "plain_only": manifest.plain_only,
                "taps": None if manifest.selection is None else manifest.selection.taps,
                "bytes": sum(sizes.values()),
                "components": sizes,
                "parity": manifest.parity,
            }
        )
        return
    kind = "without a draft" if manifest.selection is None else f"with a draft on {manifest.selection.describe()}"
    lines = [f"{out}: {manifest.model}, {manifest.precision}, {kind}, context {manifest.context} tokens"]
    lines += [*size_lines(manifest), *parity_lines(manifest, draft_precision)]
    for line in lines:
        common.out.print(line, soft_wrap=True)


def parity_lines(manifest: "BundleManifest", draft_precision: "Precision") -> list[str]:
    """What the comparison with the source model measured, each figure with the limit that it kept."""
    from elsi_edge.export import static_check
    from elsi_edge.export.parity import limits

    found, allowed = manifest.parity, limits(manifest.precision, draft_precision)
    if manifest.static is not None:
        allowed = static_check.limits(manifest)
    if not found:
        return []
    rows: list[tuple[str, str, str]] = []
    for key, what, unit in _CHECKS:
        if key in found:
            precision = draft_precision if key.startswith("draft") else manifest.precision
            rows.append((what, f"{found[key]:.3g} {unit}", f"pass: up to {allowed[key]:g} is normal for {precision}"))
    if found.get("chain_bit_identical"):
        rows.append(("one row a step and several", "the same bits", "pass: exact mode stands on it"))
    if "top1_agreement" in found:
        rows.append(
            ("likeliest token as the source's", f"{found['top1_agreement']:.1%}", _no_limit(manifest.precision))
        )
    if "perplexity" in found:
        both = f"{found['perplexity']:.1f}, the source's {found['perplexity_source']:.1f}"
        rows.append(("perplexity", both, _no_limit(manifest.precision)))
    size = f" ({found['texts']} texts, {found['tokens']} tokens)" if "texts" in found else ""
    if draft_precision != manifest.precision and any(key.startswith("draft") for key in found):
        size += f"; weights: target {manifest.precision}, draft {draft_precision}"
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)] if rows else [0, 0]
    lines = [f"  {what:<{widths[0]}}  {figure:<{widths[1]}}  {verdict}" for what, figure, verdict in rows]
    return [f"checked against the source model:{size}", *lines]


def _no_limit(precision: "Precision") -> str:
    return "no limit" if precision == "fp32" else f"no limit: what {precision} weights cost this model"


def say_next(manifest: "BundleManifest", model: str, out: Path, place: "WorkDir", *, given: str = "") -> None:
    """The command that comes next, on stderr; `given` are options of the target's weights, which it names again."""
    from elsi_edge.cli import common
    from elsi_edge.cli.draft_support import flags

    if not manifest.plain_only:
        common.next_command(f"elsi-edge bench {shlex.quote(str(out))}")
        return
    name = shlex.quote(model)
    common.note(f"It runs with: elsi-edge generate {shlex.quote(str(out))} 'Hello'")
    steps = [] if place.selection_path.is_file() else [f"elsi-edge calibrate {name}{place.flag}"]
    steps += [f"elsi-edge distill {name}{place.bundle_flag(out)}{place.flag}", f"elsi-edge train {name}{place.flag}"]
    bundle, number = place.bundle(manifest.precision), 1
    while bundle.exists():  # nobody asked for another bundle to be replaced
        number += 1
        bundle = place.bundle(manifest.precision).with_name(f"bundle-{manifest.precision}-{number}")
    own = flags(out=bundle if number > 1 else None)
    steps += [f"elsi-edge export {name} --precision {manifest.precision}{given}{own}{place.flag}"]
    common.next_command(" && ".join(steps))


def training_commands(model: str, selection: "LayerSelection", place: "WorkDir", *, named: bool) -> str:
    """Commands that make a draft for a selection, in places of their own where the usual ones hold another's.

    `named` says that the selection was given by hand, so that the commands must give it again.
    """
    from elsi_edge.cli.calibration_answers import plain_bundle
    from elsi_edge.cli.draft_support import flags
    from elsi_edge.draft.shards import MANIFEST

    name, plain = shlex.quote(model), plain_bundle(place)
    taps = selection.taps_text
    own = taps.replace(",", "-")
    shards = draft = None
    if (place.shards / MANIFEST).is_file() and not _shards_are_of(selection, place):
        shards = place.root / f"shards-{own}"
    if any(place.draft.glob("*")):
        draft = place.root / f"draft-{own}"
    steps = [] if plain is not None else [f"elsi-edge export {name} --plain-only{place.flag}"]
    bundle = "" if plain is None else place.bundle_flag(plain)
    named_taps, named_layers = (f" --taps {taps}", f" --layers {taps}") if named else ("", "")
    steps.append(f"elsi-edge distill {name}{named_taps}{bundle}{flags(out=shards)}{place.flag}")
    steps.append(f"elsi-edge train {name}{flags(shards=shards, out=draft)}{place.flag}")
    steps.append(f"elsi-edge export {name}{flags(draft=draft)}{named_layers}{place.flag}")
    return " && ".join(steps)


def _shards_are_of(selection: "LayerSelection", place: "WorkDir") -> bool:
    from elsi_edge.draft.shards import ShardManifest
    from elsi_edge.errors import ElsiError

    try:
        return ShardManifest.load(place.shards).selection.same_taps(selection)
    except ElsiError:
        return False
