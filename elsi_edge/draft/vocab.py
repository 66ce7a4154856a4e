"""The draft's vocabulary: which target ids it can say.

Rule, in this order until U ids are found: (1) end tokens and tokens of the chat template, always; (2) tokens of the
target's own answers, most frequent first, ties by lower id; (3) tokens of the prompts in the same way; (4) the lowest
ids not yet in.
Stored as absolute target ids, ascending, int64.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DraftVocab:
    """The chosen ids and how much of the target's answers they say."""

    draft_to_target_ids: NDArray[np.int64]  # [U], ascending
    coverage: float  # share of answer tokens that are in
    answer_ids_seen: int  # distinct ids in the answers

    @property
    def size(self) -> int:
        """U."""
        return len(self.draft_to_target_ids)

    @property
    def sha256(self) -> str:
        """Of the ids as int64 little-endian."""
        return ids_sha256(self.draft_to_target_ids)


def choose_vocab(
    answer_counts: NDArray[np.int64], prompt_counts: NDArray[np.int64], required: Sequence[int], size: int
) -> DraftVocab:
    """Pick `size` ids (capped to V) by the module's rule; both counts are [V]. Raises DataError.

    V is the width of the target's *logits*: an id beyond it (an added token without a row) can never be drafted.
    """
    width = len(answer_counts)
    size = min(size, width)
    fixed = sorted({token for token in required if 0 <= token < width})
    if size < len(fixed):
        raise DataError(
            f"a draft vocabulary of {size} cannot hold the {len(fixed)} end and chat-template tokens; "
            "choose a larger --draft-vocab"
        )
    rest = np.ones(width, dtype=bool)
    rest[fixed] = False
    order = np.lexsort((np.arange(width), -prompt_counts, -answer_counts))  # last key first
    ranked = order[rest[order]][: size - len(fixed)]
    ids = np.sort(np.concatenate([np.array(fixed, dtype=np.int64), ranked.astype(np.int64)]))
    total = int(answer_counts.sum())
    return DraftVocab(
        draft_to_target_ids=ids,
        coverage=float(answer_counts[ids].sum() / total) if total else 0.0,
        answer_ids_seen=int((answer_counts > 0).sum()),
    )


def target_to_draft(draft_to_target_ids: NDArray[np.int64], target_vocab_size: int) -> NDArray[np.int64]:
    """The inverse map, [V]: position of a target id in the draft vocabulary, -1 where there is none."""
    inverse = np.full(target_vocab_size, -1, dtype=np.int64)
    inverse[draft_to_target_ids] = np.arange(len(draft_to_target_ids))
    return inverse


def ids_sha256(ids: NDArray[np.int64]) -> str:
    """Hex SHA-256 of ids as int64 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()
