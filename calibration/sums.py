"""What one pass over the prompts sums up, and what the sums say about every tap by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration import probe, stability, variance
from elsi_edge.calibration.accumulate import CovarianceAccumulator, Reservoir
from elsi_edge.calibration.parallel import spread
from elsi_edge.calibration.settings import CalibrationSettings
from elsi_edge.calibration.statistics import FloatArray, keep_positions, normalise, random_positions, spectrum_entropy
from elsi_edge.errors import SelectionError
from elsi_edge.processes import Processes

if TYPE_CHECKING:
    from elsi_edge.calibration.capture import PromptStates


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one pass measures."""

    blocks: int
    width: int
    vocab_size: int
    sets: tuple[probe.Members, ...]  # fitted by the probe besides the single states
    held_out: frozenset[int]  # prompts that the probe scores and does not fit


class Sums:
    """Everything that is summed up in the pass."""

    def __init__(self, plan: Plan, settings: CalibrationSettings, prompts: int) -> None:
        taps = plan.blocks + 1
        names = (*(f"tap {tap}" for tap in range(taps)), "the state after the final norm")
        self.covariances = CovarianceAccumulator(names, plan.width, settings.normalisation)
        self.reservoir = Reservoir(taps, plan.width, size=settings.reservoir, seed=settings.seed)
        self.by_prompt = variance.PromptEntropies.empty(prompts, taps)
        self.probe = probe.ProbeStatistics(taps + 1, plan.width, plan.sets) if settings.probe else None
        self.preferred = np.zeros(plan.vocab_size, np.int64)  # how often each token was the target's choice
        self.kept = np.zeros(prompts, np.int64)  # positions kept, by prompt
        self._plan, self._settings = plan, settings

    def add(self, batch: "Sequence[PromptStates]", first: Sequence[int]) -> None:
        """Sum up a batch of prompts, of which positions from first[prompt's index] on count.

        Raises SelectionError naming the tap for NaN or infinity.
        """
        kept: list[NDArray[np.float32]] = []
        for prompt in batch:  # the filter would pass over NaN, which no position is less sure than
            if not np.isfinite(prompt.entropy).all():
                self.covariances.require_finite(np.concatenate([prompt.states, prompt.final_norm[None]]))
                raise SelectionError("the model's predictions are NaN; load the model in float32 or bfloat16")
        positions = [self._positions(prompt, first[prompt.index]) for prompt in batch]
        for prompt, chosen in zip(batch, positions, strict=True):
            rows = chosen["filtered"]
            kept.append(np.concatenate([prompt.states[:, rows], prompt.final_norm[None, rows]]))
        self.covariances.add(np.concatenate(kept, axis=1))  # many rows at a time: thin products only move memory
        for prompt, chosen, states in zip(batch, positions, kept, strict=True):
            self.kept[prompt.index] = len(chosen["filtered"])
            self.reservoir.add(prompt.index, chosen["filtered"], states[:-1])
        each = zip(batch, positions, strict=True)
        self.by_prompt.add(
            [variance.ByItself(index=p.index, states=p.states, chosen=chosen) for p, chosen in each],
            self._settings.normalisation,
        )
        fitted = [p for p in batch if p.index not in self._plan.held_out and len(p.entropy) - 1 > first[p.index]]
        if self.probe is not None and fitted:
            pairs = probe.Pairs.of(fitted, first)
            self.probe.add(pairs)
            np.add.at(self.preferred, pairs.argmax, 1)

    def _positions(self, prompt: "PromptStates", first: int) -> dict[str, NDArray[np.intp]]:
        length, seed = len(prompt.entropy), self._settings.seed + 7919 * prompt.index
        positions = keep_positions(prompt.entropy, keep=self._settings.keep, skip=first)
        equal = variance.EQUAL if length - first >= 2 * variance.EQUAL else 0
        return {
            "unfiltered": np.arange(min(first, length), length),
            "filtered": positions,
            "random": random_positions(len(positions), length=length, skip=first, seed=seed),
            "equal_filtered": np.sort(first + np.argsort(-prompt.entropy[first:], kind="stable")[:equal]),
            "equal_random": random_positions(equal, length=length, skip=first, seed=seed + 1),
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything but the reservoir, as arrays whose sums over processes are the whole."""
        return {
            **named("covariance", self.covariances.state()),
            **(named("probe", self.probe.state()) if self.probe is not None else {}),
            **{f"prompts.{name}": np.nan_to_num(values) for name, values in self.by_prompt.values.items()},
            "preferred": self.preferred,
            "kept": self.kept,
        }

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from what `state` gave."""
        self.covariances.load(part("covariance", state))
        if self.probe is not None:
            self.probe.load(part("probe", state))
        for name in self.by_prompt.values:
            values = state[f"prompts.{name}"]
            self.by_prompt.values[name] = np.where(values == 0.0, np.nan, values)  # an entropy of 0 says as little
        self.preferred, self.kept = state["preferred"], state["kept"]


def evaluate(sums: Sums, sampled: int | None = None) -> tuple[FloatArray, stability.Resampled]:
    """Entropies in nats of taps 0..L and of the state after the final norm, and what prompts do to the former.

    The latter rests on `sampled` rows of the reservoir, or on all of them.
    """
    covariances, sample = sums.covariances, sums.reservoir.sample(sampled)
    taps = len(covariances.names) - 1
    prompt = np.array([where[0] for where in sample.where], np.intp)

    def tap_by_itself(tap: int) -> tuple[float, FloatArray]:
        try:
            covariance = covariances.covariance(tap)
        except SelectionError:
            if tap > 0 or covariances.count < 2:
                raise
            return 0.0, np.zeros(len(prompt))  # the embeddings of one token alone; they are not eligible anyway
        values, vectors = np.linalg.eigh(covariance)
        rows = _rows(sample.states[tap], covariances, tap)
        return spectrum_entropy(values), stability.influence(rows, values, vectors)

    each = spread(tap_by_itself, range(taps))
    last = spectrum_entropy(np.linalg.eigvalsh(covariances.covariance(taps)))
    entropy = np.array([*(value for value, _ in each), last])
    influences = np.array([found for _, found in each])
    found = stability.resampled(entropy[:taps].tolist(), influences, prompt, total=covariances.count)
    return entropy, found


def _rows(states: NDArray[np.float32], covariances: CovarianceAccumulator, tap: int) -> NDArray[np.float32]:
    """Reservoir rows [R, E] of one tap as the covariance has them: normalised, its mean taken off."""
    rows = normalise(states, covariances.normalisation) - covariances.mean(tap)
    return rows.astype(np.float32)


def merged(sums: Sums, plan: Plan, settings: CalibrationSettings, group: Processes, prompts: int) -> Sums | None:
    """The sums over all processes, on the first of them; the others get None."""
    if group.count == 1:
        return sums
    totals = group.sums(sums.state())
    reservoirs = group.gathered(sums.reservoir.state())
    if group.rank:
        return None
    whole = Sums(plan, settings, prompts)
    whole.load(totals)
    whole.reservoir.merge(reservoirs)
    return whole


def named(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Arrays under names that `part` finds again."""
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def part(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What `named` put under a prefix, by its own names."""
    return {name.removeprefix(f"{prefix}."): array for name, array in arrays.items() if name.startswith(f"{prefix}.")}
