"""From a source model, and a draft if there is one, to a bundle that was checked before it appeared."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elsi_edge.artifacts import BITS, BYTES_PER_WEIGHT, SLACK, LayerSelection, Precision, usual_draft_precision
from elsi_edge.bundle import NATIVE_FORMAT, BundleManifest, GraphRole, StaticForm, is_native, new_bundle
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.errors import DraftError, UsageError
from elsi_edge.export import builder, draft_graph, moments, parity, target
from elsi_edge.export.quantise import Moments
from elsi_edge.export.recipe import Recipe
from elsi_edge.fsio import require_free
from elsi_edge.models import SourceModel, read_config, read_source
from elsi_edge.text import TextCodec
from elsi_edge.weights import count_weights

_BUILT = 4.5  # bytes of a weight in the builder's float32 graph, which is there while the bundle is written


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """How a bundle is made."""

    precision: Precision = "int4"
    draft_precision: Precision | None = None  # None = the draft's own beside the target's
    context: int | None = None  # tokens; None = the model's own limit
    replace: bool = False  # an existing bundle at the same place
    recipe: Recipe | None = None  # bits by matrix and the rounding; None = `precision` throughout


def export_bundle(
    source: SourceModel,
    out: Path,
    settings: ExportSettings,
    *,
    draft: LoadedDraft | None,
    say: Callable[[str], None] = lambda _: None,
) -> BundleManifest:
    """Write a bundle at `out`: with `draft` the complete one, without it the plain-only one.

    Everything is made in a temporary directory beside `out`, checked there against the source model, and renamed.
    Raises UsageError for a context beyond the model's, DraftError for a draft of another target, ParityError when a
    graph does not compute what the source computes, StorageError; in each case nothing is left at `out`.
    """
    context = check_request(source, settings.context)
    own = usual_draft_precision(settings.precision, None if draft is None else draft.config)
    draft_precision = settings.draft_precision or own
    recipe = settings.recipe or Recipe(bits=BITS[settings.precision])
    codec = TextCodec.from_model_dir(source.directory)
    if draft is not None:
        require_same_target(draft, source, codec)
    require_free(out.absolute().parent, disk_needed(count_weights(source.directory), settings.precision), "export")
    with new_bundle(out, replace=settings.replace) as writer:
        work = writer.directory / "work"
        work.mkdir()
        say(f"building the {settings.precision} graph of {source.slug}")
        quantised = builder.build_base_graph(
            source.directory,
            source.shape,
            recipe,
            work,
            context=context,
            moments=_moments(recipe, source, codec, say),
            say=say,
        )
        (work / builder.WEIGHTS_FILE).rename(writer.directory / builder.WEIGHTS_FILE)
        (work / "base.onnx").rename(writer.directory / "base.onnx")
        selection = None if draft is None else draft.config.selection
        graphs: dict[GraphRole, str] = target.write_target_graphs(
            writer.directory / "base.onnx",
            writer.directory,
            shape=source.shape,
            precision=settings.precision,
            selection=selection,
        )
        if draft is not None:
            say("adding the draft")
            graphs |= draft_graph.write_draft(
                writer.directory,
                draft,
                base=writer.directory / "base.onnx",
                precision=draft_precision,
                positions=context + SLACK,
            )
        shutil.rmtree(work)
        (writer.directory / "base.onnx").unlink()
        codec.save(writer.directory)
        manifest = describe(
            source,
            codec,
            draft,
            precision=settings.precision,
            context=context,
            graphs=graphs,
            quantisation={
                "target": recipe.to_json(
                    quantised.by_bits,
                    roundings=quantised.by_rounding,
                    with_offsets=quantised.with_offsets,
                    table_bits=quantised.table_bits,
                ),
                "draft": None if draft is None else Recipe(bits=BITS[draft_precision]).to_json(),
            },
        )
        say("checking the graphs against the source model")
        measured: dict[str, Any] = parity.check(writer.directory, manifest, source, draft, draft_precision)
        return writer.finish(replace(manifest, parity=measured))


def describe(
    source: SourceModel,
    codec: TextCodec,
    draft: LoadedDraft | None,
    *,
    precision: Precision,
    context: int,
    graphs: Mapping[GraphRole, str],
    quantisation: Mapping[str, Any],
    static: StaticForm | None = None,
) -> BundleManifest:
    """The manifest of a bundle, without what a check measures."""
    return BundleManifest(
        model=source.reference,
        slug=source.slug,
        shape=source.shape,
        target_fingerprint=source.fingerprint,
        precision=precision,
        context=context,
        graphs={str(role): name for role, name in graphs.items()},
        native_format=NATIVE_FORMAT if any(map(is_native, graphs)) else 0,
        selection=None if draft is None else draft.config.selection,
        draft=None if draft is None else draft.config,
        quantisation=quantisation,
        static=static,
        tokenizer_sha256=codec.tokenizer_sha256,
        template_sha256=codec.template_sha256,
        licence=str(read_source(source.directory).get("licence", "unknown")),
    )


def disk_needed(weights: int, precision: Precision) -> int:
    """Bytes that an export of so many weights takes on its way."""
    return int(weights * (_BUILT + BYTES_PER_WEIGHT[precision]))


def _moments(
    recipe: Recipe, source: SourceModel, codec: TextCodec, say: Callable[[str], None]
) -> Callable[[Path], Moments] | None:
    """What measures the inputs of the matrices, where the recipe's rounding asks for it."""
    if not recipe.compensates:
        return None
    return lambda graph: moments.measure(graph, moments.texts(codec), source.shape, say)


