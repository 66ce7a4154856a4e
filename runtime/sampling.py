"""Choosing a token from logits: greedy, or sampled after filters in a documented order. Pure numpy, no I/O.

Order: repetition penalty, temperature, top_k, top_p, min_p; each of the last three keeps a set of tokens, and the
probabilities of what is left are renormalised after each. The random number of a token depends on the seed and the
token's place in the answer alone, so a speculative run draws the same numbers as a plain one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elsi_edge.runtime.options import GenerateOptions

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: dividing by them only overflows


def is_greedy(options: GenerateOptions) -> bool:
    """Whether the options leave nothing to chance."""
    return options.temperature < GREEDY_BELOW


def distribution(
    logits: NDArray[np.float32], options: GenerateOptions
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids [K] and probabilities [K] that sampling draws from, most likely first (ties by lower id).

    `logits` [V]. With a greedy temperature K is 1.
    """
    if is_greedy(options):
        return np.array([int(np.argmax(logits))]), np.ones(1)
    kept = _top_k_ids(logits, options.top_k)
    scaled = logits[kept].astype(np.float64)
    scaled = (scaled - scaled[0]) / options.temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    if options.top_p < 1.0:
        before = np.cumsum(probabilities) - probabilities
        before[0] = -1.0  # the top token always stays
        kept, probabilities = _keep(kept, probabilities, before < options.top_p)
    if options.min_p > 0.0:
        enough = probabilities >= options.min_p * probabilities[0]
        if options.min_p >= 1.0:
            enough[1:] = False  # the top token alone, also where others tie with it
        kept, probabilities = _keep(kept, probabilities, enough)
    return kept, probabilities


def choose(logits: NDArray[np.float32], options: GenerateOptions, *, seed: int, index: int) -> int:
    """The token for place `index` of the answer (0 = its first token), from `logits` [V]."""
    if is_greedy(options):
        return int(np.argmax(logits))
    kept, probabilities = distribution(logits, options)
    drawn = np.random.Generator(np.random.Philox(key=seed, counter=index)).random()
    place = int(np.searchsorted(np.cumsum(probabilities), drawn, side="right"))
    return int(kept[min(place, len(kept) - 1)])


class Chooser:
    """Tokens of one generation, place after place.

    Every token chosen becomes part of the answer, so the penalty sees what plain decoding would see, however many
    tokens a verification brings.
    """

    def __init__(self, options: GenerateOptions, *, seed: int, prompt_ids: Sequence[int]) -> None:
        self._options, self._seed = options, seed
        self._seen: set[int] | None = None if options.repetition_penalty == 1.0 else set(prompt_ids)
        self._mask: NDArray[np.bool_] | None = None  # [V] of the tokens seen

    @property
    def greedy(self) -> bool:
        """Whether every choice is the largest logit as it is, of equal ones the lowest token."""
        return is_greedy(self._options) and self._seen is None

    def __call__(self, logits: NDArray[np.float32], index: int) -> int:
        """The token for place `index`, from `logits` [V]."""
        if self._seen is None:
            return choose(logits, self._options, seed=self._seed, index=index)
        if self._mask is None:
            self._mask = np.zeros(len(logits), np.bool_)
            self._mask[list(self._seen)] = True
        penalised = penalise(logits, self._mask, self._options.repetition_penalty)
        token = choose(penalised, self._options, seed=self._seed, index=index)
        self._mask[token] = True
        return token


def penalise(logits: NDArray[np.float32], seen: NDArray[np.bool_], penalty: float) -> NDArray[np.float32]:
    """Logits [V] where those of tokens `seen` [V] are divided by `penalty`, negative ones multiplied.

    CTRL (arXiv 1909.05858, section 4.1) in the form that transformers has.
    """
    factor = np.float32(penalty)
    result: NDArray[np.float32] = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
    return result


def _top_k_ids(logits: NDArray[np.float32], top_k: int) -> NDArray[np.int64]:
    """Ids of the top_k largest logits, largest first, ties by lower id; all of them when top_k is 0."""
    if 0 < top_k < len(logits):
        threshold = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
        candidates = np.flatnonzero(logits >= threshold)  # ties at the threshold can make these more than top_k
    else:
        candidates = np.arange(len(logits))
        top_k = len(logits)
    order = np.argsort(-logits[candidates], kind="stable")[:top_k]
    return candidates[order].astype(np.int64)


def _keep(
    ids: NDArray[np.int64], probabilities: NDArray[np.float64], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    left = probabilities[mask]
    return ids[mask], left / left.sum()
