"""`elsi-edge export`: a model, and a draft when there is one, to the bundle that a device runs."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elsi_edge.artifacts import Precision
from elsi_edge.cli import options as opt
from elsi_edge.cli.extras import EXPORT, require_build

if TYPE_CHECKING:
    from elsi_edge.artifacts import LayerSelection
    from elsi_edge.bundle import BundleManifest
    from elsi_edge.draft.checkpoint import LoadedDraft
    from elsi_edge.export.pipeline import ExportSettings
    from elsi_edge.export.static_export import StaticSettings
    from elsi_edge.models import SourceModel
    from elsi_edge.workdir import WorkDir


def export(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    layers: Annotated[
        str,
        typer.Option(
            help="Taps of the draft. auto: the work directory's selection, else the one that the draft was trained "
            "with, else calibrates. eagle3: taps 2, n/2, n-3. Or a list like 2,15,27."
        ),
    ] = "auto",
    m: Annotated[
        int | None,
        typer.Option("--m", help="Number of taps, to be sure of it (default: as many as are selected, or 1)."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft directory or hub id (default: the work directory's, else the packaged one when it fits)."
        ),
    ] = None,
    plain_only: Annotated[
        bool, typer.Option("--plain-only", help="The target alone: for distillation, and to run with n-grams.")
    ] = False,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of the weights; int8 and int4 in blocks of 32 (MatMulNBits). Default int4; with --for npu int8."
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "npu"],
        typer.Option("--for", help="npu: graphs of fixed size in standard operators, int8 (QDQ) or fp32; docs/npu.md."),
    ] = "cpu",
    verify_rows: Annotated[
        int | None, typer.Option("--verify-rows", help="npu: rows of a verification, root included (default 8).")
    ] = None,
    prefill_block: Annotated[
        int | None, typer.Option("--prefill-block", help="npu: tokens of a prompt that a call takes (default 64).")
    ] = None,
    activation_bits: Annotated[
        int | None, typer.Option("--activation-bits", help="npu, int8: of activations, 16 (default) or 8.")
    ] = None,
    draft_precision: Annotated[
        Precision | None,
        typer.Option(
            help="Of the draft's weights, which never change tokens (default: what it was trained for with --qat, else "
            "int4 with int4, else int8)."
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON file of bits by matrix and of the rounding; see docs/exporting.md."),
    ] = None,
    lm_head_bits: Annotated[
        int | None,
        typer.Option(
            "--lm-head-bits", help="Of the lm_head: 4, 8 or 32 (default: 8 with int4); beside 4 a tied table keeps 8."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Longest sequence, tokens (default: the model's own limit; with --for npu at most 1024)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Bundle directory (default: in the work directory).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle that is there.")] = False,
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Write a bundle, check its graphs against the model, and only then let it appear."""
    from elsi_edge.cli import common
    from elsi_edge.cli.export_npu import npu_bundle, npu_settings
    from elsi_edge.models import resolve
    from elsi_edge.workdir import WorkDir

    npu, precision = device == "npu", precision or ("int8" if device == "npu" else "int4")
    wanted_taps = _layers(layers)
    require_build("exporting a model", EXPORT)
    from elsi_edge.cli.export_report import say_next, show
    from elsi_edge.export.pipeline import ExportSettings, check_request
    from elsi_edge.export.recipe import make_recipe
    from elsi_edge.export.static_export import check_static_request

    _require_m(m, None)
    chosen_recipe = make_recipe(precision, recipe, lm_head_bits)
    static = npu_settings(
        npu=npu,
        precision=precision,
        context=context,
        force=force,
        own={"--verify-rows": verify_rows, "--prefill-block": prefill_block, "--activation-bits": activation_bits},
        others={"--draft-precision": draft_precision, "--recipe": recipe, "--lm-head-bits": lm_head_bits},
    )
    source = resolve(model)
    for line in source.notes:
        common.note(f"note: {line}")
    _require_m(m, source.shape.blocks)
    if static is None:
        check_request(source, context)
    else:
        check_static_request(source, static, with_draft=not plain_only)
    place = WorkDir.for_model(source.slug, work)
    loaded = None if plain_only else load_draft_for(source, draft, place)
    usual = place.plain_bundle(precision) if loaded is None else place.bundle(precision)
    target = out or (npu_bundle(place, precision, plain=loaded is None) if npu else usual)
    # What does not fit together is said before that a bundle is there, which would only be the next thing to go wrong.
    chosen = None if plain_only else _selection(wanted_taps, source, place, loaded)
    if chosen is not None:
        _require_agreement(*chosen, m, model, place, loaded)
    if loaded is not None:
        _require_same_target(source, loaded[1], place)
    _require_place(target, force=force)
    if not plain_only:
        selection, origin = chosen or (_calibrate(source, m, place), f"the selection {place.selection_path}")
        common.note(f"taps: {selection.describe()}, from {origin}")
        common.note(f"draft: {loaded[0]}" if loaded else "there is no draft yet, so this bundle is plain-only")
    settings = ExportSettings(
        precision=precision, draft_precision=draft_precision, context=context, replace=force, recipe=chosen_recipe
    )
    manifest = write_bundle(source, target, static or settings, None if loaded is None else loaded[1])
    show(manifest, target, manifest.draft_precision, json=json)
    given = "" if recipe is None else f" --recipe {shlex.quote(str(recipe))}"
    given += "" if lm_head_bits is None else f" --lm-head-bits {lm_head_bits}"
    say_next(manifest, model, target, place, given=given)


