"""What a calibration will take, said before it starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elsi_edge.artifacts import ModelShape
from elsi_edge.calibration import parallel
from elsi_edge.calibration.settings import CalibrationSettings
from elsi_edge.models import SourceModel
from elsi_edge.weights import list_tensors

_DOUBLE, _FLOAT = 8, 4
_LARGE_S, _LARGE_BYTES = 20.0, 2e9
_TRIAL_ROWS = 512
_TRIAL_S = 0.3  # seconds of matrix products that the estimate rests on
_EFFICIENCY = 0.4  # of the matrix speed that a whole forward pass reached on SmolLM2


def statistics_bytes(
    shape: ModelShape, settings: CalibrationSettings, *, pairs: int = 6, threads: int | None = None
) -> int:
    """Bytes that the statistics take at their peak: with L taps beside tap 0, width E and a reservoir of R positions,

    8 (L + 2) (E + 1) E for covariances, 4 (L + 1) R E for the reservoir, and
    4 (3 (L + 2) + 2 + pairs) E^2 for the probe, where `pairs` are those within the sets that it fits;

    and beside them the larger of what choosing and what probing take:
    6 (L + 1) R E for samples of the reservoir, with the larger of 512 (L + 1) R for CKA's Gram rows, 64 of every tap at
    a time, and 24 R E + 24 S^2 for each thread on a set of three taps, where S = min(3 E, R);
    16 (4 E + 1)^2 for the regression of EAGLE-3's three taps, and 8 (L + 3) E^2 for the weights of all.

    Saving progress takes 4 (L + 1) R E before any set is scored. threads: None is as many as `parallel.spread` uses.
    """
    taps, width, rows = shape.blocks + 1, shape.width, settings.reservoir
    held = _DOUBLE * (taps + 1) * (width + 1) * width + _FLOAT * taps * rows * width
    side = min(3 * width, rows)
    of_a_thread = 24 * (rows * width + side**2)
    samples = 3 * _FLOAT * taps * rows * width // 2
    choosing = samples + max(512 * taps * rows, (threads or parallel.count()) * of_a_thread)
    if not settings.probe:
        return held + choosing
    held += _FLOAT * (3 * (taps + 1) + 2 + pairs) * width**2
    return held + max(choosing, 2 * _DOUBLE * (4 * width + 1) ** 2 + 2 * _FLOAT * (taps + 2) * width**2)


def batch_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of one batch's states, captured and in three copies on the way to the sums, the probe's the largest."""
    return 4 * _FLOAT * (shape.blocks + 2) * tokens * shape.width


def weight_count(shape: ModelShape) -> int:
    """Weights that a forward pass multiplies with, embeddings left out and the output head in."""
    heads = shape.heads * shape.head_width
    attention = 2 * shape.width * heads + 2 * shape.width * shape.kv_heads * shape.head_width
    return shape.blocks * (attention + 3 * shape.width * shape.mlp_width) + shape.vocab_size * shape.width


def forward_seconds(
    shape: ModelShape, lengths: Sequence[int], settings: CalibrationSettings, *, done: int = 0
) -> float:
    """Seconds that the passes will take, right to about 2x, from a short trial of the speed of float32 products.

    `done` tokens of the first pass are behind an interrupted run already.
    """
    rows = np.ones((_TRIAL_ROWS, shape.width), np.float32)
    weights = np.ones((shape.width, shape.mlp_width), np.float32)
    rows @ weights
    best, until = float("inf"), time.perf_counter() + _TRIAL_S
    while time.perf_counter() < until:  # the fastest: others may use the machine just now
        start = time.perf_counter()
        rows @ weights
        best = min(best, time.perf_counter() - start)
    speed = rows.size * shape.mlp_width / best  # products a second
    passes = 1.25 if settings.probe else 1.0
    return (passes * sum(lengths) - done) * weight_count(shape) / (speed * _EFFICIENCY)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run will take."""

    tokens: int  # of all prompts
    done: int = 0  # of them, by an interrupted run
    seconds: float  # of what is left
    memory: int  # bytes at the peak, the program's own aside
    weights: int  # bytes of it that are the model's

    @property
    def large(self) -> bool:
        """Whether one would like to know before it starts."""
        return self.seconds > _LARGE_S or self.memory > _LARGE_BYTES

    def __str__(self) -> str:
        span = f"{self.seconds:.0f} s" if self.seconds < 90 else f"{self.seconds / 60:.0f} min"
        if self.seconds >= 5400:
            span = f"{self.seconds / 3600:.1f} h"
        done = f" of which {self.done:,} are done, the rest" if self.done else ""
        return (
            f"estimate: {self.tokens:,} tokens{done} in about {span} on the CPU; {self.memory / 1e9:.1f} GB of memory, "
            f"{self.weights / 1e9:.1f} of it the weights"
        )


def estimate(model: SourceModel, lengths: Sequence[int], settings: CalibrationSettings, *, done: int = 0) -> Estimate:
    """Time and memory for prompts of these lengths, tokens, of which an interrupted run has `done` some."""
    # float16 is read as float32, everything else as it is stored
    weights = sum(
        (ref.stop - ref.start) * (2 if ref.dtype == "F16" else 1) for ref in list_tensors(model.directory).values()
    )
    batch = max(max(lengths), min(settings.batch_tokens, sum(lengths)))
    return Estimate(
        tokens=sum(lengths),
        done=done,
        seconds=forward_seconds(model.shape, lengths, settings, done=done),
        memory=weights + statistics_bytes(model.shape, settings) + batch_bytes(model.shape, batch),
        weights=weights,
    )
