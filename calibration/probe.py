"""A cross-check that trains nothing: how well one linear map from a state and the next embedding foresees the target.

Ridge regression from [state at t, embedding at t + 1] to the target's final state at t + 1 (after the final norm), read
through its output head; scored is how often the top token agrees with the target's own. It sees what a draft sees,
where entropy only says how rich that is.
Fitted from sums that stream by, one pass; scored on prompts that were held out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration.accumulate import Arrays
from elsi_edge.calibration.parallel import spread

if TYPE_CHECKING:
    from elsi_edge.calibration.capture import PromptStates

VOCABULARY = 8192  # tokens of the head that is scored, as many as a draft's
FLAG = 0.03  # share by which the pick may fall behind the best tap without being flagged
RIDGE = 0.03  # times the mean diagonal of the features' second moments
_SCORE_ROWS = 512  # rows scored at a time

Members = tuple[int, ...]  # indices of states, ascending; () is the embedding alone


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Rows from which the next state is foreseen, of one prompt or several."""

    states: NDArray[np.float32]  # [S, n, E] at t: taps 0..L, or those that are looked at
    final_norm: NDArray[np.float32] | None  # [n, E] at t, after the final norm: state S; None where not looked at
    embedding: NDArray[np.float32]  # [n, E] at t + 1
    final: NDArray[np.float32]  # [n, E] after the final norm, at t + 1
    argmax: NDArray[np.int64]  # [n] the target's top token at t + 1

    @classmethod
    def of(cls, prompts: "Sequence[PromptStates]", first: Sequence[int]) -> "Pairs":
        """All pairs (t, t + 1) with t >= first[prompt's index] of some prompts."""
        spans = [(p, slice(first[p.index], -1), slice(first[p.index] + 1, None)) for p in prompts]
        return cls(
            states=np.concatenate([p.states[:, at] for p, at, _ in spans], axis=1),
            final_norm=np.concatenate([p.final_norm[at] for p, at, _ in spans]),
            embedding=np.concatenate([p.states[0, after] for p, _, after in spans]),
            final=np.concatenate([p.final_norm[after] for p, _, after in spans]),
            argmax=np.concatenate([p.argmax[after] for p, _, after in spans]),
        )

    def state(self, index: int) -> NDArray[np.float32]:
        """State `index` at t, [n, E]."""
        if index == len(self.states) and self.final_norm is not None:
            return self.final_norm
        found: NDArray[np.float32] = self.states[index]
        return found


def _scaled(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [..., E] of root mean square 1, as the draft's norms make them; zero rows stay zero."""
    size = np.linalg.norm(rows, axis=-1, keepdims=True) / np.sqrt(np.float32(rows.shape[-1]))
    return (rows / np.where(size > 0.0, size, 1.0)).astype(np.float32, copy=False)


class ProbeStatistics:
    """Second moments for the regressions of every single state and of the sets named ahead.

    Memory is (3 * states + 2 + pairs of states within sets) * E * E floats.
    """

    def __init__(self, states: int, width: int, sets: Sequence[Members] = ()) -> None:
        self.states, self.width = states, width
        self._pairs = sorted({(a, b) for s in sets for i, a in enumerate(s) for b in s[i + 1 :]})
        square = (width, width)
        self._own = np.zeros((states, *square), np.float32)  # X_t' X_t
        self._embedding = np.zeros((states, width, width + 1), np.float32)  # X_t' [e, 1]
        self._target = np.zeros((states, *square), np.float32)  # X_t' y
        self._cross = np.zeros((len(self._pairs), *square), np.float32)  # X_s' X_t
        self._shared = np.zeros((width + 1, width + 1), np.float32)  # [e, 1]' [e, 1]
        self._shared_target = np.zeros((width + 1, width), np.float32)  # [e, 1]' y
        self._count = np.zeros(1, np.int64)

    @property
    def count(self) -> int:
        """Rows added."""
        return int(self._count[0])

    def add(self, pairs: Pairs) -> None:
        """Add the rows of one prompt, or of several."""
        known = _with_constant(pairs.embedding)
        right = np.concatenate([known, pairs.final], axis=1)  # shape: [n, 2 E + 1]
        split = known.shape[1]

        def add(t: int) -> None:
            rows = _scaled(pairs.state(t))
            self._own[t] += rows.T @ rows
            product = rows.T @ right
            self._embedding[t] += product[:, :split]
            self._target[t] += product[:, split:]
            for k, (a, b) in enumerate(self._pairs):
                if a == t:
                    self._cross[k] += rows.T @ _scaled(pairs.state(b))

        spread(add, range(self.states))
        self._shared += known.T @ known
        self._shared_target += known.T @ pairs.final
        self._count += len(pairs.final)

    def covers(self, members: Members) -> bool:
        """Whether this set was named ahead (single states always are)."""
        return all((a, b) in self._pairs for i, a in enumerate(members) for b in members[i + 1 :])

    def solve(self, members: Members) -> NDArray[np.float32]:
        """Weights [m * E + E + 1, E] of the regression from [states of `members`, embedding, 1]."""
        width = self.width
        size = len(members) * width
        moments = np.zeros((size + width + 1, size + width + 1))
        target = np.zeros((size + width + 1, width))
        for i, a in enumerate(members):
            rows = slice(i * width, (i + 1) * width)
            moments[rows, rows] = self._own[a]
            moments[rows, size:] = self._embedding[a]
            moments[size:, rows] = self._embedding[a].T
            target[rows] = self._target[a]
            for j, b in enumerate(members[i + 1 :], start=i + 1):
                other = slice(j * width, (j + 1) * width)
                cross = self._cross[self._pairs.index((a, b))]
                moments[rows, other], moments[other, rows] = cross, cross.T
        moments[size:, size:], target[size:] = self._shared, self._shared_target
        diagonal = np.arange(size + width + 1)
        moments[diagonal, diagonal] += RIDGE * np.trace(moments) / len(moments)
        weights: NDArray[np.float32] = np.linalg.solve(moments, target).astype(np.float32)
        return weights

    def state(self) -> dict[str, NDArray[Any]]:
        """All that was added, as arrays that `load` takes back and whose sums over processes are the whole."""
        return {name: getattr(self, f"_{name}") for name in _ARRAYS}

    def load(self, state: Arrays) -> None:
        """Continue from what `state` gave."""
        for name in _ARRAYS:
            setattr(self, f"_{name}", state[name])


_ARRAYS = ("own", "embedding", "target", "cross", "shared", "shared_target", "count")


def _with_constant(embedding: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([_scaled(embedding), np.ones((len(embedding), 1), np.float32)], axis=1)


def vocabulary(counts: NDArray[np.integer], size: int = VOCABULARY) -> NDArray[np.int64]:
    """Ascending ids of the tokens a probe may say: those the target preferred most often, then the lowest ids.

    counts [V]: how often each was the target's top token on the prompts fitted. Byte-pair vocabularies number frequent
    tokens first.
    """
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size]).astype(np.int64)


