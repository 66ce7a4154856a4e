"""The stages of `elsi-edge build`: what is there, what is made, and the time that each took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsi_edge.artifacts import Precision
from elsi_edge.cli.draft_support import BarReporter

if TYPE_CHECKING:
    from elsi_edge.artifacts import DraftConfig, LayerSelection, PromptRow
    from elsi_edge.bundle import BundleManifest
    from elsi_edge.calibration.settings import CalibrationSettings
    from elsi_edge.cli.build_plan import Plan
    from elsi_edge.cli.progress import Advance
    from elsi_edge.draft.settings import TrainSettings
    from elsi_edge.draft.shards import ShardManifest
    from elsi_edge.models import SourceModel
    from elsi_edge.workdir import WorkDir

_LEAST_ROWS = 32  # distilled before time counts: below, there is nothing to train and to hold out
_STATE = "build.json"
_ROUNDED = 0.051  # minutes: a draft's configuration tells them to a tenth


class TimeIsUp(Exception):
    """The answers' share of the hours is used."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a build leaves."""

    selection: "LayerSelection"
    shards: "ShardManifest"
    draft: "DraftConfig"
    bundle: "BundleManifest"


@dataclass(kw_only=True)
class Build:
    """One build: its settings, where it lies, and the time it took so far."""

    source: "SourceModel"
    place: "WorkDir"
    hours: float
    rows: "list[PromptRow]"  # to be answered for training
    calibration_rows: "list[PromptRow]"
    calibration: "CalibrationSettings"
    any_method: bool  # whether a selection by any method will do
    precision: Precision
    max_tokens: int
    draft_vocab: int
    steps: int | None
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, over all sittings

    def __post_init__(self) -> None:
        self.seconds = _read_seconds(self.place.root / _STATE)

    # --- what is there ---------------------------------------------------------------------------------------

    def plan(self) -> "Plan":
        """What is left to do, estimated."""
        from elsi_edge.cli.build_plan import STAGES, make_plan

        checks = (self.plain, self.selection, self._answered, self.trained, self.bundle)
        done = [name for name, check in zip(STAGES, checks, strict=True) if check() is not None]
        return make_plan(
            self.source, self.rows, self.calibration_rows, self.calibration, hours=self.hours, precision=self.precision,
            max_tokens=self.max_tokens, draft_vocab=self.draft_vocab, done=done,
            spent=sum(self.seconds.get(name, 0.0) for name in ("plain bundle", "calibrate", "distill")),
            steps=self.steps,
        )  # fmt: skip

    def plain(self) -> "BundleManifest | None":
        """The target's bundle, where it is this model's."""
        found = _manifest(self.place.plain_bundle(self.precision))
        return found if found is not None and found.target_fingerprint == self.source.fingerprint else None

    def selection(self) -> "LayerSelection | None":
        """The work directory's selection, where it is of this model and of the taps asked for."""
        from elsi_edge.cli.inspect import read_selection

        if not self.place.selection_path.is_file():
            return None
        found, asked = read_selection(self.place.selection_path), self.calibration
        fits = found.target_fingerprint == self.source.fingerprint and asked.m in (None, found.m)
        return found if fits and (self.any_method or found.method == asked.method) else None

    def shards(self) -> "ShardManifest | None":
        """What was distilled so far. Raises DataError when it is of another model or other taps."""
        from elsi_edge.draft.shards import MANIFEST, ShardManifest, require_made_for
        from elsi_edge.errors import DataError

        if not (self.place.shards / MANIFEST).is_file():
            return None
        found, chosen = ShardManifest.load(self.place.shards), self.selection()
        require_made_for(self.place.shards, found, target_fingerprint=self.source.fingerprint)
        wanted = self.calibration.taps_wanted(self.source.shape.blocks)
        differs = not found.selection.same_taps(chosen) if chosen is not None else found.selection.m != wanted
        if differs:
            asked = (
                f"the selection is {chosen.describe()}" if chosen is not None else f"this build asks for m = {wanted}"
            )
            raise DataError(
                f"{self.place.shards} holds shards of {found.selection.describe()}, {asked}; delete those shards and "
                "the draft, or build in another --work"
            )
        return found

    def _answered(self) -> "ShardManifest | None":
        """The shards, when no more are to be made: all prompts are in, time was up, or training has begun."""
        from elsi_edge.prompts import prompts_sha256

        found = self.shards()
        if found is None or found.rows == 0 or found.prompts_sha256 != prompts_sha256(self.rows):
            return None
        whole = found.rows + len(found.dropped) >= len(self.rows)
        begun = any(self.place.draft.glob("checkpoint-*"))
        return found if whole or begun or self.seconds.get("answers done", 0.0) else None

    def trained(self) -> "DraftConfig | None":
        """The draft, where it is of these taps and its budget is used."""
        from elsi_edge.draft.checkpoint import CONFIG, load_config

        chosen = self.selection()
        if chosen is None or not (self.place.draft / CONFIG).is_file():
            return None
        found = load_config(self.place.draft)
        if found.target_fingerprint != self.source.fingerprint or not found.selection.same_taps(chosen):
            return None
        used = found.training.get("settings", {})
        if self.steps is not None:
            return found if used.get("steps", 0) >= self.steps else None
        return found if used.get("minutes", 0.0) + _ROUNDED >= self._train_seconds() / 60 else None

    def bundle(self) -> "BundleManifest | None":
        """The complete bundle, where it holds this very draft."""
        found, draft = _manifest(self.place.bundle(self.precision)), self.trained()
        if found is None or found.draft is None or draft is None:
            return None
        same = found.draft.training.get("tensors_sha256") == draft.training.get("tensors_sha256")
        return found if same and found.target_fingerprint == self.source.fingerprint else None

    # --- the stages ------------------------------------------------------------------------------------------

    def run(self, plan: "Plan") -> "Made":
        """Do what is left, in order."""
        self._stage("plain bundle", self.plain, lambda: self._export(self.place.plain_bundle(self.precision)))
        selection = self._stage("calibrate", self.selection, lambda: self._calibrate(plan))
        shards = self._stage("distill", self._answered, lambda: self._distill(selection))
        draft = self._stage("train", self.trained, self._train)
        manifest = self._stage("bundle", self.bundle, lambda: self._export(self.place.bundle(self.precision), draft))
        return Made(selection=selection, shards=shards, draft=draft, bundle=manifest)

    def _stage(self, name: str, there: Callable[[], Any], make: Callable[[], Any]) -> Any:
        from elsi_edge.cli import common

        if (found := there()) is not None:
            common.note(f"{name}: is there")
            return found
        common.note(f"{name}:")
        with self._timed(name):
            return make()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add to a stage's time, however it ends."""
        from elsi_edge.fsio import write_json

        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
            write_json(self.place.root / _STATE, {"format": "elsi-edge-build", "seconds": self.seconds})

    def _export(self, out: Path, draft: "DraftConfig | None" = None) -> "BundleManifest":
        from elsi_edge.cli.export import write_bundle
        from elsi_edge.draft.checkpoint import load_draft
        from elsi_edge.export.pipeline import ExportSettings

        loaded = None if draft is None else load_draft(self.place.draft)
        return write_bundle(self.source, out, ExportSettings(precision=self.precision, replace=True), loaded)

    def _calibrate(self, plan: "Plan") -> "LayerSelection":
        from elsi_edge.cli.calibrate import Run

        run = Run(source=self.source, place=self.place, threads=self.threads)
        analysis = run.analyse(self.calibration_rows, self.calibration, answers=plan.calibration_answers)
        if analysis is None:  # not the first of several processes
            raise SystemExit(0)
        run.write(analysis, out=None, report=None, plot=None)
        return analysis.selection

    def _distill(self, selection: "LayerSelection") -> "ShardManifest":
        from elsi_edge.cli import common
        from elsi_edge.cli.distill import make_shards, open_bundle
        from elsi_edge.draft.settings import DistillSettings
        from elsi_edge.draft.shards import ShardManifest

        self.shards()
        before = self._spent("plain bundle", "calibrate")
        left = self._answer_seconds(before) - self.seconds.get("distill", 0.0)
        until = time.monotonic() + left
        bundle = self.place.plain_bundle(self.precision)
        runner, codec = open_bundle(bundle, self.place, self.threads, self.source.fingerprint, self.source.reference)
        settings = DistillSettings(max_tokens=self.max_tokens)
        try:
            found = make_shards(
                runner, codec, self.rows, selection, settings, self.place.shards, model=self.source.reference,
                report=lambda bar: _Until(bar, until),
            )  # fmt: skip
        except TimeIsUp:
            common.note("the answers' share of the hours is used")
            found = ShardManifest.load(self.place.shards)
        self.seconds["answers done"] = 1.0
        return found

    def _train(self) -> "DraftConfig":
        from elsi_edge.cli.train import train_draft
        from elsi_edge.processes import processes

        return train_draft(self.source, self.place.shards, self.place.draft, self._train_settings(), group=processes())

    def _train_settings(self) -> "TrainSettings":
        from elsi_edge.draft.settings import TrainSettings

        minutes = None if self.steps is not None else max(0.1, self._train_seconds() / 60)
        return TrainSettings(
            minutes=minutes, steps=self.steps, draft_vocab=self.draft_vocab, threads=self.threads, patience=0
        )

    # --- the hours -------------------------------------------------------------------------------------------

    def _spent(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names)

    def _final_seconds(self) -> float:
        """What the last export will take: as long as the first."""
        from elsi_edge.cli.build_plan import export_seconds
        from elsi_edge.weights import count_weights

        return self.seconds.get("plain bundle") or export_seconds(count_weights(self.source.directory))

    def _answer_seconds(self, spent: float) -> float:
        from elsi_edge.cli.build_plan import answer_budget

        return answer_budget(self.hours, spent, self._final_seconds())

    def _train_seconds(self) -> float:
        from elsi_edge.cli.build_plan import train_budget

        return train_budget(self.hours, self._spent("plain bundle", "calibrate", "distill"), self._final_seconds())


class _Until(BarReporter):
    """Ends distillation once a time has come and there is something to train on; what is whole is kept."""

    def __init__(self, bar: "Advance", until: float) -> None:
        super().__init__(bar)
        self._until, self._rows = until, 0.0

    def advance(self, amount: float) -> None:
        super().advance(amount)
        self._rows += amount
        if self._rows >= _LEAST_ROWS and time.monotonic() >= self._until:
            raise TimeIsUp


def _manifest(directory: Path) -> "BundleManifest | None":
    from elsi_edge.bundle import MANIFEST, read_manifest

    return read_manifest(directory) if (directory / MANIFEST).is_file() else None


def _read_seconds(path: Path) -> dict[str, float]:
    import json

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in value["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the clock starts anew; nothing but the split of the hours depends on it
