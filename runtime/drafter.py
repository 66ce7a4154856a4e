"""The draft's side of a proposal: committed rows that wait to be read, and the nodes it runs in a round."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.draft import DraftStep
from elsi_edge.runtime.tree import ROOT

# Rows that are read at once at most. Tau is 2 % higher with 256, and reading them costs an answer about as much.
WINDOW = 64


class Draft(Protocol):
    """What is asked of a draft; `OrtDraft`, or a toy in tests."""

    draft_to_target_ids: NDArray[np.int64]  # [U] absolute target ids

    @property
    def length(self) -> int:
        """Entries committed."""
        ...

    def keep(self, entries: int) -> None:
        """Forget everything but the first `entries` entries."""
        ...

    def room(self) -> int:
        """How many levels of nodes fit before the context ends."""
        ...

    def extend(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> DraftStep:
        """Commit entries; predictions after the last."""
        ...

    def expand(
        self, tokens: Sequence[int], states: NDArray[np.float32], depth: int, parents: Sequence[int]
    ) -> DraftStep:
        """Run nodes without committing; predictions after each."""
        ...


class Drafter:
    """Reads committed rows when a round first asks the draft, so rounds without it cost nothing, and catches up.

    Of many rows that wait, a long prompt's above all, it reads the last `window` alone: one block of attention needs
    little more, and reading a prompt of 800 tokens would take the time of several plain steps. Its positions then begin
    there; keys are rotated, so only distances count.
    """

    def __init__(self, draft: Draft, *, window: int = WINDOW) -> None:
        self.draft, self.window = draft, window
        self._skipped = 0  # rows before the draft's first entry
        self._tokens: list[int] = []  # of rows that wait, at most 2 * window between calls
        # Their taps come first in it. One place for good: a copy that allocates took three times as long, since nothing
        # of it is in the caches after a step.
        self._taps = np.zeros((2 * window, 0), np.float32)
        self._run: list[int] = []  # nodes that ran since the last entry, in cache order
        self._parents: list[int] = []  # of those, as places in that order
        self._step: DraftStep | None = None  # what the last run said
        self._rows: list[int] = []  # nodes, or ROOT, whose children it predicts

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` rows."""
        entries = max(0, rows - self._skipped)
        waiting = entries - self.draft.length  # of the rows to keep
        self.draft.keep(entries)
        self._skipped = min(self._skipped, rows)
        self._tokens = self._tokens[: max(0, waiting)]
        self._step = None

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        """Note committed rows; the draft runs over them when it is next asked, so a last round costs nothing."""
        if self._taps.shape[1] != taps.shape[1]:
            self._taps = np.zeros((2 * self.window, taps.shape[1]), np.float32)
        self._step = None
        most, fresh = len(self._taps), len(next_tokens)
        if len(self._tokens) + fresh > most:  # the last `window` of all are as many as are ever read
            self._skip(len(self._tokens) + min(fresh, self.window) - self.window)
            if fresh > self.window:
                self._skipped += fresh - self.window
                next_tokens, taps = next_tokens[-self.window :], taps[-self.window :]
        held = len(self._tokens)
        self._tokens.extend(next_tokens)
        self._taps[held : len(self._tokens)] = taps

    def _skip(self, rows: int) -> None:
        """Forget all entries and the first `rows` rows that wait."""
        self._skipped += self.draft.length + rows
        self.draft.keep(0)
        held = len(self._tokens)
        self._tokens = self._tokens[rows:]
        self._taps[: len(self._tokens)] = self._taps[rows:held]

    @property
    def room(self) -> int:
        """Levels of nodes that fit after what waits; 0 when the draft was made for shorter sequences."""
        if len(self._tokens) > self.window:  # the draft will begin anew
            return max(0, self.draft.room() + self.draft.length - self.window)
        return max(0, self.draft.room() - len(self._tokens))

    @property
    def started(self) -> bool:
        """Whether the draft was asked since the last observed row."""
        return self._step is not None

    @property
    def levels(self) -> int:
        """Calls since the first one of the round."""
        return len(self._run)

    def start(self) -> DraftStep:
        """Read what waits; predictions for the first level. Raises ValueError when nothing was observed."""
        if not self._tokens:
            raise ValueError("nothing was observed since the last proposal")
        if len(self._tokens) > self.window:
            self._skip(len(self._tokens) - self.window)
        step = self.draft.extend(self._tokens, self._taps[: len(self._tokens)])
        self._tokens, self._run, self._parents = [], [], []
        self._step, self._rows = step, [ROOT]
        return step

    def expand(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], depth: int) -> DraftStep:
        """Run nodes of one depth, whose parents ran last; predictions for their children.

        `tokens` and `parents` are of all candidates, by node.
        """
        assert self._step is not None  # the first level comes from start()
        rows = [self._rows.index(parents[node]) for node in nodes]
        states = self._step.states if rows == [0] and len(self._rows) == 1 else self._step.states[rows]
        self._parents += [ROOT if parents[node] == ROOT else self._run.index(parents[node]) for node in nodes]
        self._run += nodes
        self._step = self.draft.expand([tokens[node] for node in nodes], states, depth, self._parents)
        self._rows = list(nodes)
        return self._step
