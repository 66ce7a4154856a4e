"""Prompts to a choice of taps: `calibrate` runs the target once over them, measures every tap and applies one rule."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from elsi_edge.artifacts import METHODS, LayerSelection, Method, PromptRow
from elsi_edge.calibration import selection
from elsi_edge.calibration.statistics import (
    NORMALISATIONS,
    CovarianceAccumulator,
    Normalisation,
    Reservoir,
    SetEntropy,
    keep_positions,
    linear_cka,
)
from elsi_edge.errors import ConfigError, DataError, PromptError
from elsi_edge.models import SourceModel
from elsi_edge.prompts import prompts_sha256
from elsi_edge.text import TextCodec

ENOUGH_ROWS = 8  # kept positions per unit of width under which single-tap entropies are called shaky
_DIGITS = 6  # of entropies in the selection: beyond, thread counts differ
_FIXED_M: dict[str, int] = {"eagle3": 3, "eagle2": 1}


class Advance(Protocol):
    """What a progress context gives."""

    def advance(self, n: float) -> None:
        """n more units are done."""


Progress = Callable[[str, float | None, str], AbstractContextManager[Advance]]  # description, total, unit


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """How taps are measured and chosen. Raises ConfigError for values out of range."""

    method: Method | Literal["explicit"] = "elsi"
    m: int | None = None  # number of taps; None is the rule's own, or 1
    taps: tuple[int, ...] = ()  # for "explicit" alone
    keep: float = 0.30  # share of each prompt's positions kept, the least sure first, (0, 1]
    skip: int = 4  # first positions of a prompt never counted, tokens; massive activations live there
    normalisation: Normalisation = "unit"
    cka_weight: float = selection.DEFAULT_CKA_WEIGHT  # nats, ELSI-C alone
    debiased_cka: bool = False
    reservoir: int = 2048  # kept positions that sets and CKA are measured on
    seed: int = 0  # of the reservoir
    batch_tokens: int = 1024  # positions per forward pass

    def __post_init__(self) -> None:
        methods = (*METHODS, "explicit")
        _require(self.method in methods, f"method is {self.method!r}, it must be one of {', '.join(methods)}")
        _require(
            self.normalisation in NORMALISATIONS,
            f"normalisation is {self.normalisation!r}, it must be one of {', '.join(NORMALISATIONS)}",
        )
        _require(self.m is None or self.m >= 1, f"m is {self.m}, it must be at least 1")
        _require(0.0 < self.keep <= 1.0, f"keep is {self.keep}, it must lie in (0, 1]")
        _require(self.skip >= 0, f"skip is {self.skip}, it must be at least 0")
        _require(self.cka_weight >= 0.0, f"the CKA weight is {self.cka_weight}, it must be at least 0")
        _require(self.reservoir >= 4, f"reservoir is {self.reservoir}, it must be at least 4")
        _require(self.seed >= 0, f"seed is {self.seed}, it must be at least 0")
        _require(self.batch_tokens >= 1, f"batch_tokens is {self.batch_tokens}, it must be at least 1")
        _require((self.method == "explicit") == bool(self.taps), "taps go with the method 'explicit', and it with them")
        fixed = len(self.taps) if self.taps else _FIXED_M.get(self.method)
        _require(
            self.m is None or fixed is None or self.m == fixed,
            f"m is {self.m}, but {self.method} takes {fixed} tap{'s' if fixed != 1 else ''}; leave --m out",
        )

    def taps_wanted(self, blocks: int) -> int:
        """m for a model of `blocks` blocks. Raises ConfigError when it has fewer."""
        m = len(self.taps) or self.m or _FIXED_M.get(self.method, 1)
        _require(
            bool(self.taps) or m <= blocks,
            f"m is {m}, but the model has {blocks} blocks and as many taps to choose from; ask for fewer",
        )
        return m


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    ids: list[list[int]]
    how: str  # "chat" or "raw"
    prefix: int  # tokens that the template puts before every prompt


@dataclass(frozen=True, kw_only=True)
class _Measured:
    entropy: tuple[float, ...]  # taps 0..L
    final_norm_entropy: float
    tokens: int  # positions kept
    sample: Any  # float32 [taps, R, E], or None when no set is measured


def calibrate(
    model: SourceModel,
    prompts: Sequence[PromptRow],
    settings: CalibrationSettings | None = None,
    progress: Progress | None = None,
    *,
    threads: int | None = None,
) -> LayerSelection:
    """Measure every tap of `model` over `prompts` and choose.

    Prompts go through the chat template (first turn of each; answers are not there yet), or as they are for a model
    without one. `threads` for torch; None leaves its default. What a reader should be warned of stands in
    `settings["warnings"]` of the selection. The same inputs give the same selection.
    Raises ConfigError, DataError, ModelError, SelectionError, MissingExtraError, each in one line.
    """
    settings = settings or CalibrationSettings()
    progress = progress or _no_progress
    blocks = model.shape.blocks
    m = settings.taps_wanted(blocks)
    if settings.method == "eagle3":
        selection.eagle3_taps(blocks)
    if settings.taps:
        selection.explicit(settings.taps, blocks)
    if not prompts:
        raise DataError("calibration needs at least one prompt, there are none")
    rendered = _render(model, prompts)
    measured = _measure(model, rendered, settings, progress, sets=m > 1, threads=threads)
    taps, joint, extra = _choose(measured, blocks, m, settings, progress)
    final_norm = settings.method == "eagle2"
    return LayerSelection(
        taps=taps,
        method=settings.method,
        state="final-norm" if final_norm else "residual",
        entropy=measured.entropy,
        joint_entropy=measured.final_norm_entropy if final_norm else round(joint, _DIGITS),
        keep=settings.keep,
        cka_weight=settings.cka_weight if settings.method == "elsi-c" else 0.0,
        prompts=len(prompts),
        tokens=measured.tokens,
        prompts_sha256=prompts_sha256(prompts),
        blocks=blocks,
        width=model.shape.width,
        target_fingerprint=model.fingerprint,
        model=model.reference,
        settings={
            "normalisation": settings.normalisation,
            "skip": settings.skip,
            "template_prefix": rendered.prefix,
            "rendering": rendered.how,
            "text": "prompts",
            "final_norm_entropy": measured.final_norm_entropy,
            "warnings": _warnings(measured, model.shape.width, m, settings),
            **extra,
        },
    )


def _render(model: SourceModel, prompts: Sequence[PromptRow]) -> _Rendered:
    codec = TextCodec.from_model_dir(model.directory)

    def encode(text: str) -> list[int]:
        if codec.has_template:
            return codec.encode_chat([{"role": "user", "content": text}], limit=model.shape.context)
        return codec.encode_raw(text, limit=model.shape.context)

    ids = []
    for row in prompts:
        try:
            ids.append(encode(row.turns[0]))
        except PromptError as error:
            raise DataError(f"prompt {row.id!r}: {error}") from error
    # States over the template's own head are the same in every prompt: copies, not samples.
    one, other = encode("a"), encode("9")
    same = [a == b for a, b in zip(one, other, strict=False)]
    return _Rendered(
        ids=ids, how="chat" if codec.has_template else "raw", prefix=same.index(False) if False in same else len(same)
    )


def _measure(
    model: SourceModel,
    rendered: _Rendered,
    settings: CalibrationSettings,
    progress: Progress,
    *,
    sets: bool,
    threads: int | None,
) -> _Measured:
    from elsi_edge.calibration import capture

    blocks, width = model.shape.blocks, model.shape.width
    names = (*(f"tap {tap}" for tap in range(blocks + 1)), "the state after the final norm")
    covariances = CovarianceAccumulator(names, width, settings.normalisation)
    reservoir = Reservoir(blocks + 1, width, size=settings.reservoir, seed=settings.seed) if sets else None
    skip = max(settings.skip, rendered.prefix)
    longest = max(map(len, rendered.ids))
    if longest <= skip:
        raise DataError(
            f"no position is left to measure: the longest prompt has {longest} tokens, the first {skip} are skipped; "
            "give longer prompts"
        )
    with capture.torch_threads(threads), progress("calibrate", float(sum(map(len, rendered.ids))), "tokens") as bar:
        target = capture.load_target(model.directory)
        for prompt in capture.capture(target, rendered.ids, blocks=blocks, batch_tokens=settings.batch_tokens):
            positions = keep_positions(prompt.entropy, keep=settings.keep, skip=skip)
            states = prompt.states[:, positions]
            covariances.add(np.concatenate([states, prompt.final_norm[None, positions]]))
            if reservoir is not None:
                reservoir.add(prompt.index, positions, states)
            bar.advance(len(prompt.entropy))
    entropies = [round(value, _DIGITS) for value in covariances.entropies().tolist()]
    return _Measured(
        entropy=tuple(entropies[:-1]),
        final_norm_entropy=entropies[-1],
        tokens=covariances.count,
        sample=reservoir.sample().states if reservoir is not None else None,
    )


def _choose(
    measured: _Measured, blocks: int, m: int, settings: CalibrationSettings, progress: Progress
) -> tuple[tuple[int, ...], float, dict[str, Any]]:
    """Taps, the set's joint entropy, and what to record beside them."""
    if measured.sample is None:
        if settings.method in ("elsi", "elsi-c"):
            choice = selection.elsi(blocks, m, lambda taps: measured.entropy[taps[0]])
            return choice.taps, choice.score, {}
        taps = _ruled(measured, blocks, m, settings)
        return taps, measured.entropy[taps[0]], {}
    joint = SetEntropy(measured.sample, settings.normalisation)
    rows = measured.sample.shape[1]
    extra: dict[str, Any] = {"reservoir": rows, "seed": settings.seed}
    if settings.method not in ("elsi", "elsi-c"):
        taps = _ruled(measured, blocks, m, settings)
        return taps, joint(taps), extra
    with progress("score sets of taps", None, "sets") as bar:

        def score(taps: tuple[int, ...]) -> float:
            bar.advance(1)
            return joint(taps)

        if settings.method == "elsi":
            choice = selection.elsi(blocks, m, score)
        else:
            cka = linear_cka(measured.sample, settings.normalisation, debiased=settings.debiased_cka)
            choice = selection.elsi_c(blocks, m, score, cka, weight=settings.cka_weight)
            extra["cka"] = "debiased" if settings.debiased_cka else "biased"
            extra["mean_cka"] = round(selection.mean_pairwise_cka(choice.taps, cka), _DIGITS)
    return choice.taps, joint(choice.taps), {**extra, "sets_scored": choice.evaluated}


def _ruled(measured: _Measured, blocks: int, m: int, settings: CalibrationSettings) -> tuple[int, ...]:
    if settings.method == "eagle3":
        return selection.eagle3_taps(blocks)
    if settings.method == "eagle2":
        return (blocks,)
    if settings.method == "low-entropy":
        return selection.low_entropy(measured.entropy, m)
    return selection.explicit(settings.taps, blocks)


def _warnings(measured: _Measured, width: int, m: int, settings: CalibrationSettings) -> list[str]:
    found = []
    if measured.tokens < ENOUGH_ROWS * width:
        found.append(
            f"{measured.tokens} kept positions are few for states of width {width} (from {ENOUGH_ROWS * width} on the "
            "pick tends to settle); give more prompts or a larger --keep"
        )
    if measured.sample is not None and measured.sample.shape[1] < m * width:
        rows = measured.sample.shape[1]
        found.append(f"sets were compared on {rows} positions, fewer than the {m * width} values of a set's state")
    return found


class _Silent:
    def advance(self, n: float) -> None:
        """Nothing to show."""


@contextlib.contextmanager
def _no_progress(description: str, total: float | None, unit: str) -> Iterator[Advance]:
    yield _Silent()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