def write_bundle(
    source: "SourceModel", out: Path, settings: "ExportSettings | StaticSettings", draft: "LoadedDraft | None"
) -> "BundleManifest":
    """Export, saying what goes on. Raises as `elsi_edge.export.pipeline.export_bundle` does."""
    from elsi_edge.export.pipeline import ExportSettings, export_bundle
    from elsi_edge.export.static_export import export_static

    with spinner() as say:
        if isinstance(settings, ExportSettings):
            return export_bundle(source, out, settings, draft=draft, say=say)
        return export_static(source, out, settings, draft=draft, say=say)


@contextlib.contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Say what goes on: beside a spinner on a terminal, else a line on stderr each."""
    from elsi_edge.cli import common

    if not common.err.is_terminal:
        yield common.note
        return
    with common.err.status("reading the model") as status:
        yield lambda text: status.update(text)


def _layers(text: str) -> tuple[int, ...] | str:
    """ "auto", "eagle3", or taps in ascending order. Raises UsageError."""
    from elsi_edge.errors import UsageError

    if text in ("auto", "eagle3"):
        return text
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(f"--layers {text!r} is neither auto, eagle3, nor a list of taps such as 2,15,27") from error


def _require_m(m: int | None, blocks: int | None) -> None:
    from elsi_edge.errors import UsageError

    if m is not None and m < 1:
        raise UsageError(f"--m is {m}, it must be at least 1")
    if m is not None and blocks is not None and m > blocks:
        raise UsageError(
            f"--m is {m}, but the model has {blocks} blocks and as many taps to choose from; ask for fewer"
        )


def _require_place(out: Path, *, force: bool) -> None:
    """Refuse before any long work; with --force only a bundle or an empty directory is ever replaced."""
    from elsi_edge.bundle import MANIFEST
    from elsi_edge.errors import StorageError

    if not out.exists():
        return
    if not force:
        raise StorageError(f"{out} exists already; choose another --out or replace it with --force")
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file()):
        raise StorageError(f"{out} exists and is no bundle; --force replaces bundles alone, choose another --out")


def load_draft_for(source: "SourceModel", given: str | None, place: "WorkDir") -> "tuple[Path, LoadedDraft] | None":
    """The draft to export, checked: --draft, else the work directory's, else the packaged one when it fits."""
    from elsi_edge import builtin
    from elsi_edge.cli import common
    from elsi_edge.cli.draft_layout import locate_own_draft
    from elsi_edge.draft.checkpoint import CONFIG, load_draft
    from elsi_edge.packaged import packaged_config, packaged_draft

    path = None if given is None else locate_own_draft(given, source.reference)
    if path is None and (place.draft / CONFIG).is_file():
        path = place.draft
    if path is None and (config := packaged_config()) is not None:
        if config.target_fingerprint == source.fingerprint:
            path = packaged_draft()
        elif source.reference == builtin.NAME:
            common.note(
                f"the packaged draft was trained for the weights {config.target_fingerprint[:12]}, these are "
                f"{source.fingerprint[:12]} ({source.origin}): not used; {builtin.SOURCE_VARIABLE}=wheel takes its own"
            )
    return None if path is None else (path, load_draft(path))


