"""What is summed up while states stream by: covariances of every tap, and a reservoir of positions."""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration.parallel import spread
from elsi_edge.calibration.statistics import FloatArray, Normalisation, normalise, spectrum_entropy
from elsi_edge.errors import SelectionError

_CONSTANT = 1e-10  # share of the second moment below which a variance is rounding
Arrays = Mapping[str, NDArray[Any]]


class CovarianceAccumulator:
    """Covariance of every tap, streamed over rows; memory is taps * (E + 1) * E doubles."""

    def __init__(self, names: tuple[str, ...], width: int, normalisation: Normalisation = "unit") -> None:
        self.names = names  # of the taps, for messages
        self.normalisation = normalisation
        self.count = 0  # rows added
        self._second = np.zeros((len(names), width, width))  # shape: [taps, E, E], sum of outer products
        self._sum = np.zeros((len(names), width))  # shape: [taps, E]

    def add(self, states: NDArray[np.floating]) -> None:
        """Add rows of all taps, [taps, n, E]; many at a time, since thin products only move memory.

        Raises SelectionError naming the tap for NaN or infinity.
        """
        self.require_finite(states)

        def add(tap: int) -> None:
            scaled = normalise(states[tap], self.normalisation)
            self._second[tap] += scaled.T @ scaled
            self._sum[tap] += scaled.sum(axis=0)

        spread(add, range(len(self.names)))
        self.count += states.shape[1]

    def require_finite(self, states: NDArray[np.floating]) -> None:
        """Raise SelectionError naming the first tap of [taps, n, E] that has NaN or infinity."""
        finite = np.isfinite(states).all(axis=(1, 2))
        if not finite.all():
            name = self.names[int(np.argmin(finite))]
            raise SelectionError(f"{name} has NaN or infinite states; load the model in float32 or bfloat16")

    def mean(self, tap: int) -> FloatArray:
        """Mean row [E] of one tap, normalised; zeros where rows are not centred."""
        mean: FloatArray = self._sum[tap] / max(1, self.count)
        return np.zeros_like(mean) if self.normalisation == "raw" else mean

    def covariance(self, tap: int) -> FloatArray:
        """Covariance [E, E] of one tap. Raises SelectionError for under two rows or a constant tap."""
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

    def state(self) -> dict[str, NDArray[Any]]:
        """All that was added, as arrays that `load` takes back and whose sums over processes are the whole."""
        return {"second": self._second, "sum": self._sum, "count": np.array([self.count])}

    def load(self, state: Arrays) -> None:
        """Continue from what `state` gave."""
        self._second, self._sum, self.count = state["second"], state["sum"], int(state["count"][0])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The reservoir's content, in the order of prompts and positions."""

    states: NDArray[np.float32]  # [taps, R, E]
    where: tuple[tuple[int, int], ...]  # (prompt, position) of each row
    order: NDArray[np.intp]  # [R] rows by rising key: the first k of them are the sample of size k


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
            slot = self._slot(key, prompt, position)
            if slot is not None:
                self._states[:, slot] = states[:, row]

    def _slot(self, key: float, prompt: int, position: int) -> int | None:
        """Where a row goes that has this key, None when it stays outside."""
        if len(self._heap) < self.size:
            slot = len(self._heap)
            heapq.heappush(self._heap, (-key, prompt, position, slot))
            return slot
        if key >= -self._heap[0][0]:
            return None
        slot = self._heap[0][3]
        heapq.heapreplace(self._heap, (-key, prompt, position, slot))
        return slot

    def sample(self, size: int | None = None) -> Sample:
        """What was kept so far, or what a reservoir of `size` would have kept; a copy."""
        kept = sorted(self._heap, reverse=True)[:size]
        entries = sorted((prompt, position, slot, -key) for key, prompt, position, slot in kept)
        return Sample(
            states=self._states[:, [slot for _, _, slot, _ in entries]],
            where=tuple((prompt, position) for prompt, position, _, _ in entries),
            order=np.argsort([key for *_, key in entries], kind="stable"),
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """The content as arrays: keys [r], where [r, 2] and states [taps, r, E]."""
        slots = [slot for *_, slot in self._heap]
        return {
            "keys": np.array([-key for key, *_ in self._heap], np.float64),
            "where": np.array([(prompt, position) for _, prompt, position, _ in self._heap], np.int64).reshape(-1, 2),
            "states": self._states[:, slots],
        }

    def merge(self, states: Iterable[Arrays]) -> None:
        """Offer the contents of other reservoirs of the same seed."""
        for state in states:
            for row, (key, (prompt, position)) in enumerate(
                zip(state["keys"].tolist(), state["where"].tolist(), strict=True)
            ):
                slot = self._slot(key, prompt, position)
                if slot is not None:
                    self._states[:, slot] = state["states"][:, row]
