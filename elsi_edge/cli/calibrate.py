"""`elsi-edge calibrate`: hidden states over prompts to a selection of taps, with a report to look at."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elsi_edge.cli import options as opt

if TYPE_CHECKING:
    from elsi_edge.artifacts import PromptRow
    from elsi_edge.calibration.analysis import Analysis
    from elsi_edge.calibration.settings import CalibrationSettings
    from elsi_edge.models import SourceModel
    from elsi_edge.processes import Processes
    from elsi_edge.workdir import WorkDir

DEFAULT_KEEP = 0.30
_STATISTICS = "Statistics"


def calibrate(
    model: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2-135m-instruct.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, .jsonl or .txt (default: the 256 built-in calibration prompts).")
    ] = None,
    m: Annotated[
        int | None, typer.Option("--m", help="Taps to choose, 1 to the number of blocks (default: the method's, or 1).")
    ] = None,
    method: Annotated[
        Literal["elsi", "elsi-c", "eagle3", "eagle2", "low-entropy", "uniform"] | None,
        typer.Option(
            help="elsi: greatest joint entropy. elsi-c: the same, members unlike each other. eagle3: taps 2, n/2, n-3. "
            "eagle2: the state after the final norm. low-entropy: a control. uniform: evenly spaced. Default: elsi."
        ),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(help="Taps of your own instead of a method, a list like 2,15,27; measured all the same."),
    ] = None,
    layers: Annotated[str | None, typer.Option(hidden=True)] = None,  # of export, and looked for here
    answers: Annotated[
        int | None,
        typer.Option(
            help="Measure on the target's own answers of at most so many tokens, 0 for the prompts alone "
            "(default: 128 where the work directory has a plain bundle, else 0)."
        ),
    ] = None,
    until_stable: Annotated[
        bool, typer.Option("--until-stable", help="Stop adding prompts once the single-tap pick is stable.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Selection file (default: the work directory's).")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Directory of the report (default: beside the selection).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curve into this .png or .svg file.")] = None,
    keep: Annotated[
        float,
        typer.Option(
            help="Share of each prompt's positions that count, the least sure first; 0 < keep <= 1.",
            rich_help_panel=_STATISTICS,
        ),
    ] = DEFAULT_KEEP,
    normalisation: Annotated[
        Literal["unit", "centered", "raw"],
        typer.Option(
            help="unit: rows scaled to unit norm, then centred. centered and raw are for comparison: a few massive "
            "activations decide them.",
            rich_help_panel=_STATISTICS,
        ),
    ] = "unit",
    cka_weight: Annotated[
        float | None,
        typer.Option(help="Nats that a unit of mean CKA costs elsi-c (default: 0.5).", rich_help_panel=_STATISTICS),
    ] = None,
    debiased_cka: Annotated[
        bool,
        typer.Option("--debiased-cka", help="CKA by the unbiased HSIC estimator.", rich_help_panel=_STATISTICS),
    ] = False,
    reservoir: Annotated[
        int,
        typer.Option(help="Kept positions that sets and CKA are measured on.", rich_help_panel=_STATISTICS),
    ] = 2048,
    seed: Annotated[
        int,
        typer.Option(help="Of the prompts' order, the samples and the resamples.", rich_help_panel=_STATISTICS),
    ] = 0,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Cross-check by a linear map, scored on held-out prompts.",
            rich_help_panel=_STATISTICS,
        ),
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="torch's name of the device that runs the model, such as cuda (default: cpu).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an interrupted run instead of going on.")] = False,
    work: opt.Work = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes the cores that may be used.")] = 0,
    json: opt.Json = False,
) -> None:
    """Measure what each layer knows where the target is unsure, and choose the layers that a draft will see.

    Interrupted, it goes on where it stopped when the same command is given again. Under `accelerate launch -m elsi_edge
    calibrate ...` several processes share the prompts.
    """
    from elsi_edge.calibration import CalibrationSettings
    from elsi_edge.calibration.chart import check_picture
    from elsi_edge.calibration.selection import DEFAULT_CKA_WEIGHT
    from elsi_edge.cli.calibrate_report import say_next, show
    from elsi_edge.errors import UsageError
    from elsi_edge.models import resolve
    from elsi_edge.prompts import builtin_calibration_prompts, read_prompts
    from elsi_edge.workdir import WorkDir

    if layers is not None:
        raise UsageError(
            f"--layers {layers} belongs to export; here --method chooses by a rule (elsi, eagle3, ...) and --taps "
            "names taps of your own, a list like 2,15,27"
        )
    if taps is not None and method is not None:
        raise UsageError(f"--taps {taps} and --method {method} exclude each other; give one")
    if answers is not None and answers < 0:
        raise UsageError(f"--answers is {answers}, it must be at least 0")
    if plot is not None:
        check_picture(plot)
    settings = CalibrationSettings(
        method="explicit" if taps is not None else method or "elsi",
        m=m,
        taps=() if taps is None else _taps(taps),
        keep=keep,
        normalisation=normalisation,
        cka_weight=DEFAULT_CKA_WEIGHT if cka_weight is None else cka_weight,
        debiased_cka=debiased_cka,
        reservoir=reservoir,
        seed=seed,
        probe=probe,
        until_stable=until_stable,
    )
    rows = read_prompts(prompts) if prompts is not None else builtin_calibration_prompts()
    source = resolve(model)
    run = Run(source=source, place=WorkDir.for_model(source.slug, work), threads=threads, device=device, fresh=fresh)
    analysis = run.analyse(rows, settings, answers=answers, files=(out, plot), report=report)
    if analysis is None:
        return
    file, page = run.write(analysis, out=out, report=report, plot=plot)
    show(analysis, file, page, json=json)
    say_next(analysis.selection, model, run.place, stray=out not in (None, run.place.selection_path))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One calibration from the command line: where things lie, and on what it runs."""

    source: "SourceModel"
    place: "WorkDir"
    threads: int = 0  # 0 takes the cores that may be used
    device: str | None = None  # torch's name; None is the CPU, or each launched process's own
    fresh: bool = False  # forget an interrupted run

    def analyse(
        self,
        rows: "Sequence[PromptRow]",
        settings: "CalibrationSettings",
        *,
        answers: int | None = None,
        files: tuple[Path | None, ...] = (),
        report: Path | None = None,
    ) -> "Analysis | None":
        """Measure and choose; None on every process but the first. `files` are checked to be writable first."""
        from elsi_edge import fsio
        from elsi_edge.calibration import analyse
        from elsi_edge.cli import common
        from elsi_edge.machine import cores
        from elsi_edge.processes import processes
        from elsi_edge.stopping import stop_requests

        settings.taps_wanted(self.source.shape.blocks)
        group = processes()
        first = group.rank == 0
        checkpoint = self.place.calibration / "partial.safetensors"
        if first:
            for place in (*files, self.place.selection_path, checkpoint):
                if place is not None:
                    fsio.require_writable(place)
            if self.fresh:
                checkpoint.unlink(missing_ok=True)
            for line in self.source.notes:
                common.note(f"note: {line}")
        threads = self.threads or cores().usable
        given = self._answers(rows, answers, threads, group)
        if first:
            self._estimate(rows, given, settings, checkpoint if group.count == 1 else None)
        try:
            with stop_requests(lambda: common.note("stopping after the step in hand; once more stops at once")) as stop:
                return analyse(
                    self.source, rows, settings, common.progress if first else None, answers=given, threads=threads,
                    checkpoint=checkpoint if group.count == 1 else None, group=group, stop=stop,
                    note=common.note if first else _silent, device=self.device or group.device,
                )  # fmt: skip
        finally:
            group.end()

    def _answers(
        self, rows: "Sequence[PromptRow]", wanted: int | None, threads: int, group: "Processes"
    ) -> list[list[int]] | None:
        """The target's answers, from a plain bundle; None to measure on prompts alone."""
        from elsi_edge.calibration.rendering import encode_prompts
        from elsi_edge.cli import calibration_answers, common
        from elsi_edge.errors import BundleError

        bundle = calibration_answers.plain_bundle(self.place) if wanted != 0 else None
        if bundle is None:
            if wanted:
                raise BundleError(
                    f"--answers {wanted} needs the exported target, and {self.place.root} holds no plain bundle; make "
                    f"one with: elsi-edge export {shlex.quote(self.source.reference)} --plain-only{self.place.flag}"
                )
            return None
        found = None
        if group.rank == 0:
            tokens = wanted or calibration_answers.DEFAULT_TOKENS
            common.note(f"text: the target's own answers, at most {tokens} tokens, from {bundle}")
            found = calibration_answers.answers_of(
                self.source, encode_prompts(self.source, rows), bundle=bundle, tokens=tokens,
                place=self.place, threads=threads,
            )  # fmt: skip
        answers: list[list[int]] = group.from_first(found)
        return answers

    def _estimate(
        self,
        rows: "Sequence[PromptRow]",
        answers: list[list[int]] | None,
        settings: "CalibrationSettings",
        checkpoint: Path | None,
    ) -> None:
        import psutil

        from elsi_edge.calibration import cost
        from elsi_edge.calibration.checkpoint import tokens_done
        from elsi_edge.calibration.rendering import render
        from elsi_edge.cli import common

        rendered = render(self.source, rows, skip=settings.skip, answers=answers)
        done = tokens_done(checkpoint, self.source, rendered, settings) if checkpoint is not None else 0
        estimate = cost.estimate(self.source, rendered.lengths, settings, done=done)
        if estimate.large:
            common.note(str(estimate))
        free = psutil.virtual_memory().available
        if estimate.memory > free:
            common.note(
                f"warning: that is more memory than the {free / 1e9:.1f} GB which are free; a smaller --reservoir or "
                "--no-probe takes less"
            )

    def write(
        self, analysis: "Analysis", *, out: Path | None, report: Path | None, plot: Path | None
    ) -> tuple[Path, Path]:
        """Write the selection, the report and the picture; gives the selection's and the report's paths."""
        from elsi_edge import fsio
        from elsi_edge.calibration.chart import save_wave
        from elsi_edge.calibration.report import write_report
        from elsi_edge.cli import common
        from elsi_edge.cli.calibrate_report import keep_previous

        for warning in analysis.selection.settings["warnings"]:
            common.note(f"warning: {warning}")
        file = out if out is not None else self.place.selection_path
        beside = self.place.calibration if out is None else out.with_name(f"{out.stem}-report")
        page = write_report(analysis, report or beside)
        keep_previous(file, analysis.selection)
        fsio.write_json(file, analysis.selection.to_json())
        if plot is not None:
            save_wave(analysis.selection, plot)
        return file, page


def _silent(text: str) -> None:
    """A note of a process that is not the first."""


def _taps(text: str) -> tuple[int, ...]:
    from elsi_edge.errors import UsageError

    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError as error:
        raise UsageError(f"--taps {text!r} is no list of numbers; write it like 2,15,27") from error
