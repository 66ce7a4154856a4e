"""`elsi-edge distill`: the target answers prompts; its states and next-token distributions go into shards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elsi_edge.cli.draft_support import flags, quoted, reporter
from elsi_edge.cli.extras import TORCH, require_build
from elsi_edge.cli.options import size_of

if TYPE_CHECKING:
    from elsi_edge.artifacts import BatchTargetRunner, LayerSelection, ModelShape, PromptRow
    from elsi_edge.cli.progress import Advance
    from elsi_edge.draft.answers import Answer
    from elsi_edge.draft.report import Reporter
    from elsi_edge.draft.settings import DistillSettings
    from elsi_edge.draft.shards import ShardManifest
    from elsi_edge.models import SourceModel
    from elsi_edge.text import TextCodec
    from elsi_edge.workdir import WorkDir


def distill(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: .txt, .jsonl, or conversations in the ShareGPT or UltraChat layout, .json or .jsonl "
            "(default: the 256 built-in calibration prompts)."
        ),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Answers made before, .jsonl or .jsonl.gz, joined to the prompts by id.")
    ] = None,
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="Record the conversations' own answers; nothing is generated.")
    ] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Prompts (or answers) to take (default: all).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    temperature: Annotated[str, typer.Option(help="Temperatures, taken by turns over the prompts.")] = "0,0.8",
    taps: Annotated[
        str,
        typer.Option(
            help="'auto' (the selection), or a list like 2,15,27; final-norm adds the state that EAGLE-2 sees."
        ),
    ] = "auto",
    batch: Annotated[
        int, typer.Option(min=1, help="Answers in the making at a time; 1 decodes as 'generate' does.")
    ] = 32,
    max_disk: Annotated[
        str | None, typer.Option(help="Stop before the shards take more, such as 500MB or 2GB (default: no limit).")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="onnx: the bundle that will be deployed; torch: the source model, for a GPU.")
    ] = "onnx",
    device: Annotated[str | None, typer.Option(help="Of the torch engine: cpu, cuda, cuda:1 (default: cpu).")] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Plain bundle of the target (default: the work directory's, int4).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Shard directory (default: the work directory's).")] = None,
    work: Annotated[Path | None, typer.Option(help="Work directory (default: $ELSI_EDGE_WORK or elsi-work).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled answers.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes every core.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Let the target answer prompts and record what a draft learns from. Run it again to continue or to add prompts."""
    from elsi_edge.cli import common
    from elsi_edge.draft.answers import read_answers
    from elsi_edge.models import resolve
    from elsi_edge.prompts import builtin_calibration_prompts, read_prompts
    from elsi_edge.workdir import WorkDir

    require_build("distillation", TORCH)
    _require_sense(engine, device, bundle, answers, prompts, keep_answers=keep_answers)
    from elsi_edge.draft.settings import DistillSettings

    tap_list, final_norm = _tap_list(taps)
    settings = DistillSettings(
        count=count, max_tokens=max_tokens, temperatures=_temperatures(temperature), seed=seed, batch=batch,
        keep_answers=keep_answers, final_norm=final_norm,
        max_bytes=None if max_disk is None else size_of("--max-disk", max_disk),
    )  # fmt: skip
    rows = read_prompts(prompts) if prompts else builtin_calibration_prompts()
    given = read_answers(answers) if answers else None
    source = resolve(model)
    place = WorkDir.for_model(source.slug, work)
    selection = selection_for(tap_list, source.shape, place, model, final_norm=final_norm)
    if engine == "torch":
        runner, codec = _open_torch(source, device or "cpu", threads)
    else:
        runner, codec = open_bundle(bundle, place, threads, source.fingerprint, model)
    shards = out or place.shards
    manifest = make_shards(runner, codec, rows, selection, settings, shards, model=model, answers=given)
    _report(manifest, shards, json=json)
    common.next_command(f"elsi-edge train {quoted(model)}{flags(shards=out, work=work)}")


def make_shards(
    runner: "BatchTargetRunner",
    codec: "TextCodec",
    rows: "Sequence[PromptRow]",
    selection: "LayerSelection",
    settings: "DistillSettings",
    shards: Path,
    *,
    model: str,
    answers: "Sequence[Answer] | None" = None,
    report: "Callable[[Advance], Reporter]" = reporter,
) -> "ShardManifest":
    """Distill with a progress bar; continues what `shards` holds. Raises as `elsi_edge.draft.distill.distill` does."""
    from elsi_edge.cli import common
    from elsi_edge.draft.distill import distill as run

    own = [row for row in rows if row.answer] if settings.keep_answers else rows
    total = len(own if answers is None else answers)
    with common.progress("distill", float(min(total, settings.count or total)), "rows") as bar:
        return run(runner, codec, rows, selection, settings, shards, model=model, answers=answers, reporter=report(bar))


