"""Distilled data on disk: safetensors shards and one `manifest.json` that alone says which of them count.

A shard holds whole conversations laid end to end (T tokens, A answer tokens, R rows, k top entries):

    token_ids       int32   [T]
    answer_mask     uint8   [T]     1 where the token was written by the target
    row_offsets     int64   [R+1]   row r owns tokens row_offsets[r] : row_offsets[r + 1]
    answer_offsets  int64   [R+1]   row r owns records answer_offsets[r] : answer_offsets[r + 1]
    states.<name>   float16 [T, E]  residual stream at a tap, or "final-norm" for the state after the final norm,
                                    divided by its scale
    state_scales    float32 [M]     powers of two, 1 unless a state would overflow float16; order of `state_names`
    top_ids         int32   [A, k]  per answer token: the ids that the target found likeliest there, best first
    top_log_probs   float16 [A, k]  their natural log-probabilities (logit minus log_sum_exp)
    log_sum_exp     float32 [A]     of the whole row of logits

A shard is written whole and then listed in the manifest, which is replaced atomically: after kill -9 a shard that the
manifest does not list is as good as absent, so no row is lost, doubled or torn.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from elsi_edge.artifacts import FINAL_NORM, LayerSelection, ModelShape, from_plain, to_plain
from elsi_edge.errors import ConfigError, DataError
from elsi_edge.fsio import sha256_file, storage_errors, sweep_directory, write_bytes, write_json

MANIFEST = "manifest.json"
ANSWERS = "answers.jsonl"
_HALF_MAX = 65504.0  # largest float16
_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DistilledRow:
    """One conversation with what the target said about it."""

    key: str  # prompt id and temperature, unique within a shard set
    token_ids: NDArray[np.int32]  # [T]
    answer_mask: NDArray[np.bool_]  # [T]
    states: NDArray[np.float32]  # [M, T, E]
    top_ids: NDArray[np.int32]  # [A, k]
    top_log_probs: NDArray[np.float32]  # [A, k]
    log_sum_exp: NDArray[np.float32]  # [A]


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard as the manifest lists it."""

    file: str
    sha256: str
    bytes: int
    rows: tuple[str, ...]  # keys, in the shard's order
    tokens: int
    answer_tokens: int


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """What a shard directory holds and what it was made from."""

    model: str  # the reference as the user gave it
    shape: ModelShape
    selection: LayerSelection
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    prompts_sha256: str
    required_ids: tuple[int, ...]  # end tokens and tokens of the chat template, ascending
    settings: Mapping[str, Any]  # of the distillation
    counts: Mapping[str, int] = field(default_factory=dict)  # rows cut and dropped, by reason
    dropped: Mapping[str, str] = field(default_factory=dict)  # key of a row that was left out -> reason
    shards: tuple[ShardEntry, ...] = ()
    final_norm: bool = False  # the state after the final norm is recorded beside the selection's taps
    format_version: int = _FORMAT_VERSION

    @property
    def read_taps(self) -> tuple[int, ...]:
        """What is recorded, as a `TargetRunner` is asked for it: taps, and FINAL_NORM."""
        if self.selection.state == "final-norm":
            return (FINAL_NORM,)
        return (*self.selection.taps, FINAL_NORM) if self.final_norm else self.selection.taps

    def describe_states(self) -> str:
        """What is recorded, in words."""
        return self.selection.describe() + (" and the state after the final norm" if self.final_norm else "")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The same as a shard's tensors are called."""
        return tuple(map(state_name, self.read_taps))

    @property
    def rows(self) -> int:
        """Conversations in all shards."""
        return sum(len(shard.rows) for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(shard.answer_tokens for shard in self.shards)

    def save(self, directory: Path) -> None:
        """Replace the directory's manifest atomically."""
        value = {"format": "elsi-edge-shards", **to_plain(self), "selection": self.selection.to_json()}
        write_json(directory / MANIFEST, value)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a directory's manifest. Raises DataError when it is missing or not one."""
        path = directory / MANIFEST
        if not path.is_file():
            raise DataError(
                f"{directory} holds no shards ({MANIFEST} is missing); make them with: elsi-edge distill MODEL"
            )
        try:
            with storage_errors(path):
                value = json.loads(path.read_text(encoding="utf-8"))
            if value.get("format") != "elsi-edge-shards" or value.get("format_version") != _FORMAT_VERSION:
                raise DataError(
                    f"{path}: format {value.get('format')!r} version {value.get('format_version')!r}, "
                    f"expected 'elsi-edge-shards' version {_FORMAT_VERSION}; distill again into another directory"
                )
            value["shape"] = from_plain(ModelShape, value["shape"], f"{path}: shape")
            value["selection"] = LayerSelection.from_json(value["selection"], f"{path}: selection")
            value["shards"] = [from_plain(ShardEntry, shard, f"{path}: shards") for shard in value["shards"]]
            return from_plain(cls, value, str(path), ignore=("format",))
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not a shard manifest ({error}); distill again into another directory"
            ) from error


