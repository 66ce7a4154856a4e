"""Drafted candidates as a tree, and the mask under which the target sees them. Pure, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

Source = Literal["draft", "ngram", "both"]  # who proposed a node; both when they said the same

ROOT = -1  # parent of a first-level node: the last emitted token, which is row 0 of a verification


@dataclass(frozen=True, kw_only=True)
class Tree:
    """N drafted nodes below the root; parents come before children.

    A verification has N + 1 rows: row 0 is the root (the last emitted token), row i + 1 is node i.
    """

    # Plain numbers: after a step has emptied the caches, every call of numpy takes ten microseconds.
    tokens: tuple[int, ...]  # [N] target token ids
    parents: tuple[int, ...]  # [N] index of the parent node, ROOT for the first level
    sources: tuple[Source, ...] = ()  # [N], or empty when all are the draft's

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.parents)} parents must be equal in number")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a node's parent must come before it")
        if self.sources and len(self.sources) != self.size:
            raise ValueError(f"{len(self.sources)} sources for {self.size} nodes")

    @classmethod
    def empty(cls) -> Self:
        """No candidates: a verification of the root alone, which is plain decoding."""
        return cls(tokens=(), parents=())

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Self:
        """Each node the child of the one before it."""
        return cls(tokens=tuple(tokens), parents=tuple(range(ROOT, len(tokens) - 1)))

    @property
    def size(self) -> int:
        """N, the number of drafted nodes."""
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node is the child of the one before it."""
        return _is_chain(self.parents)

    def depths(self) -> NDArray[np.int64]:
        """[N + 1] depth of each row; the root has 0. A row's position is the root's plus its depth."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return np.array(depths, np.int64)

    def ancestors(self) -> NDArray[np.bool_]:
        """[N + 1, N + 1] which rows each row sees: its ancestors and itself.

        For a root with children a and b, and c below a (rows: root, a, b, c)::

            root  1 0 0 0
            a     1 1 0 0
            b     1 0 1 0
            c     1 1 0 1
        """
        return path_mask((ROOT, *[parent + 1 for parent in self.parents]))

    def children(self, row: int) -> dict[int, int]:
        """Rows of the children of `row`, by token; of two children with one token the first counts."""
        return {token: child for (parent, token), child in self.edges().items() if parent == row}

    def edges(self) -> dict[tuple[int, int], int]:
        """Rows by their parent's row and their token; of two children with one token the first counts."""
        found: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            found.setdefault((parent + 1, token), node + 1)
        return found


def _is_chain(parents: Sequence[int]) -> bool:
    return tuple(parents) == tuple(range(ROOT, len(parents) - 1))


def path_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[W, W] which of W nodes each of them sees, itself and its ancestors, from the place of each one's parent; ROOT is
    none of them."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            seen[node] |= seen[parent]
    return seen


def best_first(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float],
    budget: int,
    *,
    sources: Sequence[Source] = (),
) -> Tree:
    """The `budget` nodes of highest path score, parents first (EAGLE-2's reranking, arXiv 2406.16858 section 4.2).

    `scores` [n] are path log-probabilities, so a child never scores above its parent; ties go to the earlier node,
    and parents are listed before children, so the kept nodes always form a tree. Depth first, of siblings the likelier
    first: the path that is accepted most often then is the first rows, whose keys and values need not be moved.
    """
    if _is_chain(parents):  # its first nodes
        return Tree(tokens=tuple(tokens[:budget]), parents=tuple(parents[:budget]), sources=tuple(sources[:budget]))
    best = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[:budget]
    children: dict[int, list[int]] = {}
    for node in reversed(best):
        children.setdefault(parents[node], []).append(node)
    kept, left = [], children.get(ROOT, [])
    while left:
        kept.append(left.pop())
        left.extend(children.get(kept[-1], ()))
    place = {node: index for index, node in enumerate(kept)}
    return Tree(
        tokens=tuple(tokens[node] for node in kept),
        parents=tuple(ROOT if parents[node] == ROOT else place[parents[node]] for node in kept),
        sources=tuple(sources[node] for node in kept) if sources else (),
    )


BIAS = "attention_bias"  # a target graph's input: the mask of its blocks that see everything


def bias_name(window: int) -> str:
    """The input that masks the blocks which see the last `window` positions; of 0 or less: all of them."""
    return f"{BIAS}.{window}" if window > 0 else BIAS


def bias_window(name: str) -> int | None:
    """The window that an input of `bias_name` masks, 0 for none; None for another input."""
    if name == BIAS:
        return 0
    head, _, tail = name.rpartition(".")
    return int(tail) if head == BIAS and tail.isdigit() else None


def attention_bias(
    seen: NDArray[np.bool_],
    cached: int,
    out: NDArray[np.float32] | None = None,
    *,
    window: int = 0,
    depths: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """[1, 1, T, S + W] additive mask: 0 for the S cached columns and every column seen, the lowest float elsewhere.

    `seen` [T, W] says which of the last W columns each row sees (W = T when the rows themselves are all that is not
    cached). With a `window` a row sees that many positions at most, itself and those before it; positions are counted
    along its path, by `depths` [T], since a tree's columns are not positions (W = T then). `out` is a flat buffer of at
    least T * (S + W) floats to write into, so that a round allocates nothing that grows with the context.
    """
    rows, width = seen.shape
    total = cached + width
    if out is None:
        out = np.empty(rows * total, np.float32)
    bias = out[: rows * total].reshape(rows, total)
    bias[:, :cached] = 0.0
    if window > 0 and depths is not None:
        seen = seen & (depths[:, None] - depths[None, :] < window)
        for row, depth in enumerate(depths.tolist()):
            bias[row, : min(cached, max(0, cached + depth + 1 - window))] = np.finfo(np.float32).min
    bias[:, cached:] = np.where(seen, np.float32(0.0), np.finfo(np.float32).min)
    return bias.reshape(1, 1, rows, total)
