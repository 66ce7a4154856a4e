"""What is measured on hidden states: matrix entropy, joint entropy of sets, linear CKA. Pure numpy, no I/O.

Matrix entropy of states X [n, E] is the Shannon entropy, in nats, of the eigenvalues of their covariance, scaled to sum
to one (von Neumann entropy; Giraldo et al. 2014, Skean et al. 2025). exp(entropy) is an effective number of directions.

Normalisations:
- "unit" (default): rows scaled to unit norm, then centred. A few early tokens carry norms a hundred times the median
  (massive activations, Sun et al. 2024); unscaled, one such row is the whole covariance.
- "centered": centred covariance of the states as they are.
- "raw": second moment, not centred.
"""

import heapq
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import ConfigError, SelectionError

Normalisation = Literal["unit", "centered", "raw"]
Side = Literal["auto", "feature", "sample"]
FloatArray = NDArray[np.float64]

NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)

_CONSTANT = 1e-10  # share of the second moment below which a variance is rounding
_FLUSH_ROWS = 512  # rows gathered before a covariance update: thin products would only move memory
_GRAM_ROWS = 64  # rows of all Gram matrices alive at a time in linear_cka


def spectrum_entropy(eigenvalues: NDArray[np.floating]) -> float:
    """Shannon entropy in nats of eigenvalues scaled to sum to one; rounding below zero is cut off."""
    positive = np.clip(np.asarray(eigenvalues, np.float64), 0.0, None)
    total = positive.sum()
    if not total > 0.0:
        raise SelectionError("a spectrum without any positive eigenvalue has no entropy")
    shares = positive[positive > 0.0] / total
    return float(-(shares * np.log(shares)).sum())


def normalise(states: NDArray[np.floating], normalisation: Normalisation) -> FloatArray:
    """Rows of states [..., n, E] as the normalisation wants them before centring; zero rows stay zero."""
    if normalisation not in NORMALISATIONS:
        raise ConfigError(f"normalisation is {normalisation!r}, it must be one of {', '.join(NORMALISATIONS)}")
    rows = np.asarray(states, np.float64)
    if normalisation != "unit":
        return rows
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(norms > 0.0, norms, 1.0)


def _centred(states: NDArray[np.floating], normalisation: Normalisation) -> FloatArray:
    rows = normalise(states, normalisation)
    return rows if normalisation == "raw" else rows - rows.mean(axis=-2, keepdims=True)


def keep_positions(entropy: NDArray[np.floating], *, keep: float, skip: int) -> NDArray[np.intp]:
    """Ascending positions of one prompt that count: from `skip` on, the `keep` share where the target is least sure.

    entropy [T]: the target's predictive entropy per position, nats. At least one position stays where any is left after
    `skip`; ties go to the earlier position.
    """
    eligible = np.arange(min(skip, len(entropy)), len(entropy))
    if keep >= 1.0 or not len(eligible):
        return eligible
    count = max(1, round(keep * len(eligible)))
    order = np.argsort(-entropy[eligible], kind="stable")
    return np.sort(eligible[order[:count]])


class CovarianceAccumulator:
    """Covariance of every tap, streamed over rows; memory is taps * E * E doubles."""

    def __init__(self, names: tuple[str, ...], width: int, normalisation: Normalisation = "unit") -> None:
        self.names = names  # of the taps, for messages
        self.normalisation = normalisation
        self.count = 0  # rows added
        self._second = np.zeros((len(names), width, width))  # shape: [taps, E, E], sum of outer products
        self._sum = np.zeros((len(names), width))  # shape: [taps, E]
        self._waiting: list[NDArray[np.floating]] = []
        self._waiting_rows = 0

    def add(self, states: NDArray[np.floating]) -> None:
        """Add rows of all taps, [taps, n, E]. Raises SelectionError naming the tap for NaN or infinity."""
        finite = np.isfinite(states).all(axis=(1, 2))
        if not finite.all():
            name = self.names[int(np.argmin(finite))]
            raise SelectionError(f"{name} has NaN or infinite states; load the model in float32 or bfloat16")
        self._waiting.append(states)
        self._waiting_rows += states.shape[1]
        self.count += states.shape[1]
        if self._waiting_rows >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = np.concatenate(self._waiting, axis=1)
        self._waiting, self._waiting_rows = [], 0
        for tap in range(len(self.names)):
            scaled = normalise(rows[tap], self.normalisation)
            self._second[tap] += scaled.T @ scaled
            self._sum[tap] += scaled.sum(axis=0)

    def covariance(self, tap: int) -> FloatArray:
        """Covariance [E, E] of one tap. Raises SelectionError for under two rows or a constant tap."""
        self._flush()
        if self.count < 2:
            raise SelectionError(f"entropy needs at least two kept positions, there is {self.count}; give more prompts")
        mean = self._sum[tap] / self.count
        second = self._second[tap] / self.count
        variance = np.trace(second) - mean @ mean
        if not variance > _CONSTANT * np.trace(second):
            raise SelectionError(
                f"{self.names[tap]} is constant over the {self.count} kept positions; its entropy says nothing"
            )
        centred: FloatArray = second if self.normalisation == "raw" else second - np.outer(mean, mean)
        return centred

    def entropies(self) -> FloatArray:
        """Matrix entropy of every tap in nats, [taps]."""
        return np.array([spectrum_entropy(np.linalg.eigvalsh(self.covariance(t))) for t in range(len(self.names))])


