"""`elsi-edge build`: from a model to a bundle with a draft of its own, in one command that can be interrupted."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elsi_edge.artifacts import Precision
from elsi_edge.cli import options as opt
from elsi_edge.cli.draft_support import quoted

if TYPE_CHECKING:
    from elsi_edge.cli.build_stages import Build, Made
    from elsi_edge.workdir import WorkDir

_CALIBRATION_ROWS = 256


def build(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    hours: Annotated[float, typer.Option("--hours", min=0.0, help="Time for everything, over all sittings.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts that the target answers for training, .txt, .jsonl, ShareGPT or UltraChat; calibration takes "
            "256 of them. The more, the better (default: the 256 built-in calibration prompts)."
        ),
    ] = None,
    m: Annotated[int | None, typer.Option("--m", help="Taps to choose (default: the method's, or 1).")] = None,
    method: Annotated[
        Literal["elsi", "elsi-c", "eagle3", "low-entropy", "uniform"] | None,
        typer.Option(help="How calibrate chooses them (default: elsi, or the selection that is there)."),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the bundle, and of the target that answers.")] = "int4",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens that the draft can say.")] = 8192,
    steps: Annotated[int | None, typer.Option(min=1, help="Train so many steps instead of the time left.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what it would take, and stop.")] = False,
    work: opt.Work = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes the cores that may be used.")] = 0,
    json: opt.Json = False,
) -> None:
    """Export the target, choose its taps, let it answer, train a draft, and export both.

    What is there and fits is not made again. Interrupt it at any time: the same command goes on.
    """
    from elsi_edge.cli import common
    from elsi_edge.cli.extras import EXPORT, require_build
    from elsi_edge.errors import UsageError
    from elsi_edge.models import resolve
    from elsi_edge.prompts import builtin_calibration_prompts, read_prompts, spread_over_categories
    from elsi_edge.workdir import WorkDir

    if not hours > 0:
        raise UsageError(f"--hours is {hours:g}, it must be above 0")
    require_build("building a draft", EXPORT)
    from elsi_edge.calibration import CalibrationSettings
    from elsi_edge.cli.build_plan import require_room
    from elsi_edge.cli.build_stages import Build
    from elsi_edge.export.pipeline import check_request

    rows = read_prompts(prompts) if prompts is not None else builtin_calibration_prompts()
    source = resolve(model)
    for line in source.notes:
        common.note(f"note: {line}")
    check_request(source, None)
    settings = CalibrationSettings(method=method or "elsi", m=m)
    settings.taps_wanted(source.shape.blocks)
    run = Build(
        source=source, place=WorkDir.for_model(source.slug, work), hours=hours, rows=rows,
        calibration_rows=spread_over_categories(rows, _CALIBRATION_ROWS), calibration=settings,
        any_method=method is None, precision=precision, max_tokens=max_tokens, draft_vocab=vocab_size, steps=steps,
        threads=threads,
    )  # fmt: skip
    plan = run.plan()
    for line in plan.lines():
        common.note(line)
    require_room(plan, run.place.root)
    if estimate:
        if json:
            common.emit_json({"hours": hours, "disk": plan.disk, "memory": plan.memory, "stages": plan.stages})
        return
    try:
        result = _result(run, run.run(plan))
    except KeyboardInterrupt:
        common.note("what was made is kept; the same command goes on from here")
        raise
    _report(result, run.place, json=json)
    common.next_command(result["next"])


def _verdict(path: Path) -> list[str]:
    """The sentences that calibration ended with."""
    import json

    try:
        return [str(sentence) for sentence in json.loads(path.read_text(encoding="utf-8"))["verdict"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _result(run: "Build", made: "Made") -> dict[str, Any]:
    from elsi_edge.calibration.report import NUMBERS
    from elsi_edge.cli.bundle_report import components

    selection, shards = made.selection, made.shards
    evaluation, used = made.draft.training.get("evaluation", {}), made.draft.training.get("settings", {})
    path = run.place.bundle(run.precision)
    return {
        "path": str(path),
        "model": run.source.reference,
        "precision": run.precision,
        "taps": list(selection.taps),
        "describe": selection.describe(),
        "verdict": _verdict(run.place.calibration / NUMBERS),
        "rows": shards.rows,
        "tokens": shards.tokens,
        "answer_tokens": shards.answer_tokens,
        "agreement": list(evaluation.get("agreement", ())),
        "tau_chain4": evaluation.get("tau_chain4"),
        "tau": dict(evaluation.get("tau", {})),
        "steps": used.get("steps"),
        "train_minutes": used.get("minutes"),
        "components": components(made.bundle),
        "seconds": {name: round(value, 1) for name, value in run.seconds.items() if name != "answers done"},
        "next": f"elsi-edge bench {quoted(path)}",
    }


def _report(result: dict[str, Any], place: "WorkDir", *, json: bool) -> None:
    """The report on stdout, and in the work directory as text and JSON."""
    from elsi_edge.cli import common
    from elsi_edge.fsio import write_json, write_text

    agreement = ", ".join(f"{value:.3f}" for value in result["agreement"])
    taus = "; ".join(f"{name.replace('-', ' of ')} {value:.3f}" for name, value in result["tau"].items())
    lines = [
        f"{result['path']}: {result['model']} at {result['precision']}, with a draft that sees {result['describe']}",
        *result["verdict"],
        f"data: {result['rows']:,} conversations, {result['tokens']:,} tokens, {result['answer_tokens']:,} of answers",
        f"training: {result['steps']:,} steps in {result['train_minutes']:g} minutes",
        f"agrees with the target at steps 1 to {len(result['agreement'])}: {agreement}",
    ]
    if result["tau_chain4"] is not None:
        replayed = f"; by replay {taus}" if taus else ""
        lines.append(f"tokens per verification with a chain of 4: {result['tau_chain4']:.3f}{replayed}")
    lines += [f"  {name:<15}{common.size_text(size):>10}" for name, size in result["components"].items()]
    write_text(place.root / "build-report.txt", "\n".join([*lines, f"Next: {result['next']}"]) + "\n")
    write_json(place.root / "build-report.json", result)
    if json:
        common.emit_json(result)
        return
    for line in lines:
        common.out.print(line, soft_wrap=True)
