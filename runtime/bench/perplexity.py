"""Perplexity of a bundle as it runs, and of other runtimes beside it, on the same windows of token ids.

Perplexity is exp of the mean negative log-likelihood of tokens 2..n of every window (Jelinek et al. 1977): the first
token of a window is not predicted, and nothing before the window is seen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import PromptRow
from elsi_edge.errors import UsageError
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import Target
from elsi_edge.runtime.tree import Tree

WINDOW = 256  # tokens of a text at most
_ROWS = 32  # of one call: bounds the logits, which are rows times vocabulary


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a runtime makes of tokens 2..n of windows, all windows after one another."""

    losses: NDArray[np.float64]  # [T] negative log-likelihood, nats
    likeliest: NDArray[np.int64]  # [T] the token that it would have taken


def windows_of(rows: Sequence[PromptRow], session: Session, *, window: int = WINDOW) -> list[list[int]]:
    """The turns' own text, raw, each cut to one window. Raises UsageError when none has two tokens."""
    limit = min(window, session.context)
    texts = [session.codec.encode_raw(turn)[:limit] for row in rows for turn in row.turns]
    windows = [ids for ids in texts if len(ids) > 1]
    if not windows:
        raise UsageError(f"--perplexity needs a prompt of 2 tokens or more, the {len(texts)} given have fewer")
    return windows


def target_scores(
    target: Target, windows: Sequence[Sequence[int]], *, rows: int = _ROWS, advance: Callable[[], None] = lambda: None
) -> Scores:
    """Through verifications of at most `rows` rows, as tokens of an answer are judged. Empties the cache."""
    parts = []
    for ids in windows:
        target.keep(0)
        for start in range(0, len(ids) - 1, rows):
            block = ids[start : min(start + rows, len(ids) - 1)]
            logits = target.verify(block[0], Tree.chain(block[1:])).logits
            parts.append(scores_of(logits, ids[start + 1 : start + 1 + len(block)]))
            target.commit(range(len(block)))
        advance()
    target.keep(0)
    return joined(parts)


def scores_of(logits: NDArray[np.floating[Any]], next_ids: Sequence[int]) -> Scores:
    """Of logits [R, V], each row's next token given. Raises ValueError for a token that the vocabulary lacks."""
    if max(next_ids) >= logits.shape[-1]:
        raise ValueError(f"token {max(next_ids)} is beyond its vocabulary of {logits.shape[-1]}: another tokenizer?")
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1)  # shape: [R]
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    chosen = wide[np.arange(len(next_ids)), next_ids]
    return Scores(losses=total - chosen, likeliest=logits.argmax(axis=-1).astype(np.int64))


def joined(parts: Sequence[Scores]) -> Scores:
    """Parts after one another."""
    return Scores(
        losses=np.concatenate([part.losses for part in parts]),
        likeliest=np.concatenate([part.likeliest for part in parts]),
    )


def perplexity_of(scores: Scores) -> float:
    """exp of the mean loss."""
    return math.exp(float(scores.losses.mean()))


def agreement(scores: Scores, reference: Scores) -> float:
    """Share of places where both find the same token the likeliest, 0..1."""
    return float((scores.likeliest == reference.likeliest).mean())
