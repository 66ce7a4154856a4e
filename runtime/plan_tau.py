"""What a round of drafting brings: shapes of candidates, and tau by shape from one figure. Pure, no I/O.

What tau a shape reaches is not arithmetic. From one figure the others follow by a rule of thumb, fitted to an early
packaged draft (1.81 tokens for a chain of 4, 2.08 for a tree of 8, 2.7 for one of 30): every level accepts with one
probability, 1 - (1 - a) ** (k ** 0.3) with k nodes a level, and a the first guess's. Beyond 30 nodes it says too much.
"""

import math
from dataclasses import dataclass
from typing import Literal

from elsi_edge.errors import UsageError
from elsi_edge.runtime.options import MAX_DRAFT_NODES
from elsi_edge.tree_shape import TreeShape

_WIDTH_GAIN = 0.3  # exponent of the rule for tau


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a round drafts: a chain of N, or a tree of N nodes."""

    kind: Literal["chain", "tree"]
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "Drafting":
        """From "chain-4" or "tree-60". Raises UsageError."""
        kind, _, count = text.partition("-")
        nodes = int(count) if count.isascii() and count.isdigit() else 0
        if kind not in ("chain", "tree") or not 1 <= nodes <= MAX_DRAFT_NODES:
            raise UsageError(
                f"{text!r} is no shape; shapes are chain-N and tree-N with 1 to {MAX_DRAFT_NODES} drafted nodes"
            )
        return cls(kind=kind, nodes=nodes)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.kind}-{self.nodes}"

    @property
    def shape(self) -> TreeShape:
        """Levels and nodes expanded on each."""
        return TreeShape.for_budget(self.nodes, chain=self.kind == "chain")

    @property
    def most(self) -> int:
        """Tokens that a round can bring."""
        return self.shape.depth + 1

    @property
    def words(self) -> str:
        """For people: "a chain of 4", "a tree of 60 nodes on 7 levels"."""
        if self.kind == "chain":
            return f"a chain of {self.nodes}"
        return f"a tree of {self.nodes} nodes on {self.shape.depth} levels"


DRAFTINGS = (
    *(Drafting(kind="chain", nodes=nodes) for nodes in (1, 2, 3, 4, 8)),
    *(Drafting(kind="tree", nodes=nodes) for nodes in (8, 30, 60)),
)


@dataclass(frozen=True, kw_only=True)
class Tau:
    """Tokens a round, the bonus token counted: of one shape, from which others follow, or of whatever shape."""

    tau: float
    drafting: Drafting | None = None  # None: of every shape alike

    def __post_init__(self) -> None:
        most = math.inf if self.drafting is None else self.drafting.most
        if not self.tau >= 1.0 or math.isinf(self.tau):
            raise UsageError(f"tau is {self.tau:g}; a verification gives at least 1 token, and so must tau be")
        if self.drafting is not None and self.tau > most:
            raise UsageError(
                f"{self.drafting.words} gives at most {most} tokens a verification, tau is {self.tau:g}; "
                f"it must be from 1 to {most}"
            )

    def of(self, drafting: Drafting) -> float | None:
        """Of another shape; None where it cannot bring so many tokens."""
        if self.drafting is None:
            return self.tau if self.tau <= drafting.most else None
        if self.drafting == drafting:
            return self.tau
        level = _level_acceptance(self.tau, self.drafting.shape.depth)
        guess = 1.0 - (1.0 - level) ** (1.0 / _gain(self.drafting))
        return _tokens(1.0 - (1.0 - guess) ** _gain(drafting), drafting.shape.depth)

    @property
    def name(self) -> str:
        """As --tau reads it."""
        return f"{self.tau:g}" if self.drafting is None else f"{self.drafting.name}={self.tau:g}"


def parse_taus(text: str) -> tuple[Tau, ...]:
    """--tau: numbers of every shape alike, and SHAPE=NUMBER from which other shapes follow. Raises UsageError."""
    found = []
    for part in text.split(","):
        shape, equals, number = part.strip().rpartition("=")
        try:
            tau = float(number)
        except ValueError as error:
            raise UsageError(
                f"--tau: {part.strip()!r} is neither a number nor SHAPE=NUMBER, such as 2.5 or chain-4=1.8"
            ) from error
        found.append(Tau(tau=tau, drafting=Drafting.parse(shape) if equals else None))
    return tuple(found)


def _gain(drafting: Drafting) -> float:
    """How many guesses a level is worth."""
    return math.pow(max(1.0, drafting.nodes / drafting.shape.depth), _WIDTH_GAIN)


def _tokens(level: float, depth: int) -> float:
    """Tokens of a round when every one of `depth` levels accepts with probability `level`."""
    return math.fsum(level**accepted for accepted in range(depth + 1))


def _level_acceptance(tau: float, depth: int) -> float:
    """The probability at which `_tokens` is `tau`: bisection, since it rises with it."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(middle, depth) < tau else (low, middle)
    return high
