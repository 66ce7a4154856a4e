"""Shards as training sees them: rows picked by key, packed into batches, nothing but the rows asked for in memory."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from elsi_edge.artifacts import FINAL_NORM, LayerSelection
from elsi_edge.draft.packing import pack, pack_part
from elsi_edge.draft.shards import ShardManifest, state_name, verify_shards
from elsi_edge.draft.unroll import PackedBatch
from elsi_edge.errors import DataError, SelectionError

_HELD_OUT_SHARE = 0.02
_HELD_OUT_LEAST = 8  # rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where a conversation lies, cut to the length limit."""

    key: str
    shard: int  # index in the manifest
    start: int  # first token in the shard
    length: int  # tokens
    record: int  # first target record in the shard
    records: int  # target records within the length
    bases: int  # positions with a loss at step 0


class ShardSet:
    """Read access to a shard directory. Raises DataError for altered files or when no row has answer tokens left."""

    def __init__(
        self, directory: Path, *, taps: Sequence[int] = (), max_length: int, shards: int | None = None
    ) -> None:
        """`taps` are those to read, all that the selection names when empty; rows are cut to `max_length` tokens.

        FINAL_NORM in `taps`, alone, is the state after the final norm. `shards`: read the first so many only. Raises
        SelectionError for what is not recorded.
        """
        self.directory, self._max_length = directory, max_length
        self.manifest = _first(ShardManifest.load(directory), shards)
        self.selection = _select(self.manifest, tuple(taps), directory)  # of what is read
        self.taps = self.selection.taps
        self._names = ("final-norm",) if self.selection.state == "final-norm" else tuple(map(state_name, self.taps))
        verify_shards(directory, self.manifest)
        self._files: list[Any] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._masks: list[NDArray[np.bool_]] = []
        self._scales: list[tuple[float, ...]] = []
        self.rows: list[Row] = []
        self.dropped = 0  # rows without answer tokens within the limit
        for index in range(len(self.manifest.shards)):
            self._open(index)
        if not self.rows:
            raise DataError(
                f"{directory}: no row has answer tokens within {max_length} tokens ({self.dropped} rows dropped); "
                "raise the length limit, or distill shorter prompts"
            )

    def grow(self, shards: int | None = None) -> list[Row]:
        """Take in shards that were written since, up to `shards` in all; their rows. Raises DataError."""
        manifest = _first(ShardManifest.load(self.directory), shards)
        had = self.manifest.shards
        if manifest.shards[: len(had)] != had:
            raise DataError(f"{self.directory} was made anew while it was read; start the training over with --fresh")
        verify_shards(self.directory, replace(manifest, shards=manifest.shards[len(had) :]))
        self.manifest = manifest
        rows = len(self.rows)
        for index in range(len(had), len(manifest.shards)):
            self._open(index)
        return self.rows[rows:]

    def _open(self, index: int) -> None:
        shard = self.manifest.shards[index]
        handle: Any = safe_open(str(self.directory / shard.file), framework="pt")
        read = {name: handle.get_tensor(name).numpy() for name in ("row_offsets", "answer_offsets", "state_scales")}
        mask = handle.get_tensor("answer_mask").numpy().astype(bool)
        order = self.manifest.state_names
        self._files.append(handle)
        self._tokens.append(handle.get_tensor("token_ids").numpy().astype(np.int64))
        self._masks.append(mask)
        self._scales.append(tuple(float(read["state_scales"][order.index(name)]) for name in self._names))
        for key, start, stop, record in zip(
            shard.rows, read["row_offsets"], read["row_offsets"][1:], read["answer_offsets"], strict=False
        ):
            length = min(int(stop - start), self._max_length)
            own = mask[start : start + length]
            bases = int(own[2:].sum())
            if bases == 0:
                self.dropped += 1
                continue
            row = Row(
                key=key,
                shard=index,
                start=int(start),
                length=length,
                record=int(record),
                records=int(own.sum()),
                bases=bases,
            )
            self.rows.append(row)

    def split(self) -> tuple[list[Row], list[Row]]:
        """Training and held-out rows: the rows whose keys hash lowest are held out, 2 %, at least 8, at most half."""
        if len(self.rows) < 2:
            raise DataError(
                f"{self.directory} has {len(self.rows)} usable row; training needs at least 2, one held out"
            )
        held = min(max(_HELD_OUT_LEAST, round(_HELD_OUT_SHARE * len(self.rows))), len(self.rows) // 2)
        ranked = sorted(self.rows, key=lambda row: hashlib.sha256(row.key.encode()).digest())
        chosen = {row.key for row in ranked[:held]}
        return [r for r in self.rows if r.key not in chosen], [r for r in self.rows if r.key in chosen]

    def token_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How often each target id occurs in answers and in prompts, [V] each."""
        width = self.manifest.shape.vocab_size
        answers = np.zeros(width, dtype=np.int64)
        prompts = np.zeros(width, dtype=np.int64)
        for tokens, mask in zip(self._tokens, self._masks, strict=True):
            answers += np.bincount(tokens[mask & (tokens < width)], minlength=width)
            prompts += np.bincount(tokens[~mask & (tokens < width)], minlength=width)
        return answers, prompts

    def answer(self, row: Row) -> tuple[int, ...]:
        """The tokens that the target answered with, of all turns."""
        span = slice(row.start, row.start + row.length)
        return tuple(self._tokens[row.shard][span][self._masks[row.shard][span]].tolist())

    def batch(self, rows: Sequence[Row], steps: int) -> PackedBatch:
        """Pack rows for `steps` unrolled steps."""
        parts = []
        for row in rows:
            span = slice(row.start, row.start + row.length)
            parts.append(pack_part(self._tokens[row.shard][span], self._masks[row.shard][span], self._taps(row), steps))
        return pack(
            parts,
            target_ids=[self._records(row, "top_ids").long() for row in rows],
            target_log_probs=[self._records(row, "top_log_probs").float() for row in rows],
            tokens=sum(row.length for row in rows),
            row_ids=tuple(row.key for row in rows),
            shards=tuple(sorted({self.manifest.shards[row.shard].file for row in rows})),
        )

    def _taps(self, row: Row) -> Tensor:
        """States at the taps side by side, [T, M*E]; float16 unless a scale has to be undone."""
        handle, stop = self._files[row.shard], row.start + row.length
        states = []
        for name, scale in zip(self._names, self._scales[row.shard], strict=True):
            part: Tensor = handle.get_slice(f"states.{name}")[row.start : stop]
            states.append(part if scale == 1.0 else part.float() * scale)
        return torch.cat(states, dim=-1)

    def _records(self, row: Row, name: str) -> Tensor:
        records: Tensor = self._files[row.shard].get_slice(name)[row.record : row.record + row.records]
        return records


def _first(manifest: ShardManifest, shards: int | None) -> ShardManifest:
    return manifest if shards is None else replace(manifest, shards=manifest.shards[:shards])


def _select(manifest: ShardManifest, taps: tuple[int, ...], directory: Path) -> LayerSelection:
    """The recorded selection, or the explicit one of some of its states. Raises SelectionError."""
    recorded = manifest.selection
    if not taps or taps == manifest.read_taps:
        return recorded
    if recorded.state == "final-norm" and taps == recorded.taps:  # how such a selection names its own tap
        return recorded
    absent = [tap for tap in taps if tap not in manifest.read_taps]
    if absent:
        wanted = "the state after the final norm" if absent[0] == FINAL_NORM else f"tap {absent[0]}"
        raise SelectionError(
            f"{directory} holds {manifest.describe_states()}, not {wanted}; "
            "train on those, or distill again with --taps"
        )
    if FINAL_NORM in taps and len(taps) > 1:
        raise SelectionError("the state after the final norm is trained on alone; leave out the other taps")
    if taps == (FINAL_NORM,):
        return replace(recorded, taps=(recorded.blocks,), state="final-norm", method="explicit", joint_entropy=None)
    return replace(recorded, taps=taps, method="explicit", joint_entropy=None)


def epoch_batches(rows: Sequence[Row], *, budget: int, seed: int, epoch: int) -> list[list[Row]]:
    """One epoch's batches: rows shuffled by (seed, epoch), filled to `budget` tokens; a longer row is a batch."""
    order = np.random.default_rng((seed, epoch)).permutation(len(rows))
    batches: list[list[Row]] = []
    room = 0
    for index in order:
        row = rows[index]
        if not batches or row.length > room:
            batches.append([])
            room = budget
        batches[-1].append(row)
        room -= row.length
    return batches
