"""What `elsi-edge build` will take, said and checked before it starts, and how its hours are split.

Hours: exporting and calibrating take what they take; of the rest a third goes to the target's answers and two thirds to
training. A token costs about as much to answer and record as to train on a few times, and a draft gains from several
passes over its data; answers that are ready early (few prompts) leave their time to training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elsi_edge.artifacts import BYTES_PER_WEIGHT, Precision
from elsi_edge.cli.progress import size_text, span_text

if TYPE_CHECKING:
    from elsi_edge.artifacts import PromptRow
    from elsi_edge.calibration.settings import CalibrationSettings
    from elsi_edge.models import SourceModel

STAGES = ("plain bundle", "calibrate", "distill", "train", "bundle")
ANSWER_SHARE = 1 / 3  # of what exporting and calibrating leave
_LEAST_TRAIN_S = 60.0  # seconds below which no draft worth the name comes out
_EXPORT_S = 10.0  # seconds of an export beside its weights
_EXPORT_S_PER_WEIGHT = 3e-7  # building, packing and checking; 135 M weights took 58 s on two busy cores
_STATE_COPIES = 16  # bytes of a trained weight: itself, its average and the optimiser's two, float32
_PASSES = 2.0  # forward passes that answering and recording a token are worth
_CALIBRATION_ANSWER_SHARE = 0.15  # of the hours that calibration may spend on answers
_PROGRAM = 1e9  # bytes: torch, ONNX Runtime and activations


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage takes, from above for disk and memory, right to about 2x for time."""

    name: str
    seconds: float
    disk: int  # bytes that stay, and on the way
    memory: int  # bytes at the peak
    done: bool = False  # its artefact is there and fits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole build."""

    hours: float
    stages: tuple[Stage, ...]
    calibration_answers: int  # tokens of an answer that calibration measures on; 0 for the prompts alone
    answer_seconds: float  # all prompts' answers, if there were time for all

    @property
    def disk(self) -> int:
        """Bytes that the stages to come need."""
        return sum(stage.disk for stage in self.stages if not stage.done)

    @property
    def memory(self) -> int:
        """Bytes of the greediest stage to come."""
        return max((stage.memory for stage in self.stages if not stage.done), default=0)

    def lines(self) -> list[str]:
        """The estimate, for people."""
        rows = [f"estimate for {self.hours:g} h:  {'time':>8} {'disk':>10} {'memory':>10}"]
        for stage in self.stages:
            if stage.done:
                rows.append(f"  {stage.name:<20} is there")
                continue
            numbers = f"{span_text(stage.seconds):>8} {size_text(stage.disk):>10} {size_text(stage.memory):>10}"
            rows.append(f"  {stage.name:<20}{numbers}")
        rows.append(
            f"of what exports and calibration leave, {ANSWER_SHARE:.0%} goes to answers and the rest to training; "
            "time that answers do not need goes to training"
        )
        return rows


def answer_budget(hours: float, spent: float, final: float) -> float:
    """Seconds for answers, `spent` of the hours gone before them and `final` kept for the last export."""
    return max(0.0, (3600 * hours - spent - final) * ANSWER_SHARE)


def train_budget(hours: float, spent: float, final: float) -> float:
    """Seconds for training, when `spent` went before it."""
    return 3600 * hours - spent - final


def export_seconds(weights: int) -> float:
    """Seconds of one export of so many weights."""
    return _EXPORT_S + weights * _EXPORT_S_PER_WEIGHT


