"""Whether the token filter makes prompts agree: the spread of each tap's entropy between prompts, and their order.

Every prompt is measured by itself, on three choices of its positions: all of them ("unfiltered"), the share where the
target is least sure ("filtered"), and as many drawn at random ("random"). Fewer positions alone change entropy and
its variance, so only the filter's lead over the random choice is the filter's.

The entropy of n positions is at most log(n - 1), so that prompts of different lengths differ by their lengths before
they differ by what they say. The comparison is therefore made once more on equally many positions of every prompt:
EQUAL least sure ones ("equal_filtered") and EQUAL drawn at random ("equal_random").
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration.parallel import spread
from elsi_edge.calibration.statistics import FloatArray, Normalisation, normalise, spectrum_entropy

CHOICES = ("unfiltered", "filtered", "random")
EQUAL_CHOICES = ("equal_filtered", "equal_random")
EQUAL = 16  # positions of every prompt in the second comparison; prompts with twice as many take part
PAPER_REDUCTION = (0.484, 0.458, 0.356)  # of the variance in the three bands, Goel et al. 2026
MOST_POSITIONS = 128  # of a prompt measured by itself; longer ones are thinned evenly, to bound the cost

_BANDS = ("early", "middle", "late")
_PAPER_BLOCKS = 36
_PAPER_EDGES = (0, 7, 29, 36)  # of its bands 0-6, 7-28, 29-35
_LEAST_PROMPTS = 3  # between which a variance is worth a number
_LEAST_POSITIONS = 4  # kept positions below which a prompt has no entropy worth the name
_CONSTANT = 1e-10  # share of the second moment below which a variance is rounding
_TINY = 1e-12


def prompt_entropies(states: NDArray[np.floating], normalisation: Normalisation) -> FloatArray:
    """Matrix entropy in nats of every tap over one prompt's rows [taps, n, E], as [taps]; NaN for under four rows
    and for a tap that does not vary over them.

    Works on the Gram matrices [taps, n, n], in float32: right to about 1e-4 nats, far below the spread of prompts.
    """
    taps, count, _ = states.shape
    if count < _LEAST_POSITIONS:
        return np.full(taps, np.nan)
    return _entropies(states, normalisation)


def _entropies(states: NDArray[np.floating], normalisation: Normalisation) -> FloatArray:
    rows = normalise(states, normalisation, np.float32)
    rows = rows / _largest(rows)  # states as they are may pass float32 when squared
    centred = rows - rows.mean(axis=1, keepdims=True)
    varies = np.square(centred).sum(axis=(1, 2)) > _CONSTANT * np.square(rows).sum(axis=(1, 2))
    if normalisation != "raw":
        rows = centred / _largest(centred)
    spectra = np.linalg.eigvalsh(rows @ rows.transpose(0, 2, 1))
    # one direction alone, an entropy of 0, says as little as none
    return np.array([spectrum_entropy(spectra[k]) or np.nan if varies[k] else np.nan for k in range(len(rows))])


def _largest(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each tap, [taps, 1, 1]."""
    largest: NDArray[np.float32] = np.abs(rows).max(axis=(1, 2), keepdims=True)
    return np.maximum(largest, np.float32(_TINY))


def thinned(positions: NDArray[np.intp]) -> NDArray[np.intp]:
    """At most MOST_POSITIONS of them, evenly spaced."""
    if len(positions) <= MOST_POSITIONS:
        return positions
    return positions[np.linspace(0, len(positions) - 1, MOST_POSITIONS).astype(np.intp)]


def bands(blocks: int) -> tuple[tuple[int, int], ...]:
    """The paper's three bands of layers as (first, last) taps, in proportion: 0-5, 6-23 and 24-29 of 30 blocks."""
    edges = [round(edge * blocks / _PAPER_BLOCKS) for edge in _PAPER_EDGES]
    return tuple((low, max(low, high - 1)) for low, high in itertools.pairwise(edges))


def report(entropies: Mapping[str, NDArray[np.floating]], blocks: int) -> dict[str, Any]:
    """Variance between prompts by tap and band, and agreement on the order of taps; empty for under three prompts.

    entropies: by choice of positions, [prompts, L + 1] nats; prompts with a NaN anywhere are left out of all three.
    With EQUAL_CHOICES among them, and at least three prompts that have those, "equal" holds the second comparison.
    """
    kept, prompts = _whole(entropies, CHOICES)
    if prompts < _LEAST_PROMPTS:
        return {}
    by_tap = {choice: values.var(axis=0, ddof=1) for choice, values in kept.items()}
    rows = []
    for name, (first, last), paper in zip(_BANDS, bands(blocks), PAPER_REDUCTION, strict=True):
        mean = {choice: float(values[first : last + 1].mean()) for choice, values in by_tap.items()}
        rows.append(
            {
                "name": name,
                "taps": [first, last],
                **{choice: _rounded(value) for choice, value in mean.items()},
                "reduction": _rounded(1.0 - mean["filtered"] / max(mean["unfiltered"], _TINY)),
                "reduction_random": _rounded(1.0 - mean["random"] / max(mean["unfiltered"], _TINY)),
                "paper": paper,
            }
        )
    order = {choice: _rounded(order_agreement(values[:, 1:])) for choice, values in kept.items()}
    equal = _equal(entropies, blocks) if all(choice in entropies for choice in EQUAL_CHOICES) else {}
    return {
        "bands": rows,
        "by_tap": {choice: [_rounded(v) for v in values] for choice, values in by_tap.items()},
        "order": order,
        "prompts": prompts,
        "text": _words(rows, order) + _equal_words(equal),
        **({"equal": equal} if equal else {}),
    }


