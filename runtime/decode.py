"""The loop: propose, verify, commit, emit. Reads like the papers; everything it touches is a seam."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.proposal import Proposer
from elsi_edge.runtime.target import Target
from elsi_edge.runtime.tree import Tree
from elsi_edge.runtime.verify import walk

Choose = Callable[[NDArray[np.float32], int], int]  # (logits [V], place in the answer) -> token


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of the loop; the first is the prefill, which yields one token and drafts nothing."""

    tokens: tuple[int, ...]  # to emit: accepted drafts, then the bonus token
    drafted: int  # nodes
    seconds_propose: float = 0.0
    seconds_target: float = 0.0  # prefill or verification


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a generation drafts."""

    budget: int  # N nodes a round; 0 is plain decoding
    chain: bool  # whether candidates must form a chain
    limit: int  # tokens of the answer at most
    context: int  # slots that a sequence may use, tokens


def rounds(
    target: Target, proposer: Proposer | None, prompt_ids: Sequence[int], plan: Plan, choose: Choose
) -> Iterator[Round]:
    """Decode until the caller stops or `plan.limit` tokens were emitted.

    `choose` is asked for every token as plain decoding would be, so the tokens do not depend on `proposer`.
    """
    # 1. Prefill: the prompt's states, and the first token.
    start = time.perf_counter()
    target.reset()
    step = target.prefill(prompt_ids)
    root = choose(step.logits[-1], 0)
    emitted = 1
    if proposer is not None:
        proposer.reset()
        proposer.observe([*prompt_ids[1:], root], step.taps)
    yield Round(tokens=(root,), drafted=0, seconds_target=time.perf_counter() - start)

    while emitted < plan.limit:
        # 2. Propose: no more than can still be emitted, and than the cache has slots for.
        start = time.perf_counter()
        budget = min(plan.budget, plan.limit - emitted - 1, plan.context - target.length - 2)
        tree = proposer.propose(budget, chain=plan.chain) if proposer is not None and budget > 0 else Tree.empty()
        proposed = time.perf_counter()

        # 3. Verify: one call of the target over the root and all nodes.
        step = target.verify(root, tree)
        verified = time.perf_counter()
        verdict = walk(tree, step.logits, functools.partial(_at, choose, emitted))

        # 4. Commit: accepted rows stay in the cache, their states go to the draft.
        target.commit(verdict.rows)
        if proposer is not None:
            proposer.observe(verdict.tokens, step.taps[list(verdict.rows)])
        root = verdict.tokens[-1]
        emitted += len(verdict.tokens)

        # 5. Emit.
        yield Round(
            tokens=verdict.tokens,
            drafted=tree.size,
            seconds_propose=proposed - start,
            seconds_target=verified - proposed,
        )


def _at(choose: Choose, emitted: int, logits: NDArray[np.float32], depth: int) -> int:
    return choose(logits, emitted + depth)