def _require_sense(
    engine: str,
    device: str | None,
    bundle: Path | None,
    answers: Path | None,
    prompts: Path | None,
    *,
    keep_answers: bool,
) -> None:
    """Raise UsageError for options that contradict each other: none is passed over."""
    from elsi_edge.errors import UsageError

    if engine not in ("onnx", "torch"):
        raise UsageError(f"--engine {engine!r} is neither onnx nor torch")
    if engine == "onnx" and device is not None:
        raise UsageError(f"--device {device} belongs to --engine torch; the onnx engine runs the bundle on the CPU")
    if engine == "torch" and bundle is not None:
        raise UsageError(f"--bundle {bundle} belongs to --engine onnx; the torch engine runs the source model itself")
    if keep_answers and answers is not None:
        raise UsageError("--keep-answers takes the answers of --prompts, --answers those of another file; give one")
    if keep_answers and prompts is None:
        raise UsageError("--keep-answers needs conversations with answers; give them with --prompts")


def _temperatures(text: str) -> tuple[float, ...]:
    from elsi_edge.errors import UsageError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--temperature {text!r} is not a list of numbers such as 0,0.8") from error


def _tap_list(text: str) -> tuple[tuple[int, ...] | None, bool]:
    """Taps in ascending order, None for the selection's; and whether the state after the final norm is wanted."""
    from elsi_edge.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    final_norm = "final-norm" in parts
    numbers = [part for part in parts if part != "final-norm"]
    if numbers == ["auto"]:
        return None, final_norm
    try:
        return tuple(sorted({int(part) for part in numbers})), final_norm
    except ValueError as error:
        raise UsageError(
            f"--taps {text!r} is neither 'auto' nor a list of numbers such as 2,15,27, with or without final-norm"
        ) from error


def selection_for(
    taps: tuple[int, ...] | None, shape: "ModelShape", place: "WorkDir", model: str, *, final_norm: bool
) -> "LayerSelection":
    """The taps to record: those given, or the work directory's selection. Raises SelectionError, UsageError."""
    import json

    from elsi_edge.artifacts import LayerSelection
    from elsi_edge.errors import ElsiError, SelectionError

    if taps is not None:
        if not taps and final_norm:
            return LayerSelection(
                taps=(shape.blocks,), state="final-norm", method="explicit", blocks=shape.blocks, width=shape.width,
                model=model,
            )  # fmt: skip
        return LayerSelection(taps=taps, method="explicit", blocks=shape.blocks, width=shape.width, model=model)
    path = place.selection_path
    if not path.is_file():
        raise SelectionError(
            f"no selection at {path}: give --taps, or choose them with: elsi-edge calibrate {quoted(model)}{place.flag}"
        )
    try:
        return LayerSelection.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (ValueError, OSError, AttributeError) as error:
        raise SelectionError(f"{path} cannot be read ({error}); calibrate again") from error
    except ElsiError as error:
        raise SelectionError(str(error)) from error


def _open_torch(source: "SourceModel", device: str, threads: int) -> "tuple[BatchTargetRunner, TextCodec]":
    """The source model under torch. Raises ModelError, UsageError for a device that is not there."""
    from elsi_edge.cli.torch_runner import open_torch_runner
    from elsi_edge.text import TextCodec

    codec = TextCodec.from_model_dir(source.directory)
    return open_torch_runner(source, codec.eos_ids, device=device, threads=threads), codec


def open_bundle(
    given: Path | None, place: "WorkDir", threads: int, fingerprint: str, model: str
) -> "tuple[BatchTargetRunner, TextCodec]":
    """A plain bundle of the model with this fingerprint, to answer and to give states: the work directory's at int4
    where none is given. Raises BundleError."""
    from elsi_edge.bundle import MANIFEST
    from elsi_edge.cli.calibration_answers import plain_bundle
    from elsi_edge.errors import BundleError
    from elsi_edge.runtime.target_runner import open_target_runner
    from elsi_edge.text import TextCodec

    path = given or place.plain_bundle("int4")
    export = f"elsi-edge export {quoted(model)} --plain-only{place.flag}"
    if not (path / MANIFEST).is_file():
        other = plain_bundle(place)
        have = "" if other in (None, path) else f", or give the one that is there with --bundle {quoted(str(other))}"
        raise BundleError(
            f"no plain bundle at {path}, and the draft learns from the target as it will be deployed: make one with: "
            f"{export}{have}"
        )
    runner = open_target_runner(path, threads)
    if runner.fingerprint != fingerprint:
        raise BundleError(
            f"{path} was exported from the model {runner.fingerprint[:12]}, {model} is {fingerprint[:12]}; "
            f"give the bundle's own model, or export this one again: {export} --force"
        )
    return runner, TextCodec.open(path)


def _report(manifest: "ShardManifest", shards: Path, *, json: bool) -> None:
    from elsi_edge.cli import common

    size = sum(shard.bytes for shard in manifest.shards)
    if json:
        common.emit_json(
            {
                "path": str(shards),
                "taps": manifest.selection.taps,
                "states": manifest.state_names,
                "rows": manifest.rows,
                "tokens": manifest.tokens,
                "answer_tokens": manifest.answer_tokens,
                "bytes": size,
                "counts": manifest.counts,
            }
        )
        return
    common.out.print(
        f"{manifest.rows} conversations, {manifest.tokens:,} tokens ({manifest.answer_tokens:,} of answers), "
        f"{manifest.describe_states()}, {common.size_text(size)} in {shards}",
        soft_wrap=True,
    )
    for name, amount in manifest.counts.items():
        common.out.print(f"  {name}: {amount:,}", soft_wrap=True)