def require_same_target(draft: LoadedDraft, source: SourceModel, codec: TextCodec, *, train: str = "") -> None:
    """Raise DraftError naming both values when a draft was trained for other weights, text or sizes.

    `train` is the command that makes a draft for this target.
    """
    advice = train or f"elsi-edge distill {source.reference} && elsi-edge train {source.reference}"
    config = draft.config
    pairs = [
        ("width", config.embedding_width, source.shape.width),
        ("vocabulary", config.target_vocab_size, source.shape.vocab_size),
        ("number of blocks", config.selection.blocks, source.shape.blocks),
        ("tokenizer", config.tokenizer_sha256[:12], codec.tokenizer_sha256[:12]),
        ("chat template", config.template_sha256[:12], codec.template_sha256[:12]),
        ("target weights", config.target_fingerprint[:12], source.fingerprint[:12]),
    ]
    for what, has, wants in pairs:
        if has != wants:
            raise DraftError(
                f"the draft was trained for another target: its {what} is {has}, {source.reference} has {wants}; "
                f"train one for it: {advice}"
            )


def check_request(source: SourceModel, context: int | None) -> int:
    """The context that a bundle would have, tokens; None asks for the model's own. To be called before any long work.

    Raises ModelError for a family or an attention that is not exported, UsageError for a context out of range.
    """
    builder.require_supported(source.shape)
    limit = source.shape.context
    asked = limit if context is None else context
    if context is not None and not 16 <= context <= limit:
        raise UsageError(f"--context is {context}, it must be at least 16 and at most the model's {limit}")
    builder.require_plain_attention(read_config(source.directory), source.shape, asked)
    return asked


def same_selection_or_explain(
    wanted: LayerSelection, draft: LoadedDraft, *, draft_path: Path, asked: str, train: str
) -> None:
    """Raise DraftError when a selection and a draft's own differ: both, how far apart they score, and the ways out.

    `asked` says who wants the selection, up to its verb ("--layers 20 names"); `train` makes a draft on it, a command.
    """
    trained = draft.config.selection
    if wanted.same_taps(trained):
        return
    own = f"use the draft's taps with --layers {trained.taps_text}, or "
    raise DraftError(
        f"{asked} {wanted.describe()}, the draft {draft_path} was trained on {trained.describe()}"
        f"{_score_gap(wanted, trained)}; {own if trained.state == 'residual' else ''}"
        f"train one on {wanted.describe()}: {train}"
    )


def _score_gap(wanted: LayerSelection, trained: LayerSelection) -> str:
    taps = (*wanted.taps, *trained.taps)
    if wanted.m != 1 or trained.m != 1 or len(wanted.entropy) <= max(taps):
        return ""
    first, second = (wanted.entropy[selection.taps[0]] for selection in (wanted, trained))
    return f" (entropy {first:.3f} against {second:.3f} nats)"