def _selection(
    wanted: tuple[int, ...] | str,
    source: "SourceModel",
    place: "WorkDir",
    loaded: "tuple[Path, LoadedDraft] | None",
) -> "tuple[LayerSelection, str] | None":
    """The taps to export and where they come from; None where they have to be measured first."""
    from elsi_edge.artifacts import LayerSelection
    from elsi_edge.calibration import selection as rules
    from elsi_edge.cli.inspect import read_selection
    from elsi_edge.errors import SelectionError

    shape = source.shape
    if wanted == "auto":
        if place.selection_path.is_file():
            found = read_selection(place.selection_path)
            if found.target_fingerprint not in ("", source.fingerprint):
                raise SelectionError(
                    f"{place.selection_path} was measured on the model {found.target_fingerprint[:12]}, "
                    f"{source.reference} is {source.fingerprint[:12]}; calibrate again "
                    f"(elsi-edge calibrate {shlex.quote(source.reference)}{place.flag}) or use another --work"
                )
            return found, f"the selection {place.selection_path}"
        if loaded is not None:
            return loaded[1].config.selection, f"the draft {loaded[0]}"
        return None
    taps = rules.eagle3_taps(shape.blocks) if isinstance(wanted, str) else rules.explicit(wanted, shape.blocks)
    method = "eagle3" if isinstance(wanted, str) else "explicit"
    chosen = LayerSelection(
        taps=taps,
        method=method,  # type: ignore[arg-type]
        entropy=loaded[1].config.selection.entropy if loaded is not None else (),
        blocks=shape.blocks,
        width=shape.width,
        target_fingerprint=source.fingerprint,
        model=source.reference,
    )
    return chosen, f"--layers {wanted if isinstance(wanted, str) else ','.join(map(str, wanted))}"


def _require_agreement(
    selection: "LayerSelection",
    origin: str,
    m: int | None,
    model: str,
    place: "WorkDir",
    loaded: "tuple[Path, LoadedDraft] | None",
) -> None:
    """Raise SelectionError when --m and the selection differ (UsageError where --layers gave it), DraftError when the
    selection and the draft do."""
    from elsi_edge.cli.export_report import training_commands
    from elsi_edge.errors import SelectionError, UsageError
    from elsi_edge.export.pipeline import same_selection_or_explain

    named = origin.startswith("--layers")
    if m is not None and selection.m != m:
        anew = f"elsi-edge calibrate {shlex.quote(model)} --m {m}{place.flag}"
        advice = "" if named else f", or choose and train anew, beginning with: {anew}"
        raise (UsageError if named else SelectionError)(
            f"--m is {m}, but {origin} has m = {selection.m} ({selection.describe()}); leave --m out{advice}"
        )
    if loaded is not None:
        same_selection_or_explain(
            selection,
            loaded[1],
            draft_path=loaded[0],
            asked=f"{origin} {'names' if named else 'chose'}",
            train=training_commands(model, selection, place, named=named),
        )


def _require_same_target(source: "SourceModel", draft: "LoadedDraft", place: "WorkDir") -> None:
    """Raise DraftError when the draft is another target's."""
    from elsi_edge.export.pipeline import require_same_target
    from elsi_edge.text import TextCodec

    name = shlex.quote(source.reference)
    train = f"elsi-edge distill {name}{place.flag} && elsi-edge train {name}{place.flag}"
    require_same_target(draft, source, TextCodec.from_model_dir(source.directory), train=train)


def _calibrate(source: "SourceModel", m: int | None, place: "WorkDir") -> "LayerSelection":
    """Choose the taps with the defaults of `calibrate`, and leave the selection where it would."""
    from elsi_edge.calibration import CalibrationSettings
    from elsi_edge.cli import common
    from elsi_edge.cli.calibrate import Run
    from elsi_edge.prompts import builtin_calibration_prompts

    common.note(f"no selection at {place.selection_path} and no draft: calibrating")
    run = Run(source=source, place=place)
    analysis = run.analyse(builtin_calibration_prompts(), CalibrationSettings(m=m))
    if analysis is None:
        raise SystemExit(0)
    run.write(analysis, out=None, report=None, plot=None)
    return analysis.selection