def make_plan(
    source: "SourceModel",
    rows: "Sequence[PromptRow]",
    calibration_rows: "Sequence[PromptRow]",
    calibration: "CalibrationSettings",
    *,
    hours: float,
    precision: Precision,
    max_tokens: int,
    draft_vocab: int,
    done: Sequence[str],
    spent: float,
    steps: int | None,
) -> Plan:
    """Estimate every stage. `spent` seconds of earlier sittings; `steps` instead of time for training.

    Raises UsageError when the hours leave less than a minute for training.
    """
    from elsi_edge.calibration import cost
    from elsi_edge.calibration.rendering import render
    from elsi_edge.cli.calibration_answers import DEFAULT_TOKENS
    from elsi_edge.errors import UsageError
    from elsi_edge.export.pipeline import disk_needed
    from elsi_edge.weights import count_weights

    shape = source.shape
    weights = count_weights(source.directory)
    lengths = render(source, calibration_rows, skip=calibration.skip).lengths
    measure = cost.estimate(source, lengths, calibration)
    per_token = measure.seconds / max(1, sum(lengths))
    asked = DEFAULT_TOKENS * len(lengths)
    answers_wanted = asked * per_token * _PASSES <= _CALIBRATION_ANSWER_SHARE * 3600 * hours
    calibrate_s = measure.seconds + (asked * per_token * (1 + _PASSES) if answers_wanted else 0.0)
    export_s = export_seconds(weights)
    before = spent + sum(
        seconds for name, seconds in (("plain bundle", export_s), ("calibrate", calibrate_s)) if name not in done
    )
    all_answers = len(rows) * max_tokens * per_token * _PASSES
    distill_s = 0.0 if "distill" in done else min(all_answers, answer_budget(hours, before, export_s))
    train_s = train_budget(hours, before + distill_s, export_s)
    if steps is None and "train" not in done and train_s < _LEAST_TRAIN_S:
        least = (before + distill_s + export_s + _LEAST_TRAIN_S) / 3600
        raise UsageError(
            f"--hours {hours:g} leaves {max(0.0, train_s):.0f} s for training after {span_text(before + export_s)} of "
            f"exports and calibration; give at least {least * 1.5:.1g} hours"
        )
    taps = calibration.taps_wanted(shape.blocks)
    tokens = int(distill_s / max(per_token * _PASSES, 1e-9)) + sum(lengths)
    draft = _draft_weights(source, taps, draft_vocab)
    transient, kept = disk_needed(weights, precision), int(weights * BYTES_PER_WEIGHT[precision])
    model = 4 * weights + int(_PROGRAM)
    sizes: dict[str, tuple[float, int, int]] = {
        "plain bundle": (export_s, transient, model + kept),
        "calibrate": (calibrate_s, 10_000_000, measure.memory + int(_PROGRAM)),
        "distill": (distill_s, tokens * (taps * shape.width * 2 + 250), 3 * kept + int(_PROGRAM)),
        "train": (max(0.0, train_s), draft * (2 * _STATE_COPIES + 2), model + draft * (_STATE_COPIES + 8)),
        "bundle": (export_s, transient, model + kept),
    }
    stages = tuple(
        Stage(name=name, seconds=seconds, disk=disk, memory=memory, done=name in done)
        for name, (seconds, disk, memory) in sizes.items()
    )
    return Plan(
        hours=hours,
        stages=stages,
        calibration_answers=DEFAULT_TOKENS if answers_wanted else 0,
        answer_seconds=all_answers,
    )


def _draft_weights(source: "SourceModel", taps: int, draft_vocab: int) -> int:
    shape = source.shape
    attention = 2 * shape.width * (shape.heads + 2 * shape.kv_heads) * shape.head_width
    block = attention + shape.heads * shape.head_width * shape.width + 3 * shape.width * shape.mlp_width
    return block + taps * shape.width**2 + min(draft_vocab, shape.vocab_size) * shape.width


def require_room(plan: Plan, place: Path) -> None:
    """Raise StorageError when disk or memory are too little, both numbers named."""
    import psutil

    from elsi_edge.errors import StorageError
    from elsi_edge.fsio import require_free

    require_free(place, plan.disk, "building")
    free = psutil.virtual_memory().available
    if plan.memory > free:
        worst = max((stage for stage in plan.stages if not stage.done), key=lambda stage: stage.memory)
        raise StorageError(
            f"building needs {worst.memory / 1e9:.1f} GB of memory (for {worst.name}), {free / 1e9:.1f} GB are free; "
            "close other programs, or build on a larger machine"
        )
