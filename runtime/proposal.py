"""What the loop asks for candidates, and what it gets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.options import PROPOSALS, Proposal
from elsi_edge.runtime.price import FREE, Price
from elsi_edge.runtime.tree import Source, Tree, best_first

Kind = Literal["chain", "tree"]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a round may propose, and what it costs."""

    budget: int  # nodes at most, at least 1
    depth: int  # levels at most, at least 1: no more tokens can be emitted
    chain: bool  # whether candidates must form a chain
    price: Price = FREE
    proposals: tuple[Proposal, ...] = PROPOSALS  # sources to take candidates from


class Proposer(Protocol):
    """What the loop asks for candidates; the tests fill it with oracles and liars.

    A row is a token in the target's cache: its tapped state, and the token that followed it.
    """

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` rows; a new prompt begins with them. 0 forgets all."""
        ...

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        """Committed rows: tapped states [T, M*E] and, for each, the token that followed it.

        The target's next call may overwrite the states; what is kept must be copied.
        """
        ...

    def propose(self, bounds: Bounds) -> Tree:
        """Candidates for what follows the last observed token, within bounds."""
        ...


@dataclass(kw_only=True)
class Candidates:
    """Nodes found so far, parents first."""

    tokens: list[int] = field(default_factory=list)  # target ids
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # path log-probabilities
    sources: list[Source] = field(default_factory=list)

    def add(self, token: int, parent: int, score: float, source: Source) -> int:
        """The new node's index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.sources.append(source)
        return len(self.tokens) - 1

    def best(self, bounds: Bounds) -> Tree:
        """The most likely nodes, as many as are worth most: the sum of their probabilities less the price of all."""
        count, most, gain = 0, 0.0, 0.0
        for number, score in enumerate(sorted(self.scores, reverse=True)[: bounds.budget], start=1):
            gain += math.exp(score)
            if gain - bounds.price.nodes[number] >= most:  # of equally good numbers the largest
                count, most = number, gain - bounds.price.nodes[number]
        if count == 0:
            return Tree.empty()
        return best_first(self.tokens, self.parents, self.scores, count, sources=self.sources)
