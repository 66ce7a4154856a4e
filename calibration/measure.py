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
from typing import TYPE_CHECKING

import numpy as np

from elsi_edge.calibration import stability
from elsi_edge.calibration.analysis import Settling
from elsi_edge.calibration.checkpoint import Checkpoint
from elsi_edge.calibration.rendering import Rendered
from elsi_edge.calibration.settings import CalibrationSettings, Progress
from elsi_edge.calibration.stages import order_of, planned, stages_of
from elsi_edge.calibration.statistics import FloatArray
from elsi_edge.calibration.sums import Plan, Sums, evaluate, merged, named, part
from elsi_edge.errors import SelectionError
from elsi_edge.processes import Processes

if TYPE_CHECKING:
    from elsi_edge.calibration.capture import Opened, PromptStates

DIGITS = 6  # of entropies in results: beyond, thread counts differ
EARLY = 4  # part of the reservoir that the looks before the last rest on


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
    target: "Opened",
    rendered: Rendered,
    plan: Plan,
    settings: CalibrationSettings,
    progress: Progress,
    checkpoint: Checkpoint,
    group: Processes,
    stop: threading.Event,
) -> Measured:
    """Run the pass. Raises SelectionError naming the tap for states that cannot be measured, and KeyboardInterrupt
    before the first batch or after the one in which `stop` was set, with everything so far saved."""
    order = order_of(rendered, settings)
    stages = stages_of(order, settings)
    sums = Sums(plan, settings, len(order))
    settling: list[Settling] = []
    resumed = checkpoint.load() if group.count == 1 else None
    stage_done, batch_done = 0, 0
    if resumed is not None:
        arrays, meta = resumed
        sums.load(arrays)
        sums.reservoir.merge([part("reservoir", arrays)])
        settling = [Settling(**{**s, "entropy": tuple(s["entropy"])}) for s in meta["settling"]]
        stage_done, batch_done = meta["stage"], meta["batch"]
    total = sum(rendered.lengths)
    done = [i for stage in stages[:stage_done] for i in stage]
    latest: tuple[FloatArray, stability.Resampled] | None = None
    mine = [planned(stage, rendered, settings)[group.rank :: group.count] for stage in stages]
    skipped = [batch for stage in mine[:stage_done] for batch in stage] + mine[stage_done][:batch_done]
    left = [batch for stage in mine for batch in stage][len(skipped) :]
    seen = _begun(skipped, rendered, checkpoint, stop)
    captured = _captured(target, rendered, plan, left)  # once: finding the blocks runs the model
    with progress("calibrate", float(total), "tokens") as bar:
        bar.advance(float(seen))
        for number in range(stage_done, len(stages)):
            here = itertools.islice(captured, len(mine[number]) - batch_done)
            for index, batch in enumerate(here, start=batch_done + 1):
                sums.add(batch, rendered.first)
                seen += (tokens := sum(len(prompt.entropy) for prompt in batch))
                bar.advance(float(tokens * group.count))
                if stop.is_set() or checkpoint.due:
                    if group.count == 1:  # a process's share is no state that any run could go on from
                        meta = {"stage": number, "batch": index, "tokens": seen, "of": total}
                        _save(checkpoint, sums, settling, meta)
                    if stop.is_set():
                        raise KeyboardInterrupt
            batch_done = 0
            done += stages[number]
            whole = merged(sums, plan, settings, group, len(order))
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


def _begun(skipped: Sequence[Sequence[int]], rendered: Rendered, checkpoint: Checkpoint, stop: threading.Event) -> int:
    """Tokens of the batches that an interrupted run has left, said to the user; the last moment to stop for free."""
    if stop.is_set():
        raise KeyboardInterrupt
    seen = sum(len(rendered.ids[i]) for batch in skipped for i in batch)
    if skipped:
        checkpoint.say(f"note: going on after {seen:,} of {sum(rendered.lengths):,} tokens of an interrupted run")
    return seen


def _looked(sums: Sums, *, last: bool, sampled: int | None) -> tuple[FloatArray, stability.Resampled] | None:
    """`evaluate`; None where the first few prompts leave too little to measure, which more prompts may mend."""
    try:
        return evaluate(sums, sampled)
    except SelectionError:
        if last:
            raise
        return None


def _captured(
    target: "Opened", rendered: Rendered, plan: Plan, batches: Sequence[Sequence[int]]
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


def _save(checkpoint: Checkpoint, sums: Sums, settling: list[Settling], meta: dict[str, int]) -> None:
    from elsi_edge.artifacts import to_plain

    arrays = {**sums.state(), **named("reservoir", sums.reservoir.state())}
    checkpoint.save(arrays, {"settling": to_plain(settling), **meta})


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
