"""Sets of taps: what a second tap adds, the greedy sets of each size, and how far greedy is from the best.

A joint entropy costs one eigen-decomposition, so sets are measured on the reservoir alone: `full` is all of its rows,
`screen` a nested eighth on which every pair fits into seconds.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration import selection, stability
from elsi_edge.calibration.analysis import Search
from elsi_edge.calibration.parallel import count, spread
from elsi_edge.calibration.settings import Advance, Progress, no_progress
from elsi_edge.calibration.statistics import FloatArray, SetEntropy

CLOSE = 50  # best sets by the screen that are measured on all rows
CLOSE_PAIRS = 6  # the same, when sets are only to be shown
ALL_SETS = 5000  # sets up to which all are screened; beyond, those that extend the CLOSE best one smaller
GROWN = 3  # triples grown from the best pair that are measured on all rows, when sets are only to be shown
WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)  # of CKA, swept

Set = tuple[int, ...]
_TOGETHER = 4  # sets on each thread between two steps of the progress bar
_RIVALS = 10  # sets whose wins are counted


class Sets:
    """Joint entropies of sets on the reservoir, by number of rows."""

    def __init__(self, rows: NDArray[np.float32], order: NDArray[np.intp], blocks: int) -> None:
        """rows [L + 1, R, E] centred; order [R] rows by key, of which any first k are a sample too."""
        count = rows.shape[1]
        self.blocks = blocks
        self.full = SetEntropy(rows)
        self._order = order
        self.screen = self.full if count < 128 else SetEntropy(rows[:, np.sort(order[: count // 8])])

    @property
    def rows(self) -> int:
        """Positions that `full` is measured on."""
        return int(self.full.rows.shape[1])

    @property
    def screen_rows(self) -> int:
        """Positions that `screen` is measured on."""
        return int(self.screen.rows.shape[1])

    def half(self, taps: Set) -> float:
        """Joint entropy in nats on half of the rows."""
        half = np.sort(self._order[: max(2, self.rows // 2)])
        return SetEntropy(self.full.rows[list(taps)][:, half])(tuple(range(len(taps))))

    def gains(self, progress: Progress = no_progress) -> FloatArray:
        """Nats that each partner (column) adds to each seed (row), [L + 1, L + 1]; NaN at tap 0 and on the diagonal."""
        found = np.full((self.blocks + 1, self.blocks + 1), np.nan)
        pool = [*((t,) for t in range(1, self.blocks + 1)), *pairs_of(self.blocks)]
        _measure(self.screen, pool, "measure pairs of taps", progress)
        for a, b in itertools.combinations(selection.candidates(self.blocks), 2):
            joint = self.screen((a, b))
            found[a, b], found[b, a] = joint - self.screen((a,)), joint - self.screen((b,))
        return found


@dataclass(frozen=True, kw_only=True)
class Found:
    """The sets of one size."""

    search: Search
    close: tuple[Set, ...]  # the best by `full`, best first


def pairs_of(blocks: int) -> list[Set]:
    """All pairs of candidates."""
    return list(itertools.combinations(selection.candidates(blocks), 2))


def show_pairs(sets: Sets) -> Found:
    """The best pair, found on the screen and confirmed among the closest on all rows."""
    pairs = pairs_of(sets.blocks)
    greedy = selection.elsi(sets.blocks, 2, sets.screen, sets.screen.prepare).taps
    return _found(sets, greedy, _best(pairs, sets.screen, CLOSE_PAIRS), math.comb(sets.blocks, 2), quick=True)


def show_triples(sets: Sets, pair: Set) -> Found:
    """A good triple: the best pair with the tap that adds most, on half of the rows and confirmed on all.

    Not the rule's own answer, which asks from every seed on all rows and takes minutes. The screen will not do: on an
    eighth of the rows three taps' entropies all lie near the logarithm of that number.
    """
    grown = [_with(pair, t) for t in selection.candidates(sets.blocks) if t not in pair]
    scores = dict(zip(grown, spread(sets.half, grown), strict=True))
    best = sorted(grown, key=lambda s: (-scores[s], s))[:GROWN]
    return _found(sets, best[0], best, math.comb(sets.blocks, 3), quick=True)


def best_sets(sets: Sets, m: int, greedy: Set, progress: Progress) -> Found:
    """How far the greedy set of m taps is from the best: every pair, or the CLOSE best by the screen, on all rows."""
    taps = selection.candidates(sets.blocks)
    total = math.comb(len(taps), m)
    if m == 2:
        pool = pairs_of(sets.blocks)
    else:
        candidates = list(itertools.combinations(taps, m)) if total <= ALL_SETS else _extended(sets, m, progress)
        _measure(sets.screen, candidates, f"screen sets of {m}", progress)
        pool = _best(candidates, sets.screen, CLOSE)
    _measure(sets.full, pool, f"measure sets of {m}", progress)
    return _found(sets, greedy, pool, total)


def _measure(score: SetEntropy, pool: list[Set], what: str, progress: Progress) -> None:
    new = score.unknown(pool)
    if new:
        with progress(what, float(len(new)), "sets") as bar:
            measure(score, new, bar)


def measure(score: SetEntropy, pool: Sequence[Set], bar: Advance) -> None:
    """Measure the sets that are not known yet, some at a time; those alone count as progress."""
    new, together = score.unknown(pool), _TOGETHER * count()
    for start in range(0, len(new), together):
        part = new[start : start + together]
        score.prepare(part)
        bar.advance(len(part))


def _extended(sets: Sets, m: int, progress: Progress) -> list[Set]:
    taps = selection.candidates(sets.blocks)
    pool = pairs_of(sets.blocks)
    for _ in range(m - 2):
        _measure(sets.screen, pool, "screen smaller sets", progress)
        pool = sorted({_with(s, t) for s in _best(pool, sets.screen, CLOSE) for t in taps if t not in s})
    return pool


def _with(members: Set, tap: int) -> Set:
    return tuple(sorted((*members, tap)))


def _best(pool: list[Set], score: SetEntropy, count: int) -> list[Set]:
    score.prepare(pool)
    return sorted(pool, key=lambda s: (-score(s), s))[:count]


def _found(sets: Sets, greedy: Set, pool: list[Set], total: int, *, quick: bool = False) -> Found:
    ranked = _best(sorted({*pool, greedy}), sets.full, CLOSE)
    best = ranked[0]
    return Found(
        search=Search(
            m=len(greedy),
            greedy=greedy,
            greedy_entropy=round(sets.full(greedy), 6),
            best=best,
            best_entropy=round(sets.full(best), 6),
            compared=len({*pool, greedy}),
            total=total,
            rows=sets.rows,
            half_entropy=round(sets.half(best), 6),
            quick=quick,
        ),
        close=tuple(ranked),
    )


def sweep(sets: Sets, m: int, cka: FloatArray) -> list[dict[str, object]]:
    """ELSI-C's set by weight of its CKA penalty, measured on the screen."""
    found = []
    for weight in WEIGHTS:
        choice = selection.elsi_c(sets.blocks, m, sets.screen, cka, weight=weight, prepare=sets.screen.prepare)
        found.append({"weight": weight, "taps": list(choice.taps)})
    return found


