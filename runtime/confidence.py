"""What the draft's next call can be expected to bring, from how sure it was lately. Pure, no I/O."""

from bisect import bisect_left

# Shares of the draft's greatest probability by depth, in bins up to TOPS: SmolLM2's draft on its own greedy answers.
TOPS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)
_MIDDLES = (0.07, 0.15, 0.27, 0.42, 0.57, 0.72, 0.88, 0.98)
PRIOR = (
    (0.053, 0.196, 0.281, 0.184, 0.108, 0.081, 0.066, 0.031),
    (0.070, 0.214, 0.280, 0.174, 0.111, 0.067, 0.051, 0.033),
)
_NEWS = 0.05  # how far a call moves the shares, once they have settled
_TINY = 1e-100  # a scale below which it is multiplied out
_FADE = 0.02  # how far a round moves them back to the prior, so that a draft left alone is tried again


class DraftConfidence:
    """Distribution of the greatest probability that the draft gives, by depth (the last for all that are deeper)."""

    def __init__(self, prior: tuple[tuple[float, ...], ...] | None = None) -> None:
        self._prior = PRIOR if prior is None else prior
        # By depth: shares are `weight` times the prior and `scale` times what calls counted, so that a call moves one
        # of them and a round none. Lists made anew several times a round cost more, with cold caches.
        depths = len(self._prior)
        self._weight, self._scale = [1.0] * depths, [1.0] * depths
        self._counted = [[0.0] * len(shares) for shares in self._prior]

    def note(self, depth: int, top: float) -> None:
        """Count one call at `depth` (1 = the first level)."""
        one = min(depth, len(self._scale)) - 1
        self._weight[one] *= 1.0 - _NEWS
        self._scale[one] *= 1.0 - _NEWS
        if self._scale[one] < _TINY:
            self._counted[one] = [count * self._scale[one] for count in self._counted[one]]
            self._scale[one] = 1.0
        self._counted[one][min(bisect_left(TOPS, top), len(TOPS) - 1)] += _NEWS / self._scale[one]

    def fade(self) -> None:
        """Move a little towards the prior: once a round."""
        for one in range(len(self._scale)):
            self._weight[one] += _FADE * (1.0 - self._weight[one])
            self._scale[one] *= 1.0 - _FADE

    def gain(self, depth: int, reach: float, price: float, *, instead: float) -> float:
        """Tokens that a call at `depth` can be expected to add, on a path of probability `reach`, a node costing
        `price`, where a candidate of probability `instead` is there without it."""
        one = min(depth, len(self._scale)) - 1
        weight, scale = self._weight[one], self._scale[one]
        sure = max(0.0, reach * instead - price)
        after = 0.0
        for share, counted, top in zip(self._prior[one], self._counted[one], _MIDDLES, strict=True):
            worth = reach * top - price
            after += (weight * share + scale * counted) * (worth if worth > sure else sure)
        return after - sure
