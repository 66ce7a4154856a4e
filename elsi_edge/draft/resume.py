"""Checkpoints of a training run: safetensors and JSON, one directory each, renamed into place whole. No pickle."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from elsi_edge.errors import DraftError
from elsi_edge.fsio import new_directory, sha256_file, storage_errors, sweep_directory, write_json

_PREFIX = "checkpoint-"
_FILES = ("weights.safetensors", "average.safetensors", "optimiser.safetensors", "best.safetensors")
_STATE = "state.json"
_META = (
    *("step", "epoch", "batch", "tokens", "seconds", "best", "stale", "evaluated", "skipped", "evaluation", "identity"),
    *("best_evaluation", "base_shards", "shards"),
)


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a run continues from. The data order follows from the seed, `epoch` and `batch`."""

    step: int  # optimiser steps done
    epoch: int
    batch: int  # batches of this epoch done
    tokens: int  # trained on, all epochs
    seconds: float  # wall clock used, all sittings
    best: float  # highest held-out agreement so far
    stale: int  # evaluations since
    evaluated: int  # step of the last evaluation, -1 before the first
    skipped: int  # batches without answer tokens
    evaluation: dict[str, Any]  # the last one
    identity: dict[str, Any]  # settings, shards, vocabulary: must be those of the run that continues
    weights: dict[str, Tensor]  # float32
    average: dict[str, Tensor]  # float32
    optimiser: dict[str, Tensor]
    best_weights: dict[str, Tensor]  # the average at the best evaluation; empty unless the run may stop early
    best_evaluation: dict[str, Any]
    base_shards: int  # that the vocabulary and the held-out rows were chosen from
    shards: int  # that this epoch's rows come from


def save_state(directory: Path, state: TrainState) -> None:
    """Write `checkpoint-<step>` whole, then remove older ones. Raises StorageError."""
    final = directory / f"{_PREFIX}{state.step:08d}"
    if final.exists():
        return
    with new_directory(final) as temporary:
        for name, tensors in zip(
            _FILES, (state.weights, state.average, state.optimiser, state.best_weights), strict=True
        ):
            # As bytes: safetensors' own file writer hides a full disk in an error of its own kind.
            (temporary / name).write_bytes(save({key: value.contiguous() for key, value in tensors.items()}))
        meta = {name: getattr(state, name) for name in _META}
        write_json(temporary / _STATE, {**meta, "sha256": {name: sha256_file(temporary / name) for name in _FILES}})
    for path in _checkpoints(directory)[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def load_state(directory: Path) -> TrainState | None:
    """The newest checkpoint, None when there is none. Raises DraftError in one line when it is cut short or altered."""
    sweep_directory(directory)
    found = _checkpoints(directory)
    if not found:
        return None
    path = found[-1]
    advice = "delete that directory to start over"
    try:
        with storage_errors(path):
            value = json.loads((path / _STATE).read_text(encoding="utf-8"))
            for name in _FILES:
                if sha256_file(path / name) != value["sha256"][name]:
                    raise DraftError(
                        f"{path / name} was cut short or altered: its sha256 is not the recorded one; {advice}"
                    )
            weights, average, optimiser, best_weights = (load_file(path / name) for name in _FILES)
        return TrainState(
            weights=weights,
            average=average,
            optimiser=optimiser,
            best_weights=best_weights,
            **{name: value[name] for name in _META},
        )
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DraftError(f"{path} is not a checkpoint that can be continued ({error}); {advice}") from error


def shards_used(directory: Path) -> tuple[int, int] | None:
    """`base_shards` and `shards` of the newest checkpoint; None when there is none (or none that can be read)."""
    found = _checkpoints(directory)
    if not found:
        return None
    try:
        value = json.loads((found[-1] / _STATE).read_text(encoding="utf-8"))
        return int(value["base_shards"]), int(value["shards"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # `load_state` says in one line what is wrong with it


def require_same_run(state: TrainState, identity: dict[str, Any], directory: Path) -> None:
    """Raise DraftError naming the first setting in which the checkpoint and this run differ."""
    for key in sorted(set(identity) | set(state.identity)):
        before, now = state.identity.get(key), identity.get(key)
        if before != now:
            raise DraftError(
                f"{directory} holds a run with {key} = {_short(before)}, this one has {_short(now)}; "
                "use the same, another --out, or --fresh to start over"
            )


def clear(directory: Path) -> None:
    """Delete every checkpoint of a run."""
    for path in _checkpoints(directory):
        shutil.rmtree(path)


@torch.no_grad()
def copy_weights(network: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Set every parameter of a network by name."""
    for name, weight in network.named_parameters():
        weight.copy_(weights[name])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:16]}…"


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(f"{_PREFIX}*") if path.is_dir())
