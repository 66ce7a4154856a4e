"""One proposal from two sources: the draft's guesses and what followed the same words before.

A chain takes at each place the likelier of the two. A tree is a beam expansion of the draft, in which n-gram
continuations are nodes beside the draft's, and the best nodes by path probability are kept (EAGLE-2, arXiv 2406.16858;
OPT-Tree, arXiv 2406.17276). In both the draft's next call is made only where its expected gain exceeds its price, and a
node is kept only where its probability does (`elsi_edge.runtime.price`): so a sure n-gram saves the draft's call, an
unsure draft stops early, and a round may propose nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.confidence import DraftConfidence
from elsi_edge.runtime.draft import DraftStep
from elsi_edge.runtime.drafter import Draft, Drafter
from elsi_edge.runtime.ngram import PRIOR, NgramIndex, NgramRecord
from elsi_edge.runtime.price import FREE
from elsi_edge.runtime.proposal import Bounds, Candidates
from elsi_edge.runtime.tree import ROOT, Source, Tree
from elsi_edge.tree_shape import TreeShape

_LEAST = 0.005  # path probability below which nothing is looked for
_WIDTH = 2  # n-gram continuations of one node of a tree
_LOOKED_AT = 8  # nodes of a tree's level whose n-gram continuations are looked for

# On 8,300 tokens of SmolLM2's own greedy answers. The draft's probabilities are right as they are (0.57 said, 0.55
# true; 0.88 and 0.88); of n-grams the length of the match tells most, and the draft's word on the same token the rest.
_SECOND = 0.28  # chance of an n-gram's second continuation where the first is wrong
_MATCH, _SAID, _BIAS = 1.0, 0.17, 0.61  # weights of `blend`


class _Guess(NamedTuple):  # as _Child is: a round makes a dozen, and frozen dataclasses are slow to make
    token: int
    probability: float


class _Child(NamedTuple):
    token: int
    probability: float
    source: Source


class MixedProposer:
    """Candidates from n-grams and, where there is one, from a draft."""

    def __init__(self, draft: Draft | None = None, *, ngram_prior: tuple[float, ...] = PRIOR) -> None:
        self.drafter = None if draft is None else Drafter(draft)
        self._ids = np.zeros(0, np.int64) if draft is None else draft.draft_to_target_ids
        self._draft_index = {int(token): index for index, token in enumerate(self._ids)}
        self._index, self._record = NgramIndex(), NgramRecord(ngram_prior)
        self._confidence = DraftConfidence()
        self._in_answer = False  # whether the prompt was observed

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` rows, and how guesses fared."""
        self._index.truncate(rows)
        self._record.reset()
        self._confidence = DraftConfidence()
        self._in_answer = False
        if self.drafter is not None:
            self.drafter.keep(rows)

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        """Committed rows, the prompt's first."""
        for token in next_tokens:
            if self._in_answer:
                for match in self._index.matches():
                    self._record.note(match.length, match.token == token)
            self._index.append(token)
        self._in_answer = True
        if self.drafter is not None:
            self.drafter.observe(next_tokens, taps)

    def propose(self, bounds: Bounds) -> Tree:
        """Candidates for what follows the last observed token. Raises ValueError when nothing was observed."""
        self._confidence.fade()
        before = len(self._index.tokens)
        try:
            nodes = self._chain(bounds) if bounds.chain else self._tree(bounds)
        finally:
            self._index.truncate(before)
        return nodes.best(bounds)

    # --- chains ----------------------------------------------------------------------------------------------------

    def _chain(self, bounds: Bounds) -> Candidates:
        nodes = Candidates()
        least = 0.0 if bounds.price is FREE else _least(bounds)
        reach = 1.0  # probability that the path so far is accepted
        for depth in range(1, min(bounds.budget, bounds.depth) + 1):
            guesses = self._guesses(bounds, 1)
            sure = guesses[0].probability if guesses else 0.0
            step = self._step_at(depth, nodes, bounds) if self._asks(depth, reach, sure, nodes, bounds) else None
            children = self._children(guesses, step, 0, 1)
            if not children:
                break
            best = max(children, key=lambda child: child.probability)
            reach *= best.probability
            if reach < least:
                break
            nodes.add(best.token, depth - 2, math.log(max(reach, 1e-300)), best.source)
            self._index.append(best.token)
        return nodes

    def _asks(self, depth: int, reach: float, sure: float, nodes: Candidates, bounds: Bounds) -> bool:
        """Whether the draft's word on this place of a chain is worth what it takes to get there."""
        if not self._can_draft(bounds, depth):
            return False
        price = bounds.price
        if price is FREE:
            return True
        assert self.drafter is not None
        behind = depth - 1 - self.drafter.levels if self.drafter.started else depth - 1
        cost = behind * price.level + (0.0 if self.drafter.started else price.entry)
        gain = self._confidence.gain(depth, reach, price.node(len(nodes.tokens) + 1), instead=sure)
        return gain >= cost

    def _step_at(self, depth: int, nodes: Candidates, bounds: Bounds) -> DraftStep:
        """The draft's predictions at this place, after it has run what of the path it has not."""
        assert self.drafter is not None
        drafter = self.drafter
        step = None if drafter.started else drafter.start()
        while step is None or drafter.levels < depth - 1:
            node = drafter.levels
            step = drafter.expand([node], nodes.tokens, nodes.parents, node + 1)
        self._confidence.note(depth, math.exp(step.log_probs[0, step.likeliest(0, 1)[0]]))
        return step

    # --- trees -----------------------------------------------------------------------------------------------------

    def _tree(self, bounds: Bounds) -> Candidates:
        shape = TreeShape.for_budget(bounds.budget, chain=False)
        nodes = Candidates()
        least = math.log(_least(bounds))
        level: list[int] = [ROOT]  # nodes that may get children
        frontier: list[int] = [ROOT]  # those of them that the draft may run, best first
        for depth in range(1, min(bounds.budget, bounds.depth) + 1):  # a node's ancestors take places too
            bar = _least_to_enter(nodes.scores, bounds.budget)
            least = max(least, bar)
            drafting = depth <= shape.depth and self._grows(depth, frontier, nodes, bounds, bar)
            rows = sorted(frontier) if drafting else []
            step = self._run(rows, depth, nodes) if rows else None
            fresh: list[int] = []
            grown: list[int] = []  # children of nodes that the draft ran
            for parent in level:
                row = rows.index(parent) if parent in rows else -1
                # Below a node that is not worth its place none is.
                reach = 1.0 if parent == ROOT else math.exp(nodes.scores[parent])
                floor = 0.0 if bounds.price is FREE else math.exp(least) / reach
                children = self._children(
                    self._guesses_at(parent, nodes, bounds, least), step if row >= 0 else None, row, shape.beam, floor
                )
                added = [self._add(nodes, child, parent) for child in children if child.probability >= floor]
                fresh += added
                grown += added if row >= 0 else []
            frontier = sorted(grown, key=lambda node: (-nodes.scores[node], node))[: shape.beam]
            looked_at = sorted(fresh, key=lambda node: (-nodes.scores[node], node))[:_LOOKED_AT]
            level = sorted({*frontier, *looked_at})
            if not level:
                break
        return nodes

    def _grows(self, depth: int, frontier: Sequence[int], nodes: Candidates, bounds: Bounds, bar: float) -> bool:
        """Whether the draft's next level is worth its price; `bar` is the score that a node must exceed to be kept."""
        if not frontier or not self._can_draft(bounds, depth):
            return False
        assert self.drafter is not None
        if depth > 1 and self.drafter.levels + len(frontier) > self.drafter.room:
            return False  # every node of a tree takes a slot of the draft's context, whatever its depth
        if depth == 1:
            reaches = [1.0]
        else:
            scores = [nodes.scores[node] for node in frontier]
            if bar >= max(scores):
                return False
            reaches = [math.exp(score) for score in scores]
        price = bounds.price
        if price is FREE:
            return True
        gain = sum(
            self._confidence.gain(depth, reach, price.mean_node(bounds.budget), instead=0.0) for reach in reaches
        )
        return gain >= (price.entry if depth == 1 else price.level)

    def _run(self, rows: Sequence[int], depth: int, nodes: Candidates) -> DraftStep:
        assert self.drafter is not None
        step = self.drafter.start() if depth == 1 else self.drafter.expand(rows, nodes.tokens, nodes.parents, depth - 1)
        for row in range(len(rows)):
            self._confidence.note(depth, math.exp(step.log_probs[row, step.likeliest(row, 1)[0]]))
        return step

    def _guesses_at(self, node: int, nodes: Candidates, bounds: Bounds, least: float) -> list[_Guess]:
        """n-gram continuations of a node whose score is at least `least`: of the text with the path to it."""
        if "ngram" not in bounds.proposals or (node != ROOT and nodes.scores[node] < least):
            return []
        path = []
        while node != ROOT:
            path.append(nodes.tokens[node])
            node = nodes.parents[node]
        before = len(self._index.tokens)
        self._index.extend(reversed(path))
        guesses = self._guesses(bounds, _WIDTH)
        self._index.truncate(before)
        return guesses

    def _add(self, nodes: Candidates, child: _Child, parent: int) -> int:
        base = 0.0 if parent == ROOT else nodes.scores[parent]
        return nodes.add(child.token, parent, base + math.log(max(child.probability, 1e-300)), child.source)

    # --- both ------------------------------------------------------------------------------------------------------

    def _can_draft(self, bounds: Bounds, depth: int) -> bool:
        drafter = self.drafter
        if drafter is None or "draft" not in bounds.proposals:
            return False
        # What was read no longer waits, so the room below the root stays the same within a round.
        return drafter.room >= depth

    def _guesses(self, bounds: Bounds, width: int) -> list[_Guess]:
        """Continuations of the index's end with the probability that each is right, likeliest first."""
        if "ngram" not in bounds.proposals:
            return []
        left, found = 1.0, []
        for place, match in enumerate(self._index.matches(width)):
            chance = self._record.probability(match.length) if place == 0 else _SECOND
            found.append(_Guess(match.token, left * chance))
            left -= found[-1].probability
        return found

    def _children(
        self, guesses: Sequence[_Guess], step: DraftStep | None, row: int, count: int, floor: float = 0.0
    ) -> list[_Child]:
        """Candidates for one place: the draft's `count` likeliest and the n-grams', each with its probability; of the
        draft's those from `floor` on."""
        if step is None:
            return [_Child(guess.token, guess.probability, "ngram") for guess in guesses]
        log_probs = step.log_probs[row]
        likely = step.likeliest(row, count)
        found: dict[int, _Child] = {}
        left, before = 1.0, 1.0  # probability that the guesses leave to other tokens, and that the draft had left there
        for guess in guesses:
            index = self._draft_index.get(guess.token)
            said = 0.0 if index is None else math.exp(log_probs[index])
            chance = left * blend(guess.probability, said)
            found[guess.token] = _Child(guess.token, chance, "both" if index in likely else "ngram")
            left, before = left - chance, max(before - said, 1e-6)
        for index in likely:
            token = int(self._ids[index])
            if token not in found:
                chance = min(1.0, math.exp(log_probs[index]) * left / before)
                if chance < floor:
                    break
                found[token] = _Child(token, chance, "draft")
        return list(found.values())


def _least(bounds: Bounds) -> float:
    """Path probability below which a node is worth its place in no proposal."""
    return max(_LEAST, bounds.price.least_node(bounds.budget))


def blend(matched: float, said: float) -> float:
    """Probability of an n-gram's continuation, from that of its match and what the draft says of the same token.

    Logistic regression on SmolLM2's own greedy answers.
    """
    odds = _MATCH * _logit(matched) + _SAID * _logit(said) + _BIAS
    return 1.0 / (1.0 + math.exp(-odds))


def _logit(probability: float) -> float:
    inside = min(max(probability, 1e-4), 1.0 - 1e-4)
    return math.log(inside / (1.0 - inside))


def _least_to_enter(scores: Sequence[float], budget: int) -> float:
    """The score that a further node, and so one above it, must exceed to be among the `budget` best."""
    return sorted(scores, reverse=True)[budget - 1] if len(scores) >= budget else -math.inf
