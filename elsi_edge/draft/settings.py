"""Settings of distillation and of training."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from elsi_edge.artifacts import HeadKind, Precision, to_plain
from elsi_edge.errors import ConfigError

VocabRule = Literal["tokens", "argmax", "mass"]
OptimiserKind = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd"]
Arithmetic = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """How answers are made and recorded."""

    count: int | None = None  # prompts to take, in order; all when None
    max_tokens: int = 256  # of an answer
    temperatures: tuple[float, ...] = (0.0, 0.8)  # by turns over the prompts
    top_k: int = 50  # tokens sampled from at temperatures above 0
    seed: int = 0
    keep_top: int = 32  # entries of the target's distribution that are recorded
    shard_tokens: int = 20_000  # a shard is closed once it holds as many
    max_length: int = 2048  # tokens of prompt and answer; longer rows are left out
    keep_answers: bool = False  # take the answers that the prompts file holds instead of the target's own
    final_norm: bool = False  # record the state after the final norm beside the taps (EAGLE-2's rule needs it)
    batch: int = 32  # answers in the making at a time; 1 decodes one after another in the exact mode
    max_bytes: int | None = None  # of the shard directory; it stops before it is larger

    def __post_init__(self) -> None:
        for name in ("max_tokens", "keep_top", "shard_tokens", "max_length", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"distillation: {name} is {getattr(self, name)}, it must be at least 1")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"distillation: max_bytes is {self.max_bytes}, it must be at least 1")
        if self.count is not None and self.count < 1:
            raise ConfigError(f"distillation: count is {self.count}, it must be at least 1")
        if not self.temperatures or any(not 0 <= value < 100 for value in self.temperatures):
            raise ConfigError(f"distillation: temperatures {list(self.temperatures)} must be numbers of at least 0")

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues; `count` and the budgets may change."""
        plain: dict[str, Any] = to_plain(self)
        return {name: value for name, value in plain.items() if name not in ("count", "batch", "max_bytes")}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a draft is built and trained. The budget is `minutes`, `steps`, or whichever ends first."""

    # budget
    minutes: float | None = None  # wall clock over all sittings, evaluation included
    steps: int | None = None  # optimiser steps
    patience: int = 0  # evaluations without a better agreement after which it stops; 0 never

    # structure
    taps: tuple[int, ...] = ()  # a subset of the recorded taps; all when empty
    depth: int = 1  # blocks, 1 or 2
    width: int = 0  # of the draft's states; 0 as the target
    heads: int = 0  # query heads; 0 as the target
    kv_heads: int = 0  # 0 as the target, or as many as heads where those are fewer
    head_width: int = 0  # 0 as the target
    mlp_width: int = 0  # 0 as the target
    draft_vocab: int = 8192  # U, capped to the target's vocabulary
    vocab_by: VocabRule = "tokens"  # what ranks the vocabulary, see `vocab`
    head: HeadKind = "own"  # "tied" keeps the target's head rows as they are

    # objective
    unroll: int = 3  # steps of training-time test, 1..8
    unroll_start: int = 1  # steps at the start; 0 as many as `unroll`
    unroll_ramp: float = 0.25  # share of the budget over which the steps grow from `unroll_start` to `unroll`
    step_decay: float = 0.8  # weight of unrolled step j is step_decay ** j
    step_weights: tuple[float, ...] = ()  # one per unrolled step, instead of step_decay
    qat: Precision = "fp32"  # what matrices are rounded to in the loss and in evaluations; "fp32" leaves them

    # optimiser
    optimiser: OptimiserKind = "adamw"
    lr: float = 2e-3  # peak
    schedule: Schedule = "wsd"
    decay: float = 0.2  # last share of the budget, in which "wsd" falls
    floor: float = 0.05  # last learning rate, share of the peak
    warmup: float = 0.05  # share of the budget
    weight_decay: float = 0.01  # matrices only
    clip: float = 1.0  # norm of the whole gradient
    batch_tokens: int = 2048  # tokens per optimiser step, over all processes
    accumulate: int = 1  # pieces that a step's batch is computed in, to save memory
    max_length: int = 2048  # tokens per conversation; longer ones are cut
    ema: float = 0.999  # of the weights that are evaluated and saved
    warm_start: bool = True  # from the target's last blocks
    seed: int = 0

    # data that is still being written
    follow: bool = False  # at an epoch's end, rows of shards written since join in

    # machine and reporting
    arithmetic: Arithmetic = "bf16"  # of the matrices; master weights and optimiser are float32
    device: str = "auto"  # torch's name; "auto" is a GPU where there is one
    threads: int = 0  # 0: as torch finds them
    evaluate_every: int = 100  # steps
    evaluate_tokens: int = 20_000  # held-out tokens at most
    replay_tokens: int = 2_000  # held-out greedy answer tokens replayed at an evaluation; 0 never
    log_every: int = 10  # steps
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise ConfigError("training needs a budget: --minutes or --steps")
        for name in ("minutes", "steps", "lr", "clip", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"training: {name} is {value}, it must be above 0 and finite")
        for name in ("draft_vocab", "batch_tokens", "accumulate", "evaluate_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training: {name} is {getattr(self, name)}, it must be at least 1")
        for name in ("step_decay", "floor", "warmup", "decay", "unroll_ramp", "ema", "weight_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"training: {name} is {getattr(self, name)}, it must lie in 0..1")
        for name in ("patience", "width", "heads", "kv_heads", "head_width", "mlp_width", "replay_tokens", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"training: {name} is {getattr(self, name)}, it cannot be negative")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"training: {name} is {getattr(self, name)!r}, it must be {' or '.join(allowed)}")
        self._check_steps()

    def _check_steps(self) -> None:
        if not 1 <= self.unroll <= 8:
            raise ConfigError(f"training: unroll is {self.unroll}, it must lie in 1..8")
        if not 0 <= self.unroll_start <= self.unroll:
            raise ConfigError(f"training: unroll_start is {self.unroll_start}, it must lie in 1..{self.unroll}")
        if self.depth not in (1, 2):
            raise ConfigError(f"training: depth is {self.depth}, it must be 1 or 2")
        if self.max_length < 3:
            raise ConfigError(f"training: max_length is {self.max_length}, it must be at least 3 tokens")
        weights = self.step_weights
        if weights and (len(weights) != self.unroll or min(weights) < 0 or not 0 < sum(weights) < math.inf):
            raise ConfigError(
                f"training: step_weights {list(weights)} must be {self.unroll} numbers of at least 0, one per unrolled "
                "step, not all 0"
            )

    def unrolled(self, progress: float) -> int:
        """Unrolled steps when a share `progress` of the budget is used."""
        start = self.unroll_start or self.unroll
        if progress >= self.unroll_ramp:
            return self.unroll
        return start + int((self.unroll - start + 1) * progress / self.unroll_ramp)

    def weights(self, steps: int) -> list[float]:
        """Weights of the first `steps` unrolled steps, summing to 1 (all of the first step's kind if those are 0)."""
        raw = list(self.step_weights[:steps]) or [self.step_decay**step for step in range(steps)]
        total = sum(raw)
        return [weight / total for weight in raw] if total > 0 else [1.0 / steps] * steps

    def identity(self) -> dict[str, object]:
        """What a resumed run must share with the one it continues; budget, machine and reporting are free."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in _FREE
        }


_CHOICES = {
    "vocab_by": get_args(VocabRule),
    "head": get_args(HeadKind),
    "optimiser": get_args(OptimiserKind),
    "schedule": get_args(Schedule),
    "arithmetic": get_args(Arithmetic),
    "qat": get_args(Precision),
}
_FREE = frozenset(
    {
        "minutes",
        "steps",
        "patience",
        "follow",
        "device",
        "threads",
        "evaluate_every",
        "evaluate_tokens",
        "replay_tokens",
    }
    | {"log_every", "checkpoint_minutes"}
)
