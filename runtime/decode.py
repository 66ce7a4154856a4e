"""The loop: propose, verify, commit, emit. Reads like the papers; everything it touches is a seam."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.options import PROPOSALS, Proposal
from elsi_edge.runtime.pace import Pace
from elsi_edge.runtime.proposal import Bounds, Proposer
from elsi_edge.runtime.target import Target, TargetStep
from elsi_edge.runtime.tree import Tree
from elsi_edge.runtime.verify import walk

Choose = Callable[[NDArray[np.float32], int], int]  # (logits [V], place in the answer) -> token


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of the loop; the first is the prefill, which yields one token and drafts nothing."""

    tokens: tuple[int, ...]  # to emit: accepted drafts, then the bonus token
    tree: Tree = field(default_factory=Tree.empty)  # what was proposed
    rows: tuple[int, ...] = (0,)  # of the verification that were accepted, the root's row 0 first
    seconds_propose: float = 0.0
    seconds_target: float = 0.0  # prefill or verification

    @property
    def drafted(self) -> int:
        """Nodes."""
        return self.tree.size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a generation drafts."""

    budget: int  # N nodes a round; 0 is plain decoding
    chain: bool  # whether candidates must form a chain
    limit: int  # tokens of the answer at most
    context: int  # slots that a sequence may use, tokens
    proposals: tuple[Proposal, ...] = PROPOSALS
    kept: int = 0  # tokens of the prompt that target and proposer hold already

    def bounds(self, emitted: int, cached: int, pace: Pace) -> Bounds | None:
        """What a round may propose after `emitted` tokens, with `cached` tokens in the cache; None: nothing.

        No deeper than tokens can still be emitted, the bonus token being one, and no more nodes than the cache has
        slots for. The exact chain form's attention takes one slot more.
        """
        depth = self.limit - emitted - 1
        budget = min(self.budget, self.context - cached - 2, depth if self.chain else self.budget)
        price = pace.price(cached) if budget > 0 and depth > 0 else None
        if price is None:
            return None
        return Bounds(budget=budget, depth=depth, chain=self.chain, price=price, proposals=self.proposals)


def rounds(
    target: Target,
    proposer: Proposer | None,
    prompt_ids: Sequence[int],
    plan: Plan,
    choose: Choose,
    pace: Pace | None = None,
    *,
    greedy: bool = False,
) -> Iterator[Round]:
    """Decode until the caller stops or `plan.limit` tokens were emitted.

    `choose` is asked for every token as plain decoding would be, so the tokens do not depend on `proposer`. `greedy`
    says that it takes the largest logit: a target that finds it is then taken at its word. `pace` says what candidates
    cost; without one every round drafts its whole budget.
    """
    pace = pace or Pace()
    # 1. Prefill: the prompt's states, and the first token.
    start = time.perf_counter()
    target.keep(plan.kept)
    step = target.prefill(prompt_ids[plan.kept :])
    root = choose(step.logits[-1], 0)
    emitted = 1
    if proposer is not None:
        proposer.keep(plan.kept)
        proposer.observe([*prompt_ids[plan.kept + 1 :], root], step.taps)
    yield Round(tokens=(root,), seconds_target=time.perf_counter() - start)

    while emitted < plan.limit:
        # 2. Propose.
        start = time.perf_counter()
        bounds = plan.bounds(emitted, target.length, pace) if proposer is not None else None
        tree = proposer.propose(bounds) if proposer is not None and bounds is not None else Tree.empty()
        proposed = time.perf_counter()

        # 3. Verify: one call of the target over the root and all nodes.
        step = target.verify(root, tree, greedy=greedy)
        verified = time.perf_counter()
        verdict = walk(tree, _choices(step, choose, emitted))

        # 4. Commit: accepted rows stay in the cache, their states go to the draft.
        target.commit(verdict.rows)
        if proposer is not None:
            proposer.observe(verdict.tokens, _rows(step.taps, verdict.rows))
        root = verdict.tokens[-1]
        emitted += len(verdict.tokens)

        # 5. Emit.
        pace.note(tokens=len(verdict.tokens), nodes=tree.size, milliseconds=(time.perf_counter() - start) * 1e3)
        yield Round(
            tokens=verdict.tokens,
            tree=tree,
            rows=verdict.rows,
            seconds_propose=proposed - start,
            seconds_target=verified - proposed,
        )


def _rows(taps: NDArray[np.float32], rows: Sequence[int]) -> NDArray[np.float32]:
    """These rows, ascending from 0; a chain's are the first, and need no copy."""
    return taps[: len(rows)] if rows[-1] == len(rows) - 1 else taps[list(rows)]


def _choices(step: TargetStep, choose: Choose, emitted: int) -> Callable[[int, int], int]:
    """The token after a row of a verification, by row and depth."""
    likeliest, logits = step.likeliest, step.logits
    if likeliest is not None:
        return lambda row, depth: likeliest[row]
    return lambda row, depth: choose(logits[row], emitted + depth)
