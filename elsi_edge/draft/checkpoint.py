"""A draft directory: `draft.safetensors` (float16), `draft.json` (the DraftConfig), `README.md` (a card). No torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from elsi_edge.artifacts import DraftConfig
from elsi_edge.draft.card import render_card
from elsi_edge.draft.shapes import tensor_shapes as tensor_shapes
from elsi_edge.draft.vocab import ids_sha256
from elsi_edge.errors import DraftError, ElsiError
from elsi_edge.fsio import storage_errors, write_bytes, write_json, write_text

WEIGHTS = "draft.safetensors"
CONFIG = "draft.json"
CARD = "README.md"
IDS = "draft_to_target_ids"
_HALF_MAX = 65504.0  # largest float16


@dataclass(frozen=True, kw_only=True)
class LoadedDraft:
    """A checked draft."""

    config: DraftConfig
    tensors: dict[str, NDArray[np.float32]]  # by the names of `tensor_shapes`; values are exactly the stored float16
    draft_to_target_ids: NDArray[np.int64]  # [U], ascending, absolute target ids


def save_draft(
    directory: Path, config: DraftConfig, tensors: Mapping[str, NDArray[Any]], draft_to_target_ids: NDArray[np.int64]
) -> DraftConfig:
    """Write a draft directory, each file atomically; returns the config as stored. Raises DraftError, StorageError.

    The config's `training` gains `tensors_sha256`, so that files of two different saves are never taken for one draft.
    """
    _check_tensors(config, tensors, "the draft to save")
    stored: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all() or np.abs(tensor).max() > _HALF_MAX:
            raise DraftError(f"the draft's weight {name!r} has values that float16 cannot hold; it was not saved")
        stored[name] = np.ascontiguousarray(tensor, dtype=np.float16)
    ids = np.ascontiguousarray(draft_to_target_ids, dtype=np.int64)
    data = save({**stored, IDS: ids}, metadata={"format": "elsi-edge-draft"})
    training = {**config.training, "tensors_sha256": hashlib.sha256(data).hexdigest()}
    config = replace(config, training=training, draft_to_target_sha256=ids_sha256(ids))
    _check_ids(config, ids, "the draft to save")
    write_bytes(directory / WEIGHTS, data)
    write_json(directory / CONFIG, config.to_json())
    write_text(directory / CARD, render_card(config, len(data)))
    return config


def load_config(directory: Path) -> DraftConfig:
    """Read a draft's `draft.json` alone. Raises DraftError."""
    path = directory / CONFIG
    if not path.is_file():
        raise DraftError(f"{directory} holds no draft ({CONFIG} is missing); train one with: elsi-edge train MODEL")
    try:
        with storage_errors(path):
            value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or value.get("format") != "elsi-edge-draft":
            raise DraftError(f"{path} is not a draft's configuration; train the draft again")
        if value.get("format_version") != 1:
            raise DraftError(f"{path} has format version {value.get('format_version')!r}, this version reads 1")
        return DraftConfig.from_json(value, str(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DraftError(f"{path} is not JSON ({error}); cut short? Train or copy the draft again") from error
    except DraftError:
        raise
    except ElsiError as error:
        raise DraftError(str(error)) from error


def load_draft(directory: Path) -> LoadedDraft:
    """Read and check a draft directory: hash, names, shapes, finite weights, vocabulary. Raises DraftError."""
    config = load_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise DraftError(f"{directory} has {CONFIG} but no {WEIGHTS}; copy the whole draft again")
    with storage_errors(path):
        data = path.read_bytes()
    found, expected = hashlib.sha256(data).hexdigest(), config.training.get("tensors_sha256")
    if found != expected:
        raise DraftError(
            f"{path} ({len(data)} bytes) has sha256 {found[:12]}, {CONFIG} says {str(expected)[:12]}: "
            "cut short, altered, or of another draft; copy the whole draft again"
        )
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DraftError(f"{path} cannot be read ({error}); copy the whole draft again") from error
    ids = tensors.pop(IDS, None)
    if ids is None:
        raise DraftError(f"{path} lacks {IDS!r}, the map to the target's vocabulary; train the draft again")
    _check_ids(config, ids, str(path))
    _check_tensors(config, tensors, str(path))
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    broken = [name for name, tensor in wide.items() if not np.isfinite(tensor).all()]
    if broken:
        raise DraftError(f"{path}: the weight {broken[0]!r} is not finite; train the draft again")
    return LoadedDraft(config=config, tensors=wide, draft_to_target_ids=ids)


def _check_tensors(config: DraftConfig, tensors: Mapping[str, NDArray[Any]], source: str) -> None:
    shapes = tensor_shapes(config)
    for name in sorted(set(shapes) ^ set(tensors)):
        raise DraftError(f"{source}: the weight {name!r} is {'missing' if name in shapes else 'unknown'}")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise DraftError(
                f"{source}: {name!r} is {list(tensors[name].shape)}, the configuration says {list(shape)}; "
                "the two belong to different drafts"
            )


def _check_ids(config: DraftConfig, ids: NDArray[Any], source: str) -> None:
    if ids.dtype != np.int64 or ids.shape != (config.draft_vocab_size,):
        raise DraftError(
            f"{source}: {IDS!r} is {ids.dtype} {list(ids.shape)}, expected int64 [{config.draft_vocab_size}]"
        )
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.target_vocab_size:
        raise DraftError(
            f"{source}: {IDS!r} must ascend within 0..{config.target_vocab_size - 1}, the target's vocabulary"
        )
    if ids_sha256(ids) != config.draft_to_target_sha256:
        raise DraftError(f"{source}: {IDS!r} is not the map that {CONFIG} names; the two belong to different drafts")
    if not 0.0 <= config.vocab_coverage <= 1.0:
        raise DraftError(f"{source}: vocab_coverage is {config.vocab_coverage}, it must lie in 0..1")