class ProbeScore:
    """Counts agreements of several regressions over held-out rows."""

    def __init__(
        self, weights: Mapping[Members, NDArray[np.float32]], head: NDArray[np.float32], ids: NDArray[np.int64]
    ) -> None:
        self._weights = weights
        self._head = head  # [U, E], the target's output rows of `ids`
        self._ids = ids
        self._right: dict[Members, list[int]] = {members: [] for members in weights}  # by prompt
        self._rows: list[int] = []  # by prompt
        self.sayable = 0  # rows whose token is among `ids`

    def add(self, pairs: Pairs) -> None:
        """Score the rows of one prompt."""
        used = {t for members in self._weights for t in members}
        inputs = {t: _scaled(pairs.state(t)) for t in used}
        known = _with_constant(pairs.embedding)
        for start in range(0, len(pairs.final), _SCORE_ROWS):
            part = slice(start, start + _SCORE_ROWS)
            for members, weights in self._weights.items():
                features = np.concatenate([*(inputs[t][part] for t in members), known[part]], axis=1)
                best = self._ids[np.argmax((features @ weights) @ self._head.T, axis=1)]
                right = int((best == pairs.argmax[part]).sum())
                if start == 0:
                    self._right[members].append(right)
                else:
                    self._right[members][-1] += right
        self._rows.append(len(pairs.final))
        self.sayable += int(np.isin(pairs.argmax, self._ids).sum())

    @property
    def rows(self) -> int:
        """Rows scored."""
        return sum(self._rows)

    @property
    def right(self) -> dict[Members, int]:
        """Rows right, by set."""
        return {members: sum(right) for members, right in self._right.items()}

    def agreement(self) -> dict[Members, float]:
        """Share of rows right by set, 0..1."""
        return {members: right / max(1, self.rows) for members, right in self.right.items()}

    def error(self, members: Members, other: Members | None = None) -> float:
        """Standard error of a set's agreement, or of its lead over another's; rows of one prompt are not independent.

        That of a ratio of sums over prompts (Cochran 1977, 6.3).
        """
        rows = np.array(self._rows, np.float64)
        right = np.array(self._right[members], np.float64)
        if other is not None:
            right -= np.array(self._right[other], np.float64)
        if len(rows) < 2:
            return 0.0
        residual = right - right.sum() / rows.sum() * rows
        return float(np.sqrt(len(rows) / (len(rows) - 1) * np.square(residual).sum()) / rows.sum())


def held_out(prompts: int, *, seed: int, share: float = 0.25) -> frozenset[int]:
    """Prompts that are scored and not fitted: a seeded quarter, at least one where there are two."""
    count = max(1, round(share * prompts)) if prompts > 1 else 0
    return frozenset(np.random.default_rng([seed, 1]).permutation(prompts)[:count].tolist())
