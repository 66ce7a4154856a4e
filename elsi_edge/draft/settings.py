"""Settings of distillation and of training."""

from dataclasses import dataclass
from typing import Any, Literal

from elsi_edge.artifacts import to_plain
from elsi_edge.errors import ConfigError


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

    def __post_init__(self) -> None:
        for name in ("max_tokens", "keep_top", "shard_tokens", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"distillation: {name} is {getattr(self, name)}, it must be at least 1")
        if self.count is not None and self.count < 1:
            raise ConfigError(f"distillation: count is {self.count}, it must be at least 1")
        if not self.temperatures or any(not 0 <= value < 100 for value in self.temperatures):
            raise ConfigError(f"distillation: temperatures {list(self.temperatures)} must be numbers of at least 0")

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues; `count` may grow."""
        plain: dict[str, Any] = to_plain(self)
        return {name: value for name, value in plain.items() if name != "count"}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a draft is trained. The budget is `minutes`, `steps`, or whichever ends first."""

    minutes: float | None = None  # wall clock over all sittings, evaluation included
    steps: int | None = None  # optimiser steps
    draft_vocab: int = 8192  # U, capped to the target's vocabulary
    unroll: int = 3  # steps of training-time test, 1..8
    step_decay: float = 0.8  # weight of unrolled step j is step_decay ** j
    lr: float = 1e-3  # peak
    floor: float = 0.05  # last learning rate, share of the peak
    warmup: float = 0.05  # share of the budget
    weight_decay: float = 0.01  # matrices only
    clip: float = 1.0  # norm of the whole gradient
    batch_tokens: int = 2048  # tokens per optimiser step
    max_length: int = 2048  # tokens per conversation; longer ones are cut
    ema: float = 0.999  # of the weights that are evaluated and saved
    train_head: bool = True  # false keeps the target's head rows as they are
    warm_start: bool = True  # from the target's last block
    taps: tuple[int, ...] = ()  # a subset of the recorded taps; all when empty
    arithmetic: Literal["bf16", "fp32"] = "bf16"  # of the matrices; master weights and optimiser are float32
    seed: int = 0
    threads: int = 0  # 0: as torch finds them
    evaluate_every: int = 100  # steps
    evaluate_tokens: int = 20_000  # held-out tokens at most
    log_every: int = 10  # steps
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise ConfigError("training needs a budget: --minutes or --steps")
        for name in ("minutes", "steps", "lr", "clip", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"training: {name} is {value}, it must be above 0")
        for name in ("draft_vocab", "batch_tokens", "evaluate_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training: {name} is {getattr(self, name)}, it must be at least 1")
        for name in ("step_decay", "floor", "warmup", "ema", "weight_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"training: {name} is {getattr(self, name)}, it must lie in 0..1")
        if not 1 <= self.unroll <= 8:
            raise ConfigError(f"training: unroll is {self.unroll}, it must lie in 1..8")
        if self.max_length < 3:
            raise ConfigError(f"training: max_length is {self.max_length}, it must be at least 3 tokens")

    def identity(self) -> dict[str, object]:
        """What a resumed run must share with the one it continues; budget, reporting and threads are free."""
        free = {"minutes", "steps", "threads", "evaluate_every", "evaluate_tokens", "log_every", "checkpoint_minutes"}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in free
        }
