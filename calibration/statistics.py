"""What is measured on hidden states: matrix entropy, joint entropy of sets, the token filter. Pure numpy, no I/O.

Matrix entropy of states X [n, E] is the Shannon entropy, in nats, of the eigenvalues of their covariance, scaled to sum
to one (von Neumann entropy; Giraldo et al. 2014, Skean et al. 2025). exp(entropy) is an effective number of directions.

Normalisations:
- "unit" (default): rows scaled to unit norm, then centred. A few early tokens carry norms a hundred times the median
  (massive activations, Sun et al. 2024); unscaled, one such row is the whole covariance.
- "centered": centred covariance of the states as they are.
- "raw": second moment, not centred.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration.parallel import spread
from elsi_edge.errors import ConfigError, SelectionError

Normalisation = Literal["unit", "centered", "raw"]
Side = Literal["auto", "feature", "sample"]
FloatArray = NDArray[np.float64]

NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)


def spectrum_entropy(eigenvalues: NDArray[np.floating]) -> float:
    """Shannon entropy in nats of eigenvalues scaled to sum to one; rounding below zero is cut off."""
    positive = np.clip(np.asarray(eigenvalues, np.float64), 0.0, None)
    total = positive.sum()
    if not total > 0.0:
        raise SelectionError("a spectrum without any positive eigenvalue has no entropy")
    shares = positive[positive > 0.0] / total
    return float(-(shares * np.log(shares)).sum())


def normalise(
    states: NDArray[np.floating], normalisation: Normalisation, dtype: type[np.floating] = np.float64
) -> NDArray[Any]:
    """Rows of states [..., n, E] as the normalisation wants them before centring, in `dtype`; zero rows stay zero."""
    if normalisation not in NORMALISATIONS:
        raise ConfigError(f"normalisation is {normalisation!r}, it must be one of {', '.join(NORMALISATIONS)}")
    rows = np.asarray(states, dtype)
    if normalisation != "unit":
        return rows
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(norms > 0.0, norms, dtype(1.0))


def centred(
    states: NDArray[np.floating], normalisation: Normalisation, dtype: type[np.floating] = np.float64
) -> NDArray[Any]:
    """Rows of states [..., n, E] normalised, and with their mean over n taken off unless "raw" is asked for."""
    rows = normalise(states, normalisation, dtype)
    return rows if normalisation == "raw" else rows - rows.mean(axis=-2, keepdims=True)


def keep_positions(entropy: NDArray[np.floating], *, keep: float, skip: int) -> NDArray[np.intp]:
    """Ascending positions of one prompt that count: from `skip` on, the `keep` share where the target is least sure.

    entropy [T]: the target's predictive entropy per position, nats. At least one position stays where any is left after
    `skip`; ties go to the earlier position.
    """
    eligible = np.arange(min(skip, len(entropy)), len(entropy))
    if keep >= 1.0 or not len(eligible):
        return eligible
    count = kept_count(len(eligible), keep)
    order = np.argsort(-entropy[eligible], kind="stable")
    return np.sort(eligible[order[:count]])


def kept_count(eligible: int, keep: float) -> int:
    """How many of a prompt's `eligible` positions the `keep` share is: at least one where there is any."""
    return max(1, round(keep * eligible)) if eligible and keep < 1.0 else eligible


def random_positions(kept: int, *, length: int, skip: int, seed: int) -> NDArray[np.intp]:
    """Ascending positions of one prompt, as many as were kept, drawn evenly from `skip` on: the filter's control."""
    eligible = np.arange(min(skip, length), length)
    return np.sort(np.random.default_rng(seed).choice(eligible, size=min(kept, len(eligible)), replace=False))


def joint_entropy(states: NDArray[np.floating], normalisation: Normalisation = "unit", *, side: Side = "auto") -> float:
    """Matrix entropy in nats of taps set side by side: states [m, n, E] as rows of width m * E.

    Works on the covariance [mE, mE] or the Gram matrix [n, n], whose non-zero spectra are equal; the Gram matrix of a
    concatenation is the sum of the taps' Gram matrices. "auto" takes the smaller.
    """
    return _entropy_of_rows(centred(states, normalisation), side)


def _entropy_of_rows(rows: NDArray[np.floating], side: Side = "auto") -> float:
    taps, count, width = rows.shape
    if count < 2:
        raise SelectionError(f"joint entropy needs at least two positions, there is {count}; give more prompts")
    if side == "sample" or (side == "auto" and count < taps * width):
        matrix = rows[0] @ rows[0].T
        for tap in rows[1:]:
            matrix += tap @ tap.T
    else:
        wide = rows.transpose(1, 0, 2).reshape(count, taps * width)
        matrix = wide.T @ wide
    return spectrum_entropy(np.linalg.eigvalsh(matrix.astype(np.float64)))


class SetEntropy:
    """Joint entropies of subsets of the same centred rows [taps, n, E], each set measured once.

    In float32, which a search over hundreds of sets needs, entropies are right to about 1e-5 nats.
    """

    def __init__(self, rows: NDArray[np.floating]) -> None:
        self.rows = rows  # shape: [taps, n, E]
        self._known: dict[tuple[int, ...], float] = {}

    @property
    def measured(self) -> int:
        """Different sets measured so far."""
        return len(self._known)

    def unknown(self, sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those of some sets that were not measured yet, each once, in order."""
        return sorted(set(sets) - set(self._known))

    def prepare(self, sets: Sequence[tuple[int, ...]]) -> None:
        """Measure several sets on several threads."""
        new = self.unknown(sets)
        self._known.update(zip(new, spread(lambda taps: _entropy_of_rows(self.rows[list(taps)]), new), strict=True))

    def __call__(self, taps: tuple[int, ...]) -> float:
        """Joint entropy in nats of the states at `taps`."""
        if taps not in self._known:
            self._known[taps] = _entropy_of_rows(self.rows[list(taps)])
        return self._known[taps]


def centre_in_place(states: NDArray[np.float32], normalisation: Normalisation) -> None:
    """`centred`, for states [taps, n, E] too large to hold twice; "raw" stays as it is."""

    def centre(tap: NDArray[np.float32]) -> None:
        tap[...] = centred(tap, normalisation)

    spread(centre, list(states))
