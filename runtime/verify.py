"""Which drafted nodes the target agrees with. Pure, no I/O.

Lossless at every temperature by construction: at each row the target's own next token is chosen first, exactly as plain
decoding would choose it, and the draft only decides whether a row for that token was computed already. For a sampled
token this is rejection of deterministic candidates without replacement (SpecInfer, arXiv 2305.09781, with
a proposal that puts all its mass on the drafted children): a child is followed with the target's probability of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

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


def walk(tree: Tree, choose: Callable[[int, int], int]) -> Verdict:
    """Follow the target's own choices down the tree.

    `choose(row, depth)` is the token that plain decoding takes after that row of the verification, the root's being 0.
    """
    rows, tokens, edges = [0], [], tree.edges()
    while True:
        token = choose(rows[-1], len(rows) - 1)
        tokens.append(token)
        child = edges.get((rows[-1], token))
        if child is None:
            return Verdict(rows=tuple(rows), tokens=tuple(tokens))
        rows.append(child)
