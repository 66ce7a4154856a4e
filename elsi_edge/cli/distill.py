"""`elsi-edge distill`: the target answers prompts; its states and next-token distributions go into shards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elsi_edge.cli.draft_support import flags, quoted, reporter, require_torch

if TYPE_CHECKING:
    from elsi_edge.artifacts import LayerSelection, ModelShape, TargetRunner
    from elsi_edge.draft.shards import ShardManifest
    from elsi_edge.text import TextCodec
    from elsi_edge.workdir import WorkDir


def distill(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, .jsonl or .txt (default: the 256 built-in calibration prompts).")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Answers made before, .jsonl or .jsonl.gz, joined to the prompts by id.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Prompts (or answers) to take (default: all).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    temperature: Annotated[str, typer.Option(help="Temperatures, taken by turns over the prompts.")] = "0,0.8",
    taps: Annotated[str, typer.Option(help="Taps to record: 'auto' (the selection) or a list like 2,15,27.")] = "auto",
    bundle: Annotated[
        Path | None, typer.Option(help="Plain bundle of the target (default: the work directory's, int4).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Shard directory (default: the work directory's).")] = None,
    work: Annotated[Path | None, typer.Option(help="Work directory (default: $ELSI_EDGE_WORK or elsi-work).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled answers.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 lets ONNX Runtime choose.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Let the target answer prompts and record what a draft learns from. Run it again to continue or to add prompts."""
    from elsi_edge.cli import common
    from elsi_edge.draft.answers import read_answers
    from elsi_edge.models import resolve
    from elsi_edge.prompts import builtin_calibration_prompts, read_prompts
    from elsi_edge.workdir import WorkDir

    require_torch("distillation")
    from elsi_edge.draft.distill import distill as run
    from elsi_edge.draft.settings import DistillSettings

    settings = DistillSettings(count=count, max_tokens=max_tokens, temperatures=_temperatures(temperature), seed=seed)
    rows = read_prompts(prompts) if prompts else builtin_calibration_prompts()
    given = read_answers(answers) if answers else None
    source = resolve(model)
    place = WorkDir.for_model(source.slug, work)
    selection = _selection(taps, source.shape, place, model)
    runner, codec = open_bundle(bundle or place.plain_bundle("int4"), threads, source.fingerprint, model)
    shards = out or place.shards
    total = len(given if given is not None else rows)
    with common.progress("distill", float(min(total, count or total)), "rows") as bar:
        manifest = run(
            runner, codec, rows, selection, settings, shards,
            model=model, answers=given, reporter=reporter(bar),
        )  # fmt: skip
    _report(manifest, shards, json=json)
    common.next_command(f"elsi-edge train {quoted(model)}{flags(shards=out, work=work)}")


def _temperatures(text: str) -> tuple[float, ...]:
    from elsi_edge.errors import UsageError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--temperature {text!r} is not a list of numbers such as 0,0.8") from error


def _selection(text: str, shape: "ModelShape", place: "WorkDir", model: str) -> "LayerSelection":
    """The taps to record: those given, or the work directory's selection. Raises SelectionError, UsageError."""
    import json

    from elsi_edge.artifacts import LayerSelection
    from elsi_edge.errors import ElsiError, SelectionError, UsageError

    if text != "auto":
        try:
            chosen = tuple(sorted({int(part) for part in text.split(",")}))
        except ValueError as error:
            raise UsageError(f"--taps {text!r} is neither 'auto' nor a list of numbers such as 2,15,27") from error
        return LayerSelection(taps=chosen, method="explicit", blocks=shape.blocks, width=shape.width, model=model)
    path = place.selection_path
    if not path.is_file():
        raise SelectionError(
            f"no selection at {path}: choose the taps with 'elsi-edge calibrate {quoted(model)}', or give --taps"
        )
    try:
        return LayerSelection.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (ValueError, OSError, AttributeError) as error:
        raise SelectionError(f"{path} cannot be read ({error}); calibrate again") from error
    except ElsiError as error:
        raise SelectionError(str(error)) from error


def open_bundle(path: Path, threads: int, fingerprint: str, model: str) -> "tuple[TargetRunner, TextCodec]":
    """A plain bundle of the model with this fingerprint, to answer and to give states. Raises BundleError."""
    from elsi_edge.errors import BundleError
    from elsi_edge.runtime.target_runner import open_target_runner
    from elsi_edge.text import TextCodec

    if not path.is_dir():
        raise BundleError(
            f"no plain bundle at {path}: make one with 'elsi-edge export {quoted(model)} --plain-only', "
            "or give --bundle"
        )
    runner = open_target_runner(path, threads)
    if runner.fingerprint != fingerprint:
        raise BundleError(
            f"{path} was exported from the model {runner.fingerprint[:12]}, {model} is {fingerprint[:12]}; "
            "export this model again with --plain-only, or give the bundle's own model"
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
        f"{manifest.selection.describe()}, {common.size_text(size)} in {shards}",
        soft_wrap=True,
    )
    for name, amount in manifest.counts.items():
        common.out.print(f"  {name}: {amount:,}", soft_wrap=True)