def state_name(tap: int) -> str:
    """What a tap's states are called in a shard."""
    return "final-norm" if tap == FINAL_NORM else str(tap)


def write_shard(directory: Path, file: str, rows: Sequence[DistilledRow], names: Sequence[str]) -> ShardEntry:
    """Write one shard whole and describe it. Raises DataError for a row whose states are not finite, StorageError."""
    states = np.concatenate([row.states for row in rows], axis=1)  # shape: [M, T, E] float32
    scales = np.array([_scale(states[m], rows, name) for m, name in enumerate(names)], dtype=np.float32)
    tensors: dict[str, NDArray[Any]] = {
        "token_ids": np.concatenate([row.token_ids for row in rows]),
        "answer_mask": np.concatenate([row.answer_mask for row in rows]).astype(np.uint8),
        "row_offsets": _offsets([len(row.token_ids) for row in rows]),
        "answer_offsets": _offsets([len(row.log_sum_exp) for row in rows]),
        "state_scales": scales,
        "top_ids": np.concatenate([row.top_ids for row in rows]),
        "top_log_probs": np.concatenate([row.top_log_probs for row in rows]).astype(np.float16),
        "log_sum_exp": np.concatenate([row.log_sum_exp for row in rows]),
    }
    for m, name in enumerate(names):
        tensors[f"states.{name}"] = np.ascontiguousarray((states[m] / scales[m]).astype(np.float16))
    data = save(tensors)
    write_bytes(directory / file, data)
    return ShardEntry(
        file=file,
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        rows=tuple(row.key for row in rows),
        tokens=int(tensors["row_offsets"][-1]),
        answer_tokens=int(tensors["answer_offsets"][-1]),
    )


def verify_shards(directory: Path, manifest: ShardManifest) -> None:
    """Compare every shard with the manifest. Raises DataError naming the first that is missing or altered."""
    for shard in manifest.shards:
        path = directory / shard.file
        if not path.is_file():
            raise DataError(f"{path} is listed in {MANIFEST} but missing; distill again into another directory")
        if path.stat().st_size != shard.bytes:
            raise DataError(
                f"{path} has {path.stat().st_size} bytes, the manifest says {shard.bytes}: cut short or altered; "
                "distill again into another directory"
            )
        if sha256_file(path) != shard.sha256:
            raise DataError(
                f"{path} was altered: its sha256 is not the manifest's; distill again into another directory"
            )


def row_bytes(row: DistilledRow) -> int:
    """Bytes that a row takes in a shard and in the two lists beside it, from above."""
    taps, tokens, width = row.states.shape
    answers, kept = row.top_ids.shape
    size: int = tokens * (taps * width * 2 + 5) + answers * (kept * 6 + 4 + 8) + 16 + 3 * len(row.key) + 256
    return size


def require_made_for(
    directory: Path,
    manifest: ShardManifest,
    *,
    target_fingerprint: str = "",
    tokenizer_sha256: str = "",
    template_sha256: str = "",
) -> None:
    """Raise DataError naming what differs when shards were made for other weights, tokens or template; "" passes."""
    asked = {
        "target fingerprint": (manifest.target_fingerprint, target_fingerprint),
        "tokenizer": (manifest.tokenizer_sha256, tokenizer_sha256),
        "chat template": (manifest.template_sha256, template_sha256),
    }
    for what, (has, wants) in asked.items():
        if wants and has != wants:
            raise DataError(
                f"{directory} was made with the {what} {has[:12]}, the model given has {wants[:12]}; "
                "give the same model, or distill again into another directory"
            )


def remove_unlisted(directory: Path, manifest: ShardManifest) -> None:
    """Delete shards that an interrupted run wrote but never listed."""
    listed = {shard.file for shard in manifest.shards}
    for path in directory.glob("shard-*.safetensors"):
        if path.name not in listed:
            path.unlink()
    sweep_directory(directory)


def _scale(states: NDArray[np.float32], rows: Sequence[DistilledRow], name: str) -> float:
    """The smallest power of two, at least 1, that brings every state of a shard into float16's range."""
    largest = float(np.abs(states).max())
    if not np.isfinite(largest):
        bad = next(row.key for row in rows if not np.isfinite(row.states).all())
        raise DataError(f"the target's states at tap {name} are not finite for row {bad!r}; leave that row out")
    return 1.0 if largest <= _HALF_MAX else 2.0 ** int(np.ceil(np.log2(largest / _HALF_MAX)))


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
