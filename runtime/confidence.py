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
_FADE = 0.02  # how far a round moves them back to the prior, so that a draft left alone is tried again


class DraftConfidence:
    """Distribution of the greatest probability that the draft gives, by depth (the last for all that are deeper)."""

    def __init__(self, prior: tuple[tuple[float, ...], ...] | None = None) -> None:
        self._prior = PRIOR if prior is None else prior
        self._shares = [list(shares) for shares in self._prior]

    def note(self, depth: int, top: float) -> None:
        """Count one call at `depth` (1 = the first level)."""
        shares = self._shares[min(depth, len(self._shares)) - 1]
        place = min(bisect_left(TOPS, top), len(TOPS) - 1)
        shares[:] = [share * (1.0 - _NEWS) for share in shares]
        shares[place] += _NEWS

    def fade(self) -> None:
        """Move a little towards the prior: once a round."""
        for shares, prior in zip(self._shares, self._prior, strict=True):
            shares[:] = [share + _FADE * (to - share) for share, to in zip(shares, prior, strict=True)]

    def gain(self, depth: int, reach: float, price: float, *, instead: float) -> float:
        """Tokens that a call at `depth` can be expected to add, on a path of probability `reach`, a node costing
        `price`, where a candidate of probability `instead` is there without it."""
        shares = self._shares[min(depth, len(self._shares)) - 1]
        sure = max(0.0, reach * instead - price)
        after = 0.0
        for share, top in zip(shares, _MIDDLES, strict=True):  # several times a round, with cold caches: no generator
            worth = reach * top - price
            after += share * (worth if worth > sure else sure)
        return after - sure
