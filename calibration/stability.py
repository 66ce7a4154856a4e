"""How much a choice depends on which prompts were taken: a bootstrap over prompts, made linear.

Drawing prompts anew and measuring again would cost an eigen-decomposition per tap and draw, and a draw's repeats would
lower every entropy. Instead each kept position's *influence* on a tap's entropy (its first-order effect, the
infinitesimal jackknife: Efron 1982; Davison and Hinkley 1997, 2.7) is summed by prompt; resampled entropies are then
normal with the covariance of those sums. With covariance C = tau * rho of rows x and entropy S = -tr(rho log rho),

    influence(x) = -(x' log(rho) x + S * x'x) / tau,

whose mean over the rows is zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.calibration.analysis import Settling
from elsi_edge.calibration.statistics import FloatArray

RESAMPLES = 1000
STABLE_SHARE = 0.80  # of resamples that a stable pick wins
LEAST_PROMPTS = 8  # under which nothing is said about stability
_NORMAL_95 = 1.959964
_ROWS = 256  # rows turned at a time
_FLOOR = 1e-15  # share of the spectrum under which a direction is rounding


@dataclass(frozen=True, kw_only=True)
class Resampled:
    """Entropies and what prompts do to them."""

    entropy: FloatArray  # [k] nats
    covariance: FloatArray  # [k, k] of the entropies over draws of prompts
    prompts: int  # that rows came from

    def intervals(self) -> list[tuple[float, float]]:
        """95 % intervals (low, high), nats."""
        half = _NORMAL_95 * np.sqrt(np.clip(np.diag(self.covariance), 0.0, None))
        return [(float(a), float(b)) for a, b in zip(self.entropy - half, self.entropy + half, strict=True)]

    def wins(self, *, seed: int, eligible: NDArray[np.bool_] | None = None) -> FloatArray:
        """Share of RESAMPLES draws in which each entry is the highest, [k]; `eligible` [k] says who may win."""
        values, vectors = np.linalg.eigh(self.covariance)
        # Negative values are noise of a sampled estimate. The root is symmetric, since eigenvectors of values that lie
        # close turn with rounding and their product does not.
        root = (vectors * np.sqrt(np.clip(values, 0.0, None))) @ vectors.T
        draws = self.entropy + np.random.default_rng(seed).standard_normal((RESAMPLES, len(values))) @ root
        if eligible is not None:
            draws[:, ~eligible] = -np.inf
        return np.bincount(np.argmax(draws, axis=1), minlength=len(values)) / RESAMPLES


def influence(rows: NDArray[np.floating], values: FloatArray, vectors: FloatArray) -> FloatArray:
    """Influence [n] of centred rows [n, D] on the entropy of the covariance with these eigenpairs [D], [D, D]."""
    turned = vectors.astype(rows.dtype)
    return influence_of_squares(
        (np.square(rows[at : at + _ROWS] @ turned) for at in range(0, len(rows), _ROWS)), values
    )


def influence_of_squares(squares: Iterable[NDArray[np.floating]], values: FloatArray) -> FloatArray:
    """The same from squared coordinates along the eigenvectors, [rows, D] of some rows at a time."""
    total = values.sum()
    shares = np.clip(values, 0.0, None) / total
    real = shares > _FLOOR
    logs = np.log(np.where(real, shares, 1.0))
    weights = np.where(real, (shares * logs).sum() - logs, 0.0) / total
    found: FloatArray = np.concatenate([square.astype(np.float64) @ weights for square in squares])
    return found


def resampled(entropy: Sequence[float], influences: FloatArray, prompt: NDArray[np.intp], *, total: int) -> Resampled:
    """Entropies [k] with their covariance over draws of prompts, from influences [k, n] of n sampled rows.

    prompt [n] says which prompt a row belongs to; the rows are a uniform sample of `total`. The sum over a prompt is
    estimated from its sampled rows: products of two different rows stand for 1 / f^2 such pairs, a row with itself for
    1 / f, where f = n / total. That can come out near or below zero by chance, so no variance is put below what rows
    that know nothing of each other would have. The influences are not centred: over all rows their mean is zero, and
    taking off the sample's would take off part of the variance.
    """
    count = influences.shape[1]
    names, place = np.unique(prompt, return_inverse=True)
    sums = np.zeros((len(entropy), len(names)))
    for k, row in enumerate(influences):
        sums[k] = np.bincount(place, weights=row, minlength=len(names))
    fraction = min(1.0, count / max(total, 1))
    own = influences @ influences.T
    covariance = (sums @ sums.T - (1.0 - fraction) * own) / count**2
    np.fill_diagonal(covariance, np.maximum(np.diag(covariance), fraction * np.diag(own) / count**2))
    if len(names) > 1:
        covariance *= len(names) / (len(names) - 1)
    return Resampled(entropy=np.asarray(entropy, np.float64), covariance=covariance, prompts=len(names))


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What more positions would do to the pick, from an earlier look at the same run."""

    settled: bool  # the earlier look and the extrapolation pick the same tap
    earlier: int  # tap picked at about half of the positions
    limit: int  # tap picked by entropies extrapolated to many positions
    entropy: tuple[float, ...]  # nats, those entropies, by tap


