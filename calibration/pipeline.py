"""Prompts to a choice of taps: one pass measures every tap, rules choose, a pass over held-out prompts checks."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import LayerSelection, PromptRow
from elsi_edge.calibration import cost, parallel, probing, rules, variance
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.checkpoint import Checkpoint, identity
from elsi_edge.calibration.cka import compartments, linear_cka
from elsi_edge.calibration.measure import DIGITS, Measured, measure
from elsi_edge.calibration.probe import held_out
from elsi_edge.calibration.rendering import Rendered, render, require_enough
from elsi_edge.calibration.settings import CalibrationSettings, Note, Progress, no_note, no_progress
from elsi_edge.calibration.stability import describe, outlook
from elsi_edge.calibration.statistics import (
    NORMALISATIONS,
    Normalisation,
    centre_in_place,
    centred,
    spectrum_entropy,
)
from elsi_edge.calibration.sums import Plan
from elsi_edge.calibration.verdict import verdict
from elsi_edge.errors import DataError
from elsi_edge.models import SourceModel
from elsi_edge.processes import Alone, Processes
from elsi_edge.prompts import prompts_sha256

ENOUGH_ROWS = 8  # kept positions per unit of width under which single-tap entropies are called shaky


def calibrate(
    model: SourceModel,
    prompts: Sequence[PromptRow],
    settings: CalibrationSettings | None = None,
    progress: Progress | None = None,
    *,
    threads: int | None = None,
) -> LayerSelection:
    """`analyse`, for the selection alone."""
    return analyse(model, prompts, settings, progress, threads=threads).selection


def analyse(
    model: SourceModel,
    prompts: Sequence[PromptRow],
    settings: CalibrationSettings | None = None,
    progress: Progress | None = None,
    *,
    answers: Sequence[Sequence[int]] | None = None,
    threads: int | None = None,
    checkpoint: Path | None = None,
    group: Processes | None = None,
    stop: threading.Event | None = None,
    note: Note = no_note,
    device: str = "cpu",
) -> Analysis:
    """Measure every tap of `model` over `prompts`, choose, and check the choice.

    Prompts go through the chat template (first turn of each), or as they are for a model without one; `answers` are the
    target's own, token ids in the same order. `threads` for torch; None leaves its default. `checkpoint` names a file
    from which an interrupted run goes on. When `stop` is set the batch in hand is finished, progress saved and
    KeyboardInterrupt raised, before the first batch at once; `note` is told what there is to go on from. What a reader
    should be warned of stands in `settings["warnings"]` of the selection. The same inputs give the same selection.
    Raises ConfigError, DataError, ModelError, SelectionError, MissingExtraError, each in one line; SystemExit(0) on
    every process but the first.
    """
    settings, progress = settings or CalibrationSettings(), progress or no_progress
    group, stop = group or Alone(), stop or threading.Event()
    blocks = model.shape.blocks
    m = settings.taps_wanted(blocks)
    if not prompts:
        raise DataError("calibration needs at least one prompt, there are none")
    rendered = render(model, prompts, skip=settings.skip, answers=answers)
    require_enough(rendered, settings.keep)
    plan = Plan(
        blocks=blocks,
        width=model.shape.width,
        vocab_size=model.shape.vocab_size,
        sets=tuple(taps for _, taps in rules.known_sets(settings, blocks)),
        held_out=held_out(len(prompts), seed=settings.seed),
    )
    store = Checkpoint(checkpoint, identity(model, rendered, settings), note)
    from elsi_edge.calibration import capture

    with store.told(), capture.torch_threads(threads), parallel.threads(threads):
        started = time.monotonic()
        target = capture.load_target(model.directory, device=device)
        loaded = time.monotonic()
        if stop.is_set():
            raise KeyboardInterrupt
        opened = capture.open_model(target, rendered.ids, blocks=blocks)
        measured = measure(opened, rendered, plan, settings, progress, store, group, stop)
        streamed = time.monotonic()
        conclusion = _Conclusion(model, prompts, settings, rendered, measured, m)
        conclusion.choose(progress)
        chosen = time.monotonic()
        probe = {}
        if settings.probe:
            probe = probing.check(opened, rendered, plan, measured, conclusion.named_sets(), settings, progress, stop)
        checked = time.monotonic()
    seconds = {
        "load": loaded - started,
        "pass": streamed - loaded,
        "choose": chosen - streamed,
        "probe": checked - chosen,
        "memory_bytes": float(cost.statistics_bytes(model.shape, settings, threads=threads)),
    }
    store.clear()
    return conclusion.analysis(probe, seconds)


class _Conclusion:
    """From what was measured to a choice and everything that is said about it."""

    def __init__(
        self,
        model: SourceModel,
        prompts: Sequence[PromptRow],
        settings: CalibrationSettings,
        rendered: Rendered,
        measured: Measured,
        m: int,
    ) -> None:
        self._model, self._settings, self._rendered, self._measured, self._m = model, settings, rendered, measured, m
        self._prompts = [prompts[i] for i in sorted(measured.used)]
        self._blocks, self._width = model.shape.blocks, model.shape.width

    def choose(self, progress: Progress) -> None:
        """Run every rule, and take the settings' own."""
        sample = self._measured.sums.reservoir.sample()
        how, debiased = self._settings.normalisation, self._settings.debiased_cka
        self._normalisations: dict[str, tuple[float, ...]] = {}
        with progress("compare taps", len(NORMALISATIONS) + 2.0, "steps") as bar:
            for name in NORMALISATIONS:
                found = parallel.spread(partial(_tap_entropy, name), list(sample.states))
                self._normalisations[name] = tuple(round(v, DIGITS) for v in found)
                bar.advance(1)
            mean = sample.states.mean(axis=1, keepdims=True) if how == "raw" else None
            centre_in_place(sample.states, "centered" if how == "raw" else how)  # CKA is of centred rows
            self._cka = linear_cka(sample.states, debiased=debiased)
            bar.advance(1)
            half = np.sort(sample.order[: max(4, len(sample.order) // 2)])
            half_cka = linear_cka(sample.states[:, half], debiased=debiased)
            bar.advance(1)
        self._cka_change = float(np.abs(self._cka - half_cka).max())
        self._compartments = compartments(self._cka)
        if mean is not None:
            np.add(sample.states, mean, out=sample.states)  # and raw sets are of rows as they are
        self._rules = rules.run(self._measured, sample, self._cka, self._m, self._settings, progress)

    def named_sets(self) -> dict[str, tuple[int, ...]]:
        """The sets that the probe is to score, by name; "chosen" among them."""
        named = {rule.name: rule.taps for rule in self._rules.results if rule.state == "residual"}
        final_norm = self._settings.method == "eagle2"  # whose index follows those of the taps
        return {**named, "chosen": (self._blocks + 1,) if final_norm else self._rules.taps}

    def analysis(self, probe: dict[str, Any], seconds: dict[str, float]) -> Analysis:
        """All of it, frozen."""
        found, measured = self._rules, self._measured
        if "agreement" in probe:
            agreement = probe["agreement"][1:]
            order = {
                how: round(variance.spearman(agreement, values[1:]), 3) for how, values in self._normalisations.items()
            }
            probe = {**probe, "rank_correlation": order}
        choice = self._selection(probe)
        results = tuple(rules.with_probe(result, probe) for result in found.results)
        return Analysis(
            selection=choice,
            final_norm_entropy=round(measured.final_norm_entropy, DIGITS),
            normalisations=self._normalisations,
            rules=results,
            settling=measured.settling,
            searches=found.searches,
            cka=_matrix(self._cka),
            cka_estimator="debiased" if self._settings.debiased_cka else "biased",
            cka_rows=found.rows,
            cka_change=round(self._cka_change, 4),
            gains=_matrix(found.gains),
            gain_rows=found.gain_rows,
            verdict=verdict(choice, results, found.searches, rows=found.rows, width=self._width),
            cost={name: round(value, 2) for name, value in seconds.items()},
        )

    def _selection(self, probe: dict[str, Any]) -> LayerSelection:
        settings, measured, found = self._settings, self._measured, self._rules
        final_norm = settings.method == "eagle2"
        joint = measured.final_norm_entropy if final_norm else found.joint_entropy
        return LayerSelection(
            taps=found.taps,
            method=settings.method,
            state="final-norm" if final_norm else "residual",
            entropy=tuple(round(float(v), DIGITS) for v in measured.entropy),
            joint_entropy=round(joint, DIGITS),
            keep=settings.keep,
            cka_weight=settings.cka_weight if settings.method == "elsi-c" else 0.0,
            prompts=len(self._prompts),
            tokens=measured.sums.covariances.count,
            prompts_sha256=prompts_sha256(self._prompts),
            blocks=self._blocks,
            width=self._width,
            target_fingerprint=self._model.fingerprint,
            model=self._model.reference,
            settings=self._recorded(),
            entropy_interval=tuple((round(a, 4), round(b, 4)) for a, b in measured.resampled.intervals()),
            stability=self._stability(),
            probe=probe,
            compartments=self._compartments,
            cka_transitions=tuple(first for first, _ in self._compartments[1:]),
            variance=variance.report(measured.sums.by_prompt.values, self._blocks),
        )

    def _recorded(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "normalisation": settings.normalisation,
            "skip": settings.skip,
            "template_prefix": self._rendered.prefix,
            "rendering": self._rendered.how,
            "text": self._rendered.text,
            "tokens_read": sum(self._rendered.lengths[i] for i in self._measured.used),
            "eligible_positions": self._eligible(),
            "final_norm_entropy": round(self._measured.final_norm_entropy, DIGITS),
            "warnings": self._warnings(),
            "reservoir": self._rules.rows,
            "seed": settings.seed,
            "cka": "debiased" if settings.debiased_cka else "biased",
            **self._rules.recorded,
        }

    def _stability(self) -> dict[str, Any]:
        measured = self._measured
        eligible = np.arange(self._blocks + 1) > 0
        wins = measured.resampled.wins(seed=self._settings.seed, eligible=eligible)
        pick = measured.settling[-1].tap
        look = outlook(measured.settling)
        chosen = self._rules.taps == (pick,) and self._settings.method != "eagle2"
        stable, text = describe(wins, pick, len(self._prompts), look, chosen=chosen)
        if self._settings.until_stable:
            text = text.replace("more prompts may settle it (--until-stable)", "all prompts are used up; give more")
        taps = self._rules.taps
        if (share := {tuple(w["taps"]): w["share"] for w in self._rules.set_wins}.get(taps)) is not None:
            text += f" The chosen set {list(taps)} wins {share:.0%} of the draws against the sets nearest to it."
        return {
            "extrapolated_tap": None if look is None else look.limit,
            "extrapolated": [] if look is None else list(look.entropy),
            "resamples": 1000,
            "wins": [round(float(share), 4) for share in wins],
            "stable": stable,
            "text": text,
            "sets": self._rules.set_wins,
        }

    def _eligible(self) -> int:
        eligible = self._rendered.eligible
        return sum(eligible[i] for i in self._measured.used)

    def _warnings(self) -> list[str]:
        found = []
        kept, width, rows = self._measured.sums.covariances.count, self._width, self._rules.rows
        if kept < ENOUGH_ROWS * width:
            larger = " or a larger --keep" if self._eligible() >= ENOUGH_ROWS * width else ""
            found.append(
                f"{kept} kept positions are few for states of width {width} (from {ENOUGH_ROWS * width} on the pick "
                f"tends to settle); give more prompts{larger}"
            )
        if 0 in self._settings.taps:
            found.append("tap 0 is the embeddings, which a draft reads anyway; it adds nothing")
        if rows < width and not self._settings.debiased_cka:
            found.append(
                f"CKA was measured on {rows} positions, fewer than the width {width}, where the biased estimator sees "
                "likeness everywhere; add --debiased-cka or more prompts"
            )
        elif self._m > 1 and rows < self._m * width:
            found.append(f"sets were compared on {rows} positions, fewer than the {self._m * width} values of a set")
        return found


def _tap_entropy(how: Normalisation, states: NDArray[np.float32]) -> float:
    rows = centred(states, how, np.float32)
    rows = rows / max(float(np.abs(rows).max()), 1e-30)  # states as they are may pass float32 when squared
    gram = rows.T @ rows if len(rows) >= rows.shape[1] else rows @ rows.T
    return spectrum_entropy(np.linalg.eigvalsh(gram.astype(np.float64)))


def _matrix(values: Any) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(None if np.isnan(v) else round(float(v), 4) for v in row) for row in values)