def _whole(
    entropies: Mapping[str, NDArray[np.floating]], choices: Sequence[str]
) -> tuple[dict[str, NDArray[np.floating]], int]:
    """Entropies of the prompts that have them for all of these choices, and how many those are."""
    whole = np.all([np.isfinite(entropies[choice]).all(axis=1) for choice in choices], axis=0)
    return {choice: entropies[choice][whole] for choice in choices}, int(whole.sum())


def _equal(entropies: Mapping[str, NDArray[np.floating]], blocks: int) -> dict[str, Any]:
    """Filter against random positions at the same number for every prompt; empty for under three prompts."""
    kept, prompts = _whole(entropies, EQUAL_CHOICES)
    if prompts < _LEAST_PROMPTS:
        return {}
    rows = []
    for name, (first, last) in zip(_BANDS, bands(blocks), strict=True):
        part = slice(first, last + 1)
        filtered, random = (float(kept[choice][:, part].var(axis=0, ddof=1).mean()) for choice in EQUAL_CHOICES)
        rows.append(
            {
                "name": name,
                "taps": [first, last],
                "filtered": _rounded(filtered),
                "random": _rounded(random),
                "reduction_over_random": _rounded(1.0 - filtered / max(random, _TINY)),
            }
        )
    order = {choice.removeprefix("equal_"): _rounded(order_agreement(values[:, 1:])) for choice, values in kept.items()}
    return {"positions": EQUAL, "prompts": prompts, "bands": rows, "order": order}


def order_agreement(values: NDArray[np.floating]) -> float:
    """Mean Spearman correlation between the rows [prompts, taps] over all pairs of prompts; 1 when all agree."""
    ranks = ranked(values)
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=1, keepdims=True)
    unit = ranks / np.where(norms > 0.0, norms, 1.0)
    count = len(unit)
    return float((np.square(unit.sum(axis=0)).sum() - np.square(unit).sum()) / (count * (count - 1)))


def ranked(values: NDArray[np.floating]) -> FloatArray:
    """Ranks of each row's entries, ties sharing their mean rank."""
    below = (values[:, None, :] < values[:, :, None]).sum(axis=2)
    same = (values[:, None, :] == values[:, :, None]).sum(axis=2)
    ranks: FloatArray = below + (same - 1) / 2.0
    return ranks


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two equally long rows."""
    return order_agreement(np.array([a, b], np.float64))


def _words(rows: Sequence[Mapping[str, Any]], order: Mapping[str, float]) -> str:
    ours = " / ".join(f"{-row['reduction']:+.0%}" for row in rows)
    control = " / ".join(f"{-row['reduction_random']:+.0%}" for row in rows)
    paper = " / ".join(f"{-row['paper']:+.1%}" for row in rows)
    better = order["filtered"] - order["unfiltered"]
    agree = "agree more" if better > 0.02 else "agree less" if better < -0.02 else "agree about as much"
    return (
        f"Keeping the least sure positions changes the variance between prompts by {ours} in the early, middle and "
        f"late band (paper: {paper}); as many positions drawn at random change it by {control}. Prompts {agree} on the "
        f"order of the taps with the filter (mean rank correlation {order['filtered']:.2f} against "
        f"{order['unfiltered']:.2f} without it and {order['random']:.2f} at random)."
    )


def _equal_words(equal: Mapping[str, Any]) -> str:
    if not equal:
        return ""
    changes = " / ".join(f"{-row['reduction_over_random']:+.0%}" for row in equal["bands"])
    return (
        f" On exactly {equal['positions']} positions of each of {equal['prompts']} prompts, whatever their lengths, "
        f"the least sure ones change the variance by {changes} against random ones; rank correlation "
        f"{equal['order']['filtered']:.2f} against {equal['order']['random']:.2f}."
    )


def _rounded(value: float) -> float:
    return round(float(value), 6)


@dataclass(frozen=True, kw_only=True)
class ByItself:
    """One prompt that is measured by itself."""

    index: int
    states: NDArray[np.floating]  # [taps, T, E]
    chosen: Mapping[str, NDArray[np.intp]]  # positions by choice


@dataclass(kw_only=True)
class PromptEntropies:
    """Entropies of prompts measured by themselves, gathered as they stream by; [prompts, L + 1] by choice."""

    values: dict[str, FloatArray]

    @classmethod
    def empty(cls, prompts: int, taps: int) -> "PromptEntropies":
        """NaN for every prompt that was not measured."""
        return cls(values={choice: np.full((prompts, taps), np.nan) for choice in (*CHOICES, *EQUAL_CHOICES)})

    def add(self, prompts: Sequence[ByItself], how: Normalisation) -> None:
        """Measure some prompts, on several threads."""

        def measure(item: tuple[ByItself, str]) -> None:
            prompt, choice = item
            rows = prompt.states[:, thinned(prompt.chosen[choice])]
            self.values[choice][prompt.index] = prompt_entropies(rows, how)

        spread(measure, [(prompt, choice) for prompt in prompts for choice in prompt.chosen])
