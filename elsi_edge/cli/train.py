"""`elsi-edge train`: a draft from distilled shards."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.artifacts import HeadKind, Precision
from elsi_edge.cli.draft_support import flags, quoted, reporter
from elsi_edge.cli.extras import TORCH, require_build
from elsi_edge.draft.settings import Arithmetic, OptimiserKind, Schedule, VocabRule

if TYPE_CHECKING:
    from elsi_edge.artifacts import DraftConfig
    from elsi_edge.draft.settings import TrainSettings
    from elsi_edge.models import SourceModel
    from elsi_edge.processes import Processes
    from elsi_edge.workdir import WorkDir

_MINUTES = 60.0  # when neither --minutes nor --steps is given
_STRUCTURE = "Structure"
_LEARNING = "Learning"


def _structure(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_STRUCTURE, min=0)


def train(
    model: Annotated[str, typer.Argument(help="The target: directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    shards: Annotated[Path | None, typer.Option(help="Distilled shards (default: the work directory's).")] = None,
    out: Annotated[Path | None, typer.Option(help="Draft directory (default: the work directory's).")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Budget in minutes, over all sittings (default: 60).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Budget in optimiser steps.")] = None,
    patience: Annotated[
        int, typer.Option(min=0, help="Stop after so many evaluations without a better agreement; 0 never.")
    ] = 0,
    taps: Annotated[
        str,
        typer.Option(
            help="'auto': the selection that the shards were made for; or some of the recorded taps, like 27 or "
            "2,15,27; 'final-norm' for the state after the final norm.",
            rich_help_panel=_STRUCTURE,
        ),
    ] = "auto",
    depth: Annotated[int, typer.Option(min=1, max=2, help="Blocks.", rich_help_panel=_STRUCTURE)] = 1,
    width: Annotated[int, _structure("Width of the draft's states; 0 as the target.")] = 0,
    heads: Annotated[int, _structure("Query heads; 0 as the target.")] = 0,
    kv_heads: Annotated[int, _structure("Key and value heads; 0 as the target.")] = 0,
    head_width: Annotated[int, _structure("Width of a head; 0 as the target.")] = 0,
    mlp_width: Annotated[int, _structure("Inner width of the MLP; 0 as the target.")] = 0,
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size", "--draft-vocab", min=1, help="Tokens that the draft can say.", rich_help_panel=_STRUCTURE
        ),
    ] = 8192,
    vocab_by: Annotated[
        VocabRule,
        typer.Option(
            help="Which tokens: the most frequent in the answers, the most often likeliest, or those of most "
            "probability.",
            rich_help_panel=_STRUCTURE,
        ),
    ] = "tokens",
    head: Annotated[
        HeadKind, typer.Option(help="A head of its own, or the target's rows as they are.", rich_help_panel=_STRUCTURE)
    ] = "own",
    init: Annotated[
        Path | None, typer.Option(help="A draft directory to start from.", rich_help_panel=_LEARNING)
    ] = None,
    warm_start: Annotated[
        bool, typer.Option(help="Start from the target's last blocks, or at random.", rich_help_panel=_LEARNING)
    ] = True,
    unroll: Annotated[
        int, typer.Option(min=1, max=8, help="Steps trained on the draft's own states.", rich_help_panel=_LEARNING)
    ] = 3,
    unroll_start: Annotated[
        int,
        typer.Option(
            min=0, max=8, help="Steps in the first part of the budget; 0 as --unroll.", rich_help_panel=_LEARNING
        ),
    ] = 1,
    step_weights: Annotated[
        str,
        typer.Option(
            help="Weight of each step in the loss, like 1,0.8,0.6 (default: 0.8 to the power of the step).",
            rich_help_panel=_LEARNING,
        ),
    ] = "",
    qat: Annotated[
        Precision,
        typer.Option(
            help="Quantisation-aware training: the precision whose rounding the loss sees; fp32 for none.",
            rich_help_panel=_LEARNING,
        ),
    ] = "fp32",
    optimiser: Annotated[
        OptimiserKind, typer.Option(help="Muon is for the blocks' matrices.", rich_help_panel=_LEARNING)
    ] = "adamw",
    lr: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Highest learning rate; a trained draft (--init) wants less, like 0.0003.",
            rich_help_panel=_LEARNING,
        ),
    ] = 2e-3,
    schedule: Annotated[
        Schedule,
        typer.Option(help="Cosine, or constant with a fall in the last fifth (WSD).", rich_help_panel=_LEARNING),
    ] = "wsd",
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per optimiser step, over all processes.", rich_help_panel=_LEARNING)
    ] = 2048,
    accumulate: Annotated[
        int,
        typer.Option(min=1, help="Pieces that a step is computed in, to save memory.", rich_help_panel=_LEARNING),
    ] = 1,
    ema: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Moving average of the weights.", rich_help_panel=_LEARNING)
    ] = 0.999,
    max_length: Annotated[
        int, typer.Option(min=3, help="Tokens per conversation; longer ones are cut.", rich_help_panel=_LEARNING)
    ] = 2048,
    follow: Annotated[
        bool, typer.Option("--follow", help="At an epoch's end take in the shards that a running 'distill' has added.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data order and of what starts at random.")] = 0,
    arithmetic: Annotated[Arithmetic, typer.Option(help="What matrices are multiplied in.")] = "bf16",
    device: Annotated[str, typer.Option(help="'auto': a GPU where there is one; or cpu, cuda, cuda:1.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 lets torch choose.")] = 0,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations on held-out rows.")] = 100,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing the run in --out.")] = False,
    work: Annotated[Path | None, typer.Option(help="Work directory (default: $ELSI_EDGE_WORK or elsi-work).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Train a draft. Interrupt it at any time: it saves, and the same command continues.

    Under `accelerate launch --multi_gpu --num_processes N -m elsi_edge train ...` several processes share every batch.
    """
    from elsi_edge.cli import common
    from elsi_edge.draft.settings import TrainSettings
    from elsi_edge.models import resolve
    from elsi_edge.workdir import WorkDir

    require_build("training a draft", TORCH)
    from elsi_edge.processes import processes

    settings = TrainSettings(
        minutes=_MINUTES if minutes is None and steps is None else minutes,
        steps=steps, patience=patience, follow=follow, taps=_taps(taps), depth=depth, width=width, heads=heads,
        kv_heads=kv_heads, head_width=head_width, mlp_width=mlp_width, draft_vocab=vocab_size, vocab_by=vocab_by,
        head=head, warm_start=warm_start, unroll=unroll, unroll_start=unroll_start,
        step_weights=_weights(step_weights), qat=qat,
        optimiser=optimiser, lr=lr, schedule=schedule, batch_tokens=batch_tokens, accumulate=accumulate,
        ema=ema, max_length=max_length, seed=seed, arithmetic=arithmetic, device=device, threads=threads,
        evaluate_every=evaluate_every,
    )  # fmt: skip
    source = resolve(model)
    place = WorkDir.for_model(source.slug, work)
    target, data = out or place.draft, shards or place.shards
    _require_shards(data, f"elsi-edge distill {quoted(model)}{flags(out=shards)}{place.flag}")
    group = processes()
    try:
        config = train_draft(source, data, target, settings, group=group, fresh=fresh, init=init)
    except KeyboardInterrupt:
        if group.rank == 0 and any(target.glob("checkpoint-*")):
            common.note(f"saved in {target}: the same command goes on from there")
        raise
    finally:
        group.end()
    if group.rank == 0:
        _report(config, target, json=json)
        layers = _layers(config, place)
        force = " --force" if place.bundle("int4").exists() else ""
        common.next_command(f"elsi-edge export {quoted(model)}{flags(draft=out)}{layers}{place.flag}{force}")


