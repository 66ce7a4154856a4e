"""`elsi-edge calibrate`: hidden states over prompts to a selection of taps, and the curve in the terminal."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from elsi_edge.artifacts import LayerSelection

DEFAULT_KEEP = 0.30


def calibrate(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, .jsonl or .txt (default: the 256 built-in calibration prompts).")
    ] = None,
    m: Annotated[
        int | None, typer.Option("--m", help="Taps to choose, 1 to the number of blocks (default: the method's, or 1).")
    ] = None,
    method: Annotated[
        Literal["elsi", "elsi-c", "eagle3", "eagle2", "low-entropy"] | None,
        typer.Option(
            help="elsi: greatest joint entropy. elsi-c: the same, members unlike each other. eagle3: taps 2, n/2, n-3. "
            "eagle2: the state after the final norm. low-entropy: a control. Default: elsi."
        ),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(help="Taps of your own instead of a method, a list like 2,15,27; measured all the same."),
    ] = None,
    keep: Annotated[
        float, typer.Option(help="Share of each prompt's positions that count, the least sure first; 0 < keep <= 1.")
    ] = DEFAULT_KEEP,
    out: Annotated[Path | None, typer.Option(help="Selection file (default: the work directory's).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve into this .png or .svg file.")] = None,
    work: Annotated[Path | None, typer.Option(help="Work directory (default: $ELSI_EDGE_WORK or elsi-work).")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes the cores that may be used.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure what each layer knows where the target is unsure, and choose the layers that a draft will see."""
    from elsi_edge import fsio
    from elsi_edge.calibration import CalibrationSettings
    from elsi_edge.calibration import calibrate as run
    from elsi_edge.calibration.chart import check_picture, save_wave
    from elsi_edge.cli import common
    from elsi_edge.errors import UsageError
    from elsi_edge.machine import cores
    from elsi_edge.models import resolve
    from elsi_edge.prompts import builtin_calibration_prompts, read_prompts
    from elsi_edge.workdir import WorkDir

    if taps is not None and method is not None:
        raise UsageError(f"--taps {taps} and --method {method} exclude each other; give one")
    settings = CalibrationSettings(
        method="explicit" if taps is not None else method or "elsi",
        m=m,
        taps=() if taps is None else _taps(taps),
        keep=keep,
    )
    if plot is not None:
        check_picture(plot)
    rows = read_prompts(prompts) if prompts is not None else builtin_calibration_prompts()
    source = resolve(model)
    file = out if out is not None else WorkDir.for_model(source.slug, work).selection_path
    for place in (file, plot):
        if place is not None:
            fsio.require_writable(place)
    for note in source.notes:
        common.note(f"note: {note}")
    selection = run(source, rows, settings, common.progress, threads=threads or cores().usable)
    for warning in selection.settings["warnings"]:
        common.note(f"warning: {warning}")
    fsio.write_json(file, selection.to_json())
    if plot is not None:
        save_wave(selection, plot)
    _report(selection, file, json=json)
    common.next_command(_next(selection, model) + (f" --work {shlex.quote(str(work))}" if work else ""))


def _taps(text: str) -> tuple[int, ...]:
    from elsi_edge.errors import UsageError

    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(f"--taps {text!r} is no list of numbers; write it like 2,15,27") from error


def _next(selection: "LayerSelection", model: str) -> str:
    """Export when a packaged draft fits the choice, else the first step to one."""
    from elsi_edge.packaged import packaged_config

    config = packaged_config()
    fits = config is not None and config.target_fingerprint == selection.target_fingerprint
    if config is not None and fits and config.selection.same_taps(selection):
        return f"elsi-edge export {shlex.quote(model)} --layers auto --m {selection.m}"
    return f"elsi-edge export {shlex.quote(model)} --plain-only"


def _report(selection: "LayerSelection", file: Path, *, json: bool) -> None:
    from elsi_edge.calibration.chart import wave
    from elsi_edge.cli import common

    if json:
        common.emit_json({**selection.to_json(), "file": str(file)})
        return
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    common.out.print(wave(selection, width=min(common.out.width, 80), ascii_only=not encoding.startswith("utf")))
    common.out.print(
        f"{selection.prompts} prompts, {selection.tokens} positions kept "
        f"({selection.keep:.0%} of each, the least sure first); tap 0 is not eligible",
        soft_wrap=True,
    )
    common.out.print(_verdict(selection), soft_wrap=True)
    common.out.print(f"Selection: {file}", soft_wrap=True)


def _verdict(selection: "LayerSelection") -> str:
    entropy = "" if selection.joint_entropy is None else f" ({selection.joint_entropy:.3f} nats)"
    line = f"{selection.method}, m = {selection.m}: {selection.describe()}{entropy}"
    if selection.method != "elsi" or selection.m != 1:
        return line
    others = [(value, tap) for tap, value in enumerate(selection.entropy) if tap not in (0, *selection.taps)]
    if not others:
        return line
    value, tap = max(others)
    return f"{line}; next is tap {tap} at {value:.3f}"
