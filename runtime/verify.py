"""Which drafted nodes the target agrees with. Pure numpy, no I/O.

Lossless at every temperature by construction: at each row the target's own next token is chosen first, exactly as plain
decoding would choose it, and the draft only decides whether a row for that token was computed already. For a sampled
token this is rejection of deterministic candidates without replacement (SpecInfer, arXiv 2305.09781, with
a proposal that puts all its mass on the drafted children): a child is followed with the target's probability of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verification yields."""

    rows: tuple[int, ...]  # accepted rows, the root's row 0 first; their keys and values stay in the cache
    tokens: tuple[int, ...]  # tokens to emit: the accepted drafts, then the bonus token

    @property
    def accepted(self) -> int:
        """Accepted drafts, the bonus token not counted."""
        return len(self.rows) - 1


def walk(tree: Tree, logits: NDArray[np.float32], choose: Callable[[NDArray[np.float32], int], int]) -> Verdict:
    """Follow the target's own choices down the tree.

    `logits` [N + 1, V] are the target's, one row per node and the root; `choose(row_logits, depth)` is the token that
    plain decoding takes after that row.
    """
    rows, tokens, edges = [0], [], tree.edges()
    while True:
        token = choose(logits[rows[-1]], len(rows) - 1)
        tokens.append(token)
        child = edges.get((rows[-1], token))
        if child is None:
            return Verdict(rows=tuple(rows), tokens=tuple(tokens))
        rows.append(child)