def train_draft(
    source: "SourceModel",
    shards: Path,
    out: Path,
    settings: "TrainSettings",
    *,
    group: "Processes",
    fresh: bool = False,
    init: Path | None = None,
) -> "DraftConfig":
    """Train with a progress bar; continues what `out` holds. Raises as `elsi_edge.draft.train.train` does."""
    from elsi_edge.cli import common
    from elsi_edge.draft.train import train as run

    with common.progress("train", 1.0, "") if group.rank == 0 else nullcontext() as bar:
        return run(
            shards, source.directory, out, settings, reporter=reporter(bar) if bar else None,
            target_fingerprint=source.fingerprint, fresh=fresh, init=init, group=group,
        )  # fmt: skip


def _require_shards(directory: Path, command: str) -> None:
    """Raise DataError, with the command that makes them, where there are no shards."""
    from elsi_edge.draft.shards import MANIFEST
    from elsi_edge.errors import DataError

    if not (directory / MANIFEST).is_file():
        raise DataError(f"{directory} holds no shards ({MANIFEST} is missing); make them with: {command}")


def _layers(config: "DraftConfig", place: "WorkDir") -> str:
    """The option that makes `export` take the draft's own taps, where it would take a selection of others."""
    from elsi_edge.cli.inspect import read_selection
    from elsi_edge.errors import SelectionError

    try:
        chosen = read_selection(place.selection_path) if place.selection_path.is_file() else None
    except SelectionError:
        return ""
    if chosen is None or chosen.same_taps(config.selection) or config.selection.state == "final-norm":
        return ""
    return f" --layers {config.selection.taps_text}"


def _taps(text: str) -> tuple[int, ...]:
    from elsi_edge.artifacts import FINAL_NORM
    from elsi_edge.errors import UsageError

    if text == "auto":
        return ()
    if text == "final-norm":
        return (FINAL_NORM,)
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(
            f"--taps {text!r} is neither 'auto', 'final-norm' nor a list of numbers such as 2,15,27"
        ) from error


def _weights(text: str) -> tuple[float, ...]:
    from elsi_edge.errors import UsageError

    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise UsageError(f"--step-weights {text!r} is not a list of numbers such as 1,0.8,0.6") from error


def _report(config: "DraftConfig", path: Path, *, json: bool) -> None:
    from elsi_edge.cli import common
    from elsi_edge.draft.checkpoint import WEIGHTS

    evaluation, size = config.training["evaluation"], (path / WEIGHTS).stat().st_size
    if json:
        common.emit_json(
            {
                "path": str(path),
                "taps": config.selection.taps,
                "bytes": size,
                "size": config.training["size"],
                "vocab_coverage": config.vocab_coverage,
                **evaluation,
                "settings": config.training["settings"],
            }
        )
        return
    agreement = ", ".join(f"{value:.3f}" for value in evaluation["agreement"])
    slim = config.training["size"]
    taus = "; ".join(f"{name.replace('-', ' of ')} {value:.3f}" for name, value in evaluation["tau"].items())
    replayed = f"by replay of {evaluation['replayed']} greedy answers: {taus}\n" if taus else ""
    common.out.print(
        f"draft of {common.size_text(size)} in {path}, sees {config.selection.describe()}\n"
        f"{slim['parameters']:,} weights, {common.size_text(slim['int4_bytes'])} at int4, of which the projection is "
        f"{common.size_text(slim['int4_bytes_projection'])}\n"
        f"agrees with the target at steps 1 to {len(evaluation['agreement'])}: {agreement}; "
        f"tokens per verification with a chain of 4: {evaluation['tau_chain4']:.3f}\n{replayed}"
        f"its vocabulary covers {config.vocab_coverage:.1%} of the target's answers",
        soft_wrap=True,
    )