def rivals(sets: Sets, chosen: Set, penalty: Callable[[Set], float]) -> tuple[Set, ...]:
    """The best sets that differ from the chosen one in one tap, by joint entropy on the screen less `penalty`."""
    outside = [tap for tap in selection.candidates(sets.blocks) if tap not in chosen]
    pool = [_with(tuple(t for t in chosen if t != out), tap) for out in chosen for tap in outside]
    sets.screen.prepare(pool)
    return tuple(sorted(pool, key=lambda s: (penalty(s) - sets.screen(s), s))[: _RIVALS - 1])


def wins(
    sets: Sets,
    close: tuple[Set, ...],
    prompt: NDArray[np.intp],
    *,
    seed: int,
    chosen: Set = (),
    penalty: Callable[[Set], float] = lambda _: 0.0,
) -> list[dict[str, object]]:
    """How often each of the best sets wins when prompts are drawn anew, by joint entropy less `penalty`, nats.

    prompt [R] of each row of the reservoir. The `chosen` set is listed whether it wins or not.
    """
    best = close[:_RIVALS]
    if chosen and chosen not in best:
        best = (*best[: _RIVALS - 1], chosen)
    influences = np.array(spread(lambda taps: _influence(sets, taps), best))
    scores = [sets.full(taps) - penalty(taps) for taps in best]
    found = stability.resampled(scores, influences, prompt, total=sets.rows)
    return stability.set_shares(best, found.wins(seed=seed), always=chosen)


def _influence(sets: Sets, taps: Set) -> FloatArray:
    wide = sets.full.rows[list(taps)].transpose(1, 0, 2).reshape(sets.rows, -1)  # shape: [R, m * E]
    if sets.rows >= wide.shape[1]:
        values, vectors = np.linalg.eigh((wide.T @ wide).astype(np.float64) / sets.rows)
        return stability.influence(wide, values, vectors)
    # The sample side: its eigenvectors are the rows' coordinates along those of the covariance, scaled.
    values, left = np.linalg.eigh((wide @ wide.T).astype(np.float64))
    values = np.clip(values, 0.0, None)
    return stability.influence_of_squares([np.square(left) * values], values / sets.rows)