def joint_entropy(states: NDArray[np.floating], normalisation: Normalisation = "unit", *, side: Side = "auto") -> float:
    """Matrix entropy in nats of taps set side by side: states [m, n, E] as rows of width m * E.

    Works on the covariance [mE, mE] or the Gram matrix [n, n], whose non-zero spectra are equal; the Gram matrix of a
    concatenation is the sum of the taps' Gram matrices. "auto" takes the smaller.
    """
    return _entropy_of_rows(_centred(states, normalisation), side)


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
    """Joint entropies of subsets of the same states [taps, n, E], each set measured once.

    Products are made in float32, which a search over hundreds of sets needs: entropies are right to about 1e-5 nats.
    """

    def __init__(self, states: NDArray[np.floating], normalisation: Normalisation = "unit") -> None:
        self._rows = np.stack(
            [_centred(tap, normalisation).astype(np.float32) for tap in states]
        )  # shape: [taps, n, E]
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, taps: tuple[int, ...]) -> float:
        """Joint entropy in nats of the states at `taps`."""
        if taps not in self._known:
            self._known[taps] = _entropy_of_rows(self._rows[list(taps)])
        return self._known[taps]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The reservoir's content, in the order of prompts and positions."""

    states: NDArray[np.float32]  # [taps, R, E]
    where: tuple[tuple[int, int], ...]  # (prompt, position) of each row


class Reservoir:
    """A uniform sample of at most `size` kept positions, the same whatever the order in which prompts arrive.

    Every position draws its key from (seed, prompt, position); the `size` smallest keys stay.
    Memory is taps * size * E floats.
    """

    def __init__(self, taps: int, width: int, *, size: int = 2048, seed: int = 0) -> None:
        self.size = size
        self._seed = seed
        self._states = np.zeros((taps, size, width), np.float32)  # shape: [taps, R, E]
        self._heap: list[tuple[float, int, int, int]] = []  # (-key, prompt, position, slot): largest key on top

    def add(self, prompt: int, positions: NDArray[np.intp], states: NDArray[np.floating]) -> None:
        """Offer the kept rows of one prompt: positions [n] and states [taps, n, E]."""
        if not len(positions):
            return
        keys = np.random.default_rng([self._seed, prompt]).random(int(positions[-1]) + 1)[positions]
        for row, (key, position) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
            if len(self._heap) < self.size:
                slot = len(self._heap)
                heapq.heappush(self._heap, (-key, prompt, position, slot))
            elif key < -self._heap[0][0]:
                slot = self._heap[0][3]
                heapq.heapreplace(self._heap, (-key, prompt, position, slot))
            else:
                continue
            self._states[:, slot] = states[:, row]

    def sample(self) -> Sample:
        """What was kept so far."""
        entries = sorted((prompt, position, slot) for _, prompt, position, slot in self._heap)
        return Sample(
            states=self._states[:, [slot for _, _, slot in entries]],
            where=tuple((prompt, position) for prompt, position, _ in entries),
        )


def linear_cka(
    states: NDArray[np.floating], normalisation: Normalisation = "unit", *, debiased: bool = False
) -> FloatArray:
    """Linear CKA between all taps of states [taps, n, E], as [taps, taps] in 0..1 with ones on the diagonal.

    HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) on centred linear kernels (Kornblith et al. 2019). `debiased` uses the
    unbiased HSIC estimator (Song et al. 2012), which does not see likeness between independent taps when n is small;
    it can fall below zero, where it is set to zero. Gram matrices are made a few rows at a time.
    """
    taps, count, _ = states.shape
    if count < 4:
        raise SelectionError(f"CKA needs at least four positions, there are {count}; give more prompts")
    rows = np.stack([_centred(tap, "centered" if normalisation == "raw" else normalisation) for tap in states])
    inner = np.zeros((taps, taps))  # sums of products of Gram entries
    row_sums = np.zeros((taps, count))
    for start in range(0, count, _GRAM_ROWS):
        block = np.matmul(rows[:, start : start + _GRAM_ROWS], rows.transpose(0, 2, 1))  # shape: [taps, rows, n]
        if debiased:
            local = np.arange(block.shape[1])
            block[:, local, start + local] = 0.0
        row_sums[:, start : start + block.shape[1]] = block.sum(axis=2)
        flat = block.reshape(taps, -1)
        inner += flat @ flat.T
    if debiased:
        totals = row_sums.sum(axis=1)
        inner += np.outer(totals, totals) / ((count - 1) * (count - 2)) - 2.0 / (count - 2) * row_sums @ row_sums.T
    return _cosine(np.clip(inner, 0.0, None))


def _cosine(hsic: FloatArray) -> FloatArray:
    own = np.sqrt(np.diag(hsic))
    scale = np.outer(own, own)
    cka = np.divide(hsic, scale, out=np.zeros_like(hsic), where=scale > 0.0)
    np.fill_diagonal(cka, 1.0)
    bounded: FloatArray = np.clip(cka, 0.0, 1.0)
    return bounded
