"""The draft's vocabulary: which target ids it can say.

Rule, in this order until U ids are found: (1) end tokens and tokens of the chat template, always; (2) by the weight
that the target gave them, highest first, ties by lower id, the weight being how often a token occurs in its answers
("tokens"), is its likeliest next token ("argmax"), or the sum of its probabilities among the recorded top-k ("mass");
(3) tokens of the prompts, most frequent first; (4) the lowest ids not yet in.
Stored as absolute target ids, ascending, int64.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import DataError

if TYPE_CHECKING:
    from elsi_edge.draft.shards import ShardManifest


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
    answer_counts: NDArray[np.int64],
    prompt_counts: NDArray[np.int64],
    required: Sequence[int],
    size: int,
    *,
    weight: NDArray[np.float64] | None = None,
) -> DraftVocab:
    """Pick `size` ids (capped to V) by the module's rule; counts and `weight` are [V], the counts when it is None.

    Raises DataError.

    V is the width of the target's *logits*: an id beyond it (an added token without a row) can never be drafted.
    """
    width = len(answer_counts)
    size = min(size, width)
    fixed = sorted({token for token in required if 0 <= token < width})
    if size < len(fixed):
        raise DataError(
            f"a draft vocabulary of {size} cannot hold the {len(fixed)} end and chat-template tokens; "
            "choose a larger --vocab-size"
        )
    rest = np.ones(width, dtype=bool)
    rest[fixed] = False
    ranking = answer_counts if weight is None else weight
    order = np.lexsort((np.arange(width), -prompt_counts, -ranking))  # last key first
    ranked = order[rest[order]][: size - len(fixed)]
    ids = np.sort(np.concatenate([np.array(fixed, dtype=np.int64), ranked.astype(np.int64)]))
    total = int(answer_counts.sum())
    return DraftVocab(
        draft_to_target_ids=ids,
        coverage=float(answer_counts[ids].sum() / total) if total else 0.0,
        answer_ids_seen=int((answer_counts > 0).sum()),
    )


def target_weights(directory: Path, manifest: "ShardManifest") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Over all answer tokens, [V] each: how often an id is the target's likeliest, and the sum of its probabilities."""
    from safetensors import safe_open

    width = manifest.shape.vocab_size
    argmax, mass = np.zeros(width), np.zeros(width)
    for shard in manifest.shards:
        with safe_open(str(directory / shard.file), framework="np") as handle:
            ids, log_probs = handle.get_tensor("top_ids"), handle.get_tensor("top_log_probs")
        argmax += np.bincount(ids[:, 0], minlength=width)
        mass += np.bincount(ids.ravel(), weights=np.exp(log_probs.astype(np.float64)).ravel(), minlength=width)
    return argmax, mass


def target_to_draft(draft_to_target_ids: NDArray[np.int64], target_vocab_size: int) -> NDArray[np.int64]:
    """The inverse map, [V]: position of a target id in the draft vocabulary, -1 where there is none."""
    inverse = np.full(target_vocab_size, -1, dtype=np.int64)
    inverse[draft_to_target_ids] = np.arange(len(draft_to_target_ids))
    return inverse


def ids_sha256(ids: NDArray[np.int64]) -> str:
    """Hex SHA-256 of ids as int64 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()
