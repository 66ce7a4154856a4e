"""Answers that were recorded with their states, played again without the target: what would a proposer have done?

At T = 0 the target's next tokens are known, so a proposer can be run on an answer for what the proposer itself costs;
how long the verifications would have taken is known from the cost curve.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.decode import Plan, Round, rounds
from elsi_edge.runtime.draft import DraftStep
from elsi_edge.runtime.drafter import Draft
from elsi_edge.runtime.pace import Pace
from elsi_edge.runtime.proposal import Bounds, Proposer
from elsi_edge.runtime.target import Target, TargetStep
from elsi_edge.runtime.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A greedy answer."""

    category: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # the answer
    taps: NDArray[np.float32]  # [T, M*E] of prompt and answer but for its last token
    seconds: float  # that plain decoding took after the first token
    target_seconds: float  # of them in the target


class _Recorder:
    """A proposer that proposes nothing and keeps what it observes."""

    def __init__(self) -> None:
        self.taps: list[NDArray[np.float32]] = []

    def keep(self, rows: int) -> None:
        """Forget everything."""
        self.taps = []

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        """Keep the states."""
        self.taps.append(taps.copy())

    def propose(self, bounds: Bounds) -> Tree:
        """Nothing."""
        return Tree.empty()


def record(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    limit: int,
    context: int,
    eos_ids: frozenset[int],
    category: str = "",
    until: float = float("inf"),
) -> Recorded:
    """Decode plainly and greedily, up to `limit` tokens, or the time `until` of `time.perf_counter`."""
    recorder = _Recorder()
    plan = Plan(budget=0, chain=True, limit=min(limit, context - len(prompt_ids)), context=context)
    answer: list[int] = []
    spent, start = 0.0, 0.0
    for one in rounds(target, recorder, prompt_ids, plan, lambda logits, index: int(np.argmax(logits)), greedy=True):
        if answer:
            spent += one.seconds_target
        else:
            start = time.perf_counter()
        answer += one.tokens
        if answer[-1] in eos_ids or time.perf_counter() > until:
            break
    return Recorded(
        category=category,
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(answer),
        taps=np.concatenate(recorder.taps),
        seconds=time.perf_counter() - start,
        target_seconds=spent,
    )


class RecordedTarget:
    """Stands for the target on one recorded answer; logits are empty, as the answer chooses the tokens."""

    def __init__(self, recorded: Recorded) -> None:
        self._taps = recorded.taps
        self._length = 0

    @property
    def length(self) -> int:
        """S, tokens in the cache."""
        return self._length

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` tokens."""
        self._length = min(self._length, rows)

    def prefill(self, token_ids: Sequence[int]) -> TargetStep:
        """The recorded states of these rows."""
        start, self._length = self._length, self._length + len(token_ids)
        return TargetStep(logits=np.zeros((1, 1), np.float32), taps=self._taps[start : self._length])

    def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> TargetStep:
        """States of the true path by depth: those of other rows are never looked at."""
        rows = np.minimum(self._length + tree.depths(), len(self._taps) - 1)
        return TargetStep(logits=np.zeros((tree.size + 1, 1), np.float32), taps=self._taps[rows])

    def commit(self, rows: Sequence[int]) -> None:
        """Keep so many rows."""
        self._length += len(rows)


class CountingDraft:
    """A draft that counts and times its calls."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.draft_to_target_ids = draft.draft_to_target_ids
        self.entries = self.levels = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        """Entries committed."""
        return self._draft.length

    def keep(self, entries: int) -> None:
        """Forget everything but the first `entries` entries."""
        self._draft.keep(entries)

    def room(self) -> int:
        """How many levels of nodes fit before the context ends."""
        return self._draft.room()

    def extend(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> DraftStep:
        """Commit entries; predictions after the last."""
        start = time.perf_counter()
        step = self._draft.extend(next_tokens, taps)
        self.entries += 1
        self.seconds += time.perf_counter() - start
        return step

    def expand(
        self, tokens: Sequence[int], states: NDArray[np.float32], depth: int, parents: Sequence[int]
    ) -> DraftStep:
        """Run nodes without committing; predictions after each."""
        start = time.perf_counter()
        step = self._draft.expand(tokens, states, depth, parents)
        self.levels += 1
        self.seconds += time.perf_counter() - start
        return step


@dataclass(kw_only=True)
class Played:
    """What a proposer did on recorded answers."""

    rounds: list[Round] = field(default_factory=list)
    pasts: list[int] = field(default_factory=list)  # tokens in the cache, by round
    used: list[int] = field(default_factory=list)  # tokens that the answer used of each round
    entries: int = 0  # first calls of the draft
    levels: int = 0  # further ones
    seconds: float = 0.0  # of proposing outside the draft

    @property
    def tokens(self) -> int:
        """Emitted by verifications."""
        return sum(self.used)


def play(
    recorded: Recorded, proposer: Proposer, plan: Plan, pace: Pace, draft: CountingDraft | None, played: Played
) -> None:
    """Run the loop over one recorded answer, and add what happened to `played`."""
    answer = recorded.token_ids
    target = RecordedTarget(recorded)
    before = (draft.entries, draft.levels, draft.seconds) if draft is not None else (0, 0, 0.0)
    past, first = len(recorded.prompt_ids), True
    for one in rounds(
        target,
        proposer,
        recorded.prompt_ids,
        plan,
        lambda logits, index: answer[min(index, len(answer) - 1)],
        pace,
    ):
        if first:
            first = False
            continue
        played.rounds.append(one)
        played.pasts.append(past)
        played.used.append(len(one.tokens))
        played.seconds += one.seconds_propose
        past += len(one.tokens)
    if draft is not None:
        played.entries += draft.entries - before[0]
        played.levels += draft.levels - before[1]
        played.seconds -= draft.seconds - before[2]
