"""`elsi-edge train`: a draft from distilled shards."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elsi_edge.cli.draft_support import flags, quoted, reporter, require_torch

if TYPE_CHECKING:
    from elsi_edge.artifacts import DraftConfig

_MINUTES = 60.0  # when neither --minutes nor --steps is given


def train(
    model: Annotated[str, typer.Argument(help="The target: directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    shards: Annotated[Path | None, typer.Option(help="Distilled shards (default: the work directory's).")] = None,
    out: Annotated[Path | None, typer.Option(help="Draft directory (default: the work directory's).")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Budget in minutes, over all sittings (default: 60).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Budget in optimiser steps.")] = None,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that the draft can say.")] = 8192,
    unroll: Annotated[int, typer.Option(min=1, max=8, help="Steps trained on the draft's own states.")] = 3,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 1e-3,
    taps: Annotated[str, typer.Option(help="'auto': all that the shards hold; or some of them, like 27.")] = "auto",
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per optimiser step.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data order and of what starts at random.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 lets torch choose.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing the run in --out.")] = False,
    work: Annotated[Path | None, typer.Option(help="Work directory (default: $ELSI_EDGE_WORK or elsi-work).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Train a draft. Interrupt it at any time: it saves, and the same command continues."""
    from elsi_edge.cli import common
    from elsi_edge.draft.settings import TrainSettings
    from elsi_edge.models import resolve
    from elsi_edge.workdir import WorkDir

    require_torch("training a draft")
    from elsi_edge.draft.train import train as run

    settings = TrainSettings(
        minutes=_MINUTES if minutes is None and steps is None else minutes,
        steps=steps,
        draft_vocab=draft_vocab,
        unroll=unroll,
        lr=lr,
        taps=_taps(taps),
        batch_tokens=batch_tokens,
        seed=seed,
        threads=threads,
    )
    source = resolve(model)
    place = WorkDir.for_model(source.slug, work)
    target = out or place.draft
    with common.progress("train", 1.0, "of the budget") as bar:
        config = run(
            shards or place.shards, source.directory, target, settings,
            reporter=reporter(bar), target_fingerprint=source.fingerprint, fresh=fresh,
        )  # fmt: skip
    _report(config, target, json=json)
    common.next_command(f"elsi-edge export {quoted(model)}{flags(draft=out, work=work)}")


def _taps(text: str) -> tuple[int, ...]:
    from elsi_edge.errors import UsageError

    if text == "auto":
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(f"--taps {text!r} is neither 'auto' nor a list of numbers such as 2,15,27") from error


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
                "vocab_coverage": config.vocab_coverage,
                **evaluation,
                "settings": config.training["settings"],
            }
        )
        return
    agreement = ", ".join(f"{value:.3f}" for value in evaluation["agreement"])
    common.out.print(
        f"draft of {common.size_text(size)} in {path}, sees {config.selection.describe()}\n"
        f"agrees with the target at steps 1 to {len(evaluation['agreement'])}: {agreement}; "
        f"tokens per verification with a chain of 4: {evaluation['tau_chain4']:.3f}\n"
        f"its vocabulary covers {config.vocab_coverage:.1%} of the target's answers",
        soft_wrap=True,
    )
