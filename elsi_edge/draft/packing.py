"""Conversations to packed batches: everything indexed by base position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsi_edge.draft.unroll import PackedBatch


@dataclass(frozen=True, kw_only=True)
class Part:
    """One conversation's share of a batch, indices still its own. P entries, n bases, K steps."""

    taps: Tensor  # [P, M*E], up to the last base
    next_tokens: NDArray[np.int64]  # [P]
    bases: NDArray[np.int64]  # [n]
    step_tokens: NDArray[np.int64]  # [K, n]
    step_targets: NDArray[np.int64]  # [K, n]

    @property
    def entries(self) -> int:
        """P."""
        return len(self.next_tokens)


def pack_part(tokens: NDArray[np.int64], mask: NDArray[np.bool_], taps: Tensor, steps: int) -> Part:
    """Index one conversation: p is a base when x_{p+2}, which step 0 predicts, is an answer token.

    `tokens` and `mask` (true for answer tokens, at least one beyond the second token) are [T], `taps` [T, M*E].
    Target records are counted over the answer tokens: record i is the distribution of the i-th of them.
    """
    bases = np.flatnonzero(mask[2:]).astype(np.int64)
    entries = int(bases[-1]) + 1
    record_of = np.where(mask, np.cumsum(mask) - 1, -1)  # shape: [T], the record that predicts a token
    padded_tokens = np.concatenate([tokens, np.zeros(steps, dtype=np.int64)])
    padded_records = np.concatenate([record_of, np.full(steps, -1, dtype=np.int64)])
    offsets = np.arange(steps)[:, None]
    return Part(
        taps=taps[:entries],
        next_tokens=tokens[1 : entries + 1],
        bases=bases,
        step_tokens=padded_tokens[bases + 1 + offsets],
        step_targets=padded_records[bases + 2 + offsets],
    )


def pack(
    parts: Sequence[Part],
    *,
    target_ids: Sequence[Tensor],
    target_log_probs: Sequence[Tensor],
    tokens: int,
    row_ids: tuple[str, ...],
    shards: tuple[str, ...],
) -> PackedBatch:
    """Lay conversations end to end. Per conversation `target_ids` int64 and `target_log_probs` are [records, k]."""
    entries = np.cumsum([0] + [part.entries for part in parts])
    bases = np.cumsum([0] + [len(part.bases) for part in parts])
    records = np.cumsum([0] + [len(ids) for ids in target_ids])
    base_index = [part.bases + first for part, first in zip(parts, entries, strict=False)]
    targets = [
        np.where(part.step_targets >= 0, part.step_targets + first, -1)
        for part, first in zip(parts, records, strict=False)
    ]
    return PackedBatch(
        taps=torch.cat([part.taps for part in parts]),
        next_tokens=torch.from_numpy(np.concatenate([part.next_tokens for part in parts])),
        positions=torch.cat([torch.arange(part.entries) for part in parts]),
        entry_bounds=tuple(map(int, entries)),
        bases=torch.from_numpy(np.concatenate(base_index)),
        base_bounds=tuple(map(int, bases)),
        step_tokens=torch.from_numpy(np.concatenate([part.step_tokens for part in parts], axis=1)),
        step_targets=torch.from_numpy(np.concatenate(targets, axis=1)),
        target_ids=torch.cat(list(target_ids)),
        target_log_probs=torch.cat(list(target_log_probs)),
        tokens=tokens,
        row_ids=row_ids,
        shards=shards,
    )
