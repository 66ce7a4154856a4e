"""From the draft to a tree of candidates."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.draft import DraftStep, OrtDraft
from elsi_edge.runtime.tree import ROOT, Tree, best_first
from elsi_edge.tree_shape import TreeShape


class Proposer(Protocol):
    """What the loop asks for candidates; the tests fill it with oracles and liars."""

    def reset(self) -> None:
        """Forget everything."""
        ...

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        """Committed rows: tapped states [T, M*E] and, for each, the token that followed it."""
        ...

    def propose(self, budget: int, *, chain: bool) -> Tree:
        """At most `budget` candidates for what follows the last observed token; a chain where asked."""
        ...


@dataclass(kw_only=True)
class _Nodes:
    """Candidates found so far, parents first."""

    tokens: list[int] = field(default_factory=list)  # target ids
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # path log-probabilities

    def add(self, token: int, parent: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        return len(self.tokens) - 1


class DraftProposer:
    """Beam expansion of the draft, then the best nodes by path probability (EAGLE-2, arXiv 2406.16858)."""

    def __init__(self, draft: OrtDraft) -> None:
        self.draft = draft
        self._tokens: list[int] = []
        self._taps: list[NDArray[np.float32]] = []

    def reset(self) -> None:
        """Forget everything."""
        self.draft.reset()
        self._tokens, self._taps = [], []

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        """Note committed rows; the draft runs over them when it is next asked, so a last round costs nothing."""
        self._tokens.extend(next_tokens)
        self._taps.append(taps.copy())

    def propose(self, budget: int, *, chain: bool) -> Tree:
        """At most `budget` candidates for what follows the last observed token."""
        if not self._tokens:
            raise ValueError("nothing was observed since the last proposal")
        if len(self._tokens) > self.draft.room():
            return Tree.empty()  # the draft was made for shorter sequences than the target runs
        step = self.draft.extend(self._tokens, np.concatenate(self._taps))
        self._tokens, self._taps = [], []
        shape = TreeShape.for_budget(min(budget, self.draft.room()), chain=chain)
        nodes = self._expand(step, shape, budget)
        return best_first(nodes.tokens, nodes.parents, nodes.scores, budget)

    def _expand(self, step: DraftStep, shape: TreeShape, budget: int) -> _Nodes:
        nodes = _Nodes()
        run: list[int] = []  # nodes that the draft ran, in cache order
        parents = [ROOT]  # nodes whose children `step` predicts
        for depth in range(1, shape.depth + 1):
            fresh = [
                node for row, parent in enumerate(parents) for node in self._children(nodes, step, row, parent, shape)
            ]
            if depth == shape.depth:
                break
            best = sorted(fresh, key=lambda node: (-nodes.scores[node], node))[: shape.beam]
            if _none_can_enter(nodes.scores, [nodes.scores[node] for node in best], budget):
                break
            frontier = sorted(best)
            states = np.stack([step.states[parents.index(nodes.parents[node])] for node in frontier])
            run.extend(frontier)
            seen = _seen(nodes.parents, frontier, run)
            step = self.draft.expand(np.array([nodes.tokens[n] for n in frontier]), states, depth, seen)
            parents = frontier
        return nodes

    def _children(self, nodes: _Nodes, step: DraftStep, row: int, parent: int, shape: TreeShape) -> list[int]:
        log_probs = step.log_probs[row]
        count = min(shape.beam, len(log_probs))
        top = np.argpartition(-log_probs, count - 1)[:count]
        base = 0.0 if parent == ROOT else nodes.scores[parent]
        ordered = sorted(top, key=lambda index: (-log_probs[index], index))
        ids = self.draft.draft_to_target_ids
        return [nodes.add(int(ids[index]), parent, base + float(log_probs[index])) for index in ordered]


def _none_can_enter(scores: Sequence[float], frontier: Sequence[float], budget: int) -> bool:
    """Whether `budget` nodes already score above everything that could still grow below the frontier."""
    if len(scores) < budget:
        return False
    return sorted(scores, reverse=True)[budget - 1] >= max(frontier)


def _seen(parents: Sequence[int], frontier: Sequence[int], run: Sequence[int]) -> NDArray[np.bool_]:
    """[T, W] which of the nodes run so far each frontier node sees: its ancestors and itself."""
    place = {node: index for index, node in enumerate(run)}
    seen = np.zeros((len(frontier), len(run)), np.bool_)
    for row, node in enumerate(frontier):
        current = node
        while current != ROOT:
            seen[row, place[current]] = True
            current = parents[current]
    return seen
