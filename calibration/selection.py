"""Which taps to take, given what was measured. Pure numpy, no I/O.

Taps are numbered 0..L as everywhere: t is the residual stream entering block t, L what leaves the last block before the
final norm. Candidates are 1..L: tap 0, the embeddings, is what the draft reads anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import ConfigError

Score = Callable[[tuple[int, ...]], float]  # of a set of taps, ascending
Prepare = Callable[[Sequence[tuple[int, ...]]], None]  # told which sets will be scored

DEFAULT_CKA_WEIGHT = 0.5
"""Nats that one unit of mean pairwise CKA costs ELSI-C; 0 gives ELSI.

Over pairs of SmolLM2-135M's taps joint entropy and CKA spread alike (standard deviations 0.22 nats and 0.20), so at 0.5
CKA has half the say of entropy: it decides among sets that are nearly as rich, and cannot bring in a poor tap. There
the best pair is {5, 29} at every weight from 0.1 to 2, and {5, 27} without the penalty.
"""

EAGLE3_MIN_BLOCKS = 7  # below, 2, n/2 and n-3 are not three different taps in order


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best set a search found."""

    taps: tuple[int, ...]  # ascending
    score: float
    evaluated: int  # different sets scored


def candidates(blocks: int) -> range:
    """Taps that a rule may choose: 1..L."""
    return range(1, blocks + 1)


def greedy(taps: Sequence[int], m: int, score: Score, prepare: Prepare | None = None) -> Choice:
    """From every seed tap add, m - 1 times, the tap that raises the score of the set most; keep the best set of all.

    Ties go to the lower taps. `prepare` is told which sets will be scored next, to measure them together. Raises
    ConfigError when m does not lie in 1..number of candidates.
    """
    if not 1 <= m <= len(taps):
        raise ConfigError(f"m is {m}, it must lie in 1..{len(taps)}, the number of candidate taps")
    scores: dict[tuple[int, ...], float] = {}

    def scored(members: tuple[int, ...]) -> float:
        if members not in scores:
            scores[members] = score(members)
        return scores[members]

    def grown(members: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tuple(sorted((*members, tap))) for tap in taps if tap not in members]

    def rank(members: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return scored(members), tuple(-t for t in members)

    finals: set[tuple[int, ...]] = {(seed,) for seed in taps}
    for _ in range(m - 1):
        if prepare is not None:
            prepare(sorted({larger for members in finals for larger in grown(members)}))
        finals = {max(grown(members), key=rank) for members in finals}
    best = max(sorted(finals), key=rank)
    return Choice(taps=best, score=scored(best), evaluated=len(scores))


def mean_pairwise_cka(members: Sequence[int], cka: NDArray[np.floating]) -> float:
    """Mean CKA over all pairs of a set, 0 for a single tap. cka [L + 1, L + 1] is indexed by tap."""
    if len(members) < 2:
        return 0.0
    pairs = cka[np.ix_(members, members)][np.triu_indices(len(members), k=1)]
    return float(pairs.mean())


def elsi(blocks: int, m: int, joint_entropy: Score, prepare: Prepare | None = None) -> Choice:
    """ELSI: the set of m taps with the greatest joint matrix entropy (greedy from every seed)."""
    return greedy(candidates(blocks), m, joint_entropy, prepare)


def elsi_c(
    blocks: int,
    m: int,
    joint_entropy: Score,
    cka: NDArray[np.floating],
    *,
    weight: float = DEFAULT_CKA_WEIGHT,
    prepare: Prepare | None = None,
) -> Choice:
    """ELSI-C: as ELSI, scored by joint entropy minus `weight` times the set's mean pairwise CKA, so that the members
    come from different compartments. cka [L + 1, L + 1] is indexed by tap.
    """
    if not weight >= 0.0:
        raise ConfigError(f"the CKA weight is {weight}, it must be at least 0")
    return greedy(candidates(blocks), m, lambda s: joint_entropy(s) - weight * mean_pairwise_cka(s, cka), prepare)


def eagle3_taps(blocks: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high taps, {2, n/2, n-3} (Li et al. 2025). Raises ConfigError for shallow models."""
    if blocks < EAGLE3_MIN_BLOCKS:
        raise ConfigError(
            f"the rule eagle3 needs at least {EAGLE3_MIN_BLOCKS} blocks, the model has {blocks}; "
            "choose with elsi, or name the taps"
        )
    return (2, blocks // 2, blocks - 3)


def uniform(blocks: int, m: int) -> tuple[int, ...]:
    """The rule that looks at nothing: the middles of m equal parts of taps 1..L."""
    if not 1 <= m <= blocks:
        raise ConfigError(f"m is {m}, it must lie in 1..{blocks}, the number of candidate taps")
    return tuple(1 + ((2 * part + 1) * blocks) // (2 * m) for part in range(m))


def low_entropy(entropy: Sequence[float] | NDArray[np.floating], m: int) -> tuple[int, ...]:
    """The control: the m taps of 1..L with the lowest single-tap entropy. entropy [L + 1] is indexed by tap."""
    values = np.asarray(entropy, np.float64)[1:]
    if not 1 <= m <= len(values):
        raise ConfigError(f"m is {m}, it must lie in 1..{len(values)}, the number of candidate taps")
    return tuple(sorted(int(tap) + 1 for tap in np.argsort(values, kind="stable")[:m]))


def explicit(taps: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Taps named by the user, 0..L, ascending. Raises ConfigError for none, repeats, or taps out of range."""
    chosen = tuple(sorted(taps))
    if not chosen:
        raise ConfigError("no taps are given; name at least one")
    if len(set(chosen)) != len(chosen):
        raise ConfigError(f"taps {list(chosen)} repeat; name each once")
    if not (chosen[0] >= 0 and chosen[-1] <= blocks):
        raise ConfigError(f"taps {list(chosen)} must lie in 0..{blocks}, the model has {blocks} blocks")
    return chosen