def outlook(looks: Sequence[Settling]) -> Outlook | None:
    """Compare the last look with the one at about half of its positions; None where there is no other.

    An entropy measured on n positions is too low by about D / 2n (D directions; the bias of an entropy's plug-in
    estimate, Miller 1955), more for richer taps. Two looks give the limit: (n2 H2 - n1 H1) / (n2 - n1).
    """
    if len(looks) < 2:
        return None
    last = looks[-1]
    half = min(looks[:-1], key=lambda look: abs(look.tokens - last.tokens / 2))
    if half.tokens >= last.tokens:
        return None
    late, early = np.array(last.entropy), np.array(half.entropy)
    limit = (last.tokens * late - half.tokens * early) / (last.tokens - half.tokens)
    tap = 1 + int(np.argmax(limit[1:]))
    return Outlook(
        settled=half.tap == last.tap == tap,
        earlier=half.tap,
        limit=tap,
        entropy=tuple(round(float(value), 4) for value in limit),
    )


def describe(
    wins: FloatArray, pick: int, prompts: int, look: Outlook | None, *, chosen: bool = True
) -> tuple[bool, str]:
    """Whether the single tap picked is stable, and one or two sentences. wins [L + 1] is indexed by tap.

    `chosen` says that this tap is the selection; where it is another, or a set, the sentences say what they are about.
    """
    if prompts < LEAST_PROMPTS:
        return (
            False,
            f"{prompts} prompts are too few to say whether tap {pick} is stable; give at least {LEAST_PROMPTS}.",
        )
    share = float(wins[pick])
    what = "Tap" if chosen else "Of single taps, tap"
    text = f"{what} {pick} is the highest in {share:.0%} of {RESAMPLES} resamples of the {prompts} prompts"
    rivals = [int(t) for t in np.argsort(-wins, kind="stable") if t != pick and wins[t] >= 0.01][:3]
    if rivals:
        text += "; " + ", ".join(f"tap {t} in {wins[t]:.0%}" for t in rivals)
    settled = look is None or look.settled
    if share >= STABLE_SHARE and settled:
        same = ", half of the prompts alone give the same pick, and it leads when extrapolated to many positions"
        more = "" if look is None else same
        return True, f"{text}{more}. The {'' if chosen else 'single-tap '}pick is stable."
    near = wins[max(1, pick - 1) : pick + 2].sum()
    if look is not None and look.earlier != pick:
        text += f". About half of the prompts pick tap {look.earlier}, so it is not settled"
    elif look is not None and look.limit != pick:
        text += f". Extrapolated to many positions tap {look.limit} would lead, so it is not settled"
    elif near >= STABLE_SHARE:
        text += f". Not stable to the tap, but it and its neighbours win {near:.0%}, so little hangs on which"
    else:
        text += ". Not stable"
    return False, text + ": more prompts may settle it (--until-stable)."


def set_shares(best: Sequence[tuple[int, ...]], wins: FloatArray, always: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Which sets win how often, most often first; those that never win are left out, but for `always`."""
    found = [
        {"taps": list(taps), "share": round(float(share), 4)}
        for taps, share in zip(best, wins, strict=True)
        if share > 0 or taps == always
    ]
    return sorted(found, key=lambda item: -item["share"])
