"""The one pass over the prompts: states stream by and are summed up, in stages, on one process or several.

1. Prompts are put in a seeded order and cut into stages; a stage's batches are planned once, so that a resumed run
   makes the same batches and the same sums.
2. Every batch's states go into the covariances, the reservoir, the per-prompt entropies and the probe's sums.
3. After each stage the single-tap entropies so far say what would be picked: where the pick settles, and when to stop.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration import probe, stability, variance
from elsi_edge.calibration.accumulate import CovarianceAccumulator, Reservoir
from elsi_edge.calibration.analysis import Settling
from elsi_edge.calibration.checkpoint import Checkpoint
from elsi_edge.calibration.parallel import spread
from elsi_edge.calibration.rendering import Rendered
from elsi_edge.calibration.settings import CalibrationSettings, Progress
from elsi_edge.calibration.statistics import FloatArray, keep_positions, normalise, random_positions, spectrum_entropy
from elsi_edge.errors import SelectionError
from elsi_edge.processes import Processes

if TYPE_CHECKING:
    import torch

    from elsi_edge.calibration.capture import PromptStates

DIGITS = 6  # of entropies in results: beyond, thread counts differ
EARLY = 4  # part of the reservoir that the looks before the last rest on
STABLE_STEP = 32  # prompts between two looks at the pick, when it is to become stable


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
            **_named("covariance", self.covariances.state()),
            **(_named("probe", self.probe.state()) if self.probe is not None else {}),
            **{f"prompts.{name}": np.nan_to_num(values) for name, values in self.by_prompt.values.items()},
            "preferred": self.preferred,
            "kept": self.kept,
        }

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from what `state` gave."""
        self.covariances.load(_part("covariance", state))
        if self.probe is not None:
            self.probe.load(_part("probe", state))
        for name in self.by_prompt.values:
            values = state[f"prompts.{name}"]
            self.by_prompt.values[name] = np.where(values == 0.0, np.nan, values)  # an entropy of 0 says as little
        self.preferred, self.kept = state["preferred"], state["kept"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the pass leaves; tap-indexed arrays run over taps 0..L."""

    sums: Sums
    entropy: FloatArray  # [L + 1] nats
    final_norm_entropy: float  # nats
    resampled: stability.Resampled  # of `entropy`
    settling: tuple[Settling, ...]
    used: tuple[int, ...]  # prompts measured, in the order taken


def measure(
    target: "torch.nn.Module",
    rendered: Rendered,
    plan: Plan,
    settings: CalibrationSettings,
    progress: Progress,
    checkpoint: Checkpoint,
    group: Processes,
    stop: threading.Event,
) -> Measured:
    """Run the pass. Raises SelectionError naming the tap for states that cannot be measured, and KeyboardInterrupt
    after the batch in which `stop` was set, with everything so far saved."""
    order = _order(rendered, settings)
    stages = _stages(order, settings)
    sums = Sums(plan, settings, len(order))
    settling: list[Settling] = []
    resumed = checkpoint.load() if group.count == 1 else None
    stage_done, batch_done = 0, 0
    if resumed is not None:
        arrays, meta = resumed
        sums.load(arrays)
        sums.reservoir.merge([_part("reservoir", arrays)])
        settling = [Settling(**{**s, "entropy": tuple(s["entropy"])}) for s in meta["settling"]]
        stage_done, batch_done = meta["stage"], meta["batch"]
    total = float(sum(rendered.lengths))
    done = [i for stage in stages[:stage_done] for i in stage]
    latest: tuple[FloatArray, stability.Resampled] | None = None
    mine = [_batches(stage, rendered, settings)[group.rank :: group.count] for stage in stages]
    skipped = [batch for stage in mine[:stage_done] for batch in stage] + mine[stage_done][:batch_done]
    left = [batch for stage in mine for batch in stage][len(skipped) :]
    if skipped:
        seen = sum(len(rendered.ids[i]) for batch in skipped for i in batch)
        checkpoint.say(f"note: going on after {seen:,} of {int(total):,} tokens of an interrupted run")
    captured = _captured(target, rendered, plan, left)  # once: finding the blocks runs the model
    with progress("calibrate", total, "tokens") as bar:
        bar.advance(float(sum(len(rendered.ids[i]) for batch in skipped for i in batch)))
        for number in range(stage_done, len(stages)):
            here = itertools.islice(captured, len(mine[number]) - batch_done)
            for index, batch in enumerate(here, start=batch_done + 1):
                sums.add(batch, rendered.first)
                bar.advance(float(sum(len(prompt.entropy) for prompt in batch)) * group.count)
                if stop.is_set() or checkpoint.due:
                    if group.count == 1:  # a process's share is no state that any run could go on from
                        _save(checkpoint, sums, settling, number, index)
                    if stop.is_set():
                        raise KeyboardInterrupt
            batch_done = 0
            done += stages[number]
            whole = _merged(sums, plan, settings, group, len(order))
            if whole is not None:
                last = number == len(stages) - 1
                few = None if last or settings.until_stable else settings.reservoir // EARLY  # a look in passing
                latest = _looked(whole, last=last, sampled=few)
                if latest is not None:
                    settling.append(_settling(whole, latest, len(done), settings.seed))
            if group.from_first(settings.until_stable and whole is not None and _stable(settling, len(done))):
                break
    if group.rank or whole is None or latest is None:
        raise SystemExit(0)  # the first process goes on with the sums
    entropy, found = latest
    return Measured(
        sums=whole,
        entropy=entropy[:-1],
        final_norm_entropy=float(entropy[-1]),
        resampled=found,
        settling=tuple(settling),
        used=tuple(done),
    )


def _looked(sums: Sums, *, last: bool, sampled: int | None) -> tuple[FloatArray, stability.Resampled] | None:
    """`evaluate`; None where the first few prompts leave too little to measure, which more prompts may mend."""
    try:
        return evaluate(sums, sampled)
    except SelectionError:
        if last:
            raise
        return None


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


def _stages(order: Sequence[int], settings: CalibrationSettings) -> list[list[int]]:
    """Prompts by stage: a quarter, a half and all of them; or STABLE_STEP at a time."""
    count = len(order)
    if settings.until_stable:
        ends = [*range(STABLE_STEP, count, STABLE_STEP), count]
    else:
        ends = sorted({count, *(count // part for part in (2, 4) if count // part >= stability.LEAST_PROMPTS)})
    return [list(order[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def batches_of(rendered: Rendered, settings: CalibrationSettings) -> list[list[int]]:
    """All batches of a pass on one process, in order; prompts by index."""
    stages = _stages(_order(rendered, settings), settings)
    return [batch for stage in stages for batch in _batches(stage, rendered, settings)]


def _order(rendered: Rendered, settings: CalibrationSettings) -> list[int]:
    order: list[int] = np.random.default_rng([settings.seed, 0]).permutation(len(rendered.ids)).tolist()
    return order


def _batches(stage: Sequence[int], rendered: Rendered, settings: CalibrationSettings) -> list[list[int]]:
    from elsi_edge.calibration.capture import plan_batches

    planned = plan_batches([len(rendered.ids[i]) for i in stage], tokens=settings.batch_tokens)
    return [[stage[i] for i in batch] for batch in planned]


def _captured(
    target: "torch.nn.Module", rendered: Rendered, plan: Plan, batches: Sequence[Sequence[int]]
) -> "Iterator[list[PromptStates]]":
    """States batch by batch."""
    from elsi_edge.calibration.capture import capture

    waiting: list[PromptStates] = []
    ends = iter(batches)
    size = len(next(ends, ()))
    for prompt in capture(target, rendered.ids, blocks=plan.blocks, batches=batches):
        waiting.append(prompt)
        if len(waiting) == size:
            yield waiting
            waiting, size = [], len(next(ends, ()))


def _save(checkpoint: Checkpoint, sums: Sums, settling: list[Settling], stage: int, batch: int) -> None:
    from elsi_edge.artifacts import to_plain

    arrays = {**sums.state(), **_named("reservoir", sums.reservoir.state())}
    checkpoint.save(arrays, {"settling": to_plain(settling), "stage": stage, "batch": batch})


def _merged(sums: Sums, plan: Plan, settings: CalibrationSettings, group: Processes, prompts: int) -> Sums | None:
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


def _settling(sums: Sums, latest: tuple[FloatArray, stability.Resampled], prompts: int, seed: int) -> Settling:
    entropy, found = latest
    wins = found.wins(seed=seed, eligible=np.arange(len(entropy) - 1) > 0)
    pick = 1 + int(np.argmax(np.round(entropy[1:-1], DIGITS)))
    return Settling(
        prompts=prompts,
        tokens=sums.covariances.count,
        tap=pick,
        entropy=tuple(np.round(entropy[:-1], DIGITS).tolist()),
        win_share=float(wins[pick]),
    )


def _stable(settling: Sequence[Settling], prompts: int) -> bool:
    """The pick wins most resamples, half of the prompts pick it too, and more would not change it."""
    look = stability.outlook(settling)
    if look is None or prompts < stability.LEAST_PROMPTS:
        return False
    return look.settled and settling[-1].win_share >= stability.STABLE_SHARE


def _named(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def _part(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(f"{prefix}."): array for name, array in arrays.items() if name.startswith(f"{prefix}.")}
