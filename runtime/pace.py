"""Whether speculation pays right now, and at what price: an average of real tokens per millisecond, with hysteresis."""

from dataclasses import dataclass

from elsi_edge.runtime.price import FREE, Costs, Price

_HALF_LIFE = 64.0  # tokens after which a round counts half, in the speed and in a plain step's time alike
_PLAIN_WEIGHT = 16.0  # plain rounds that what was known before counts for
_OUTLIER = 2.0  # times what is expected that a round counts for at most: what the machine did meanwhile is no cost
_OFF_BELOW = 0.92  # of plain speed: switch off; rounds are too uneven to see less
_LEAST_TOKENS = 48  # seen before that is decided
_BREAK = 32  # tokens without candidates after switching off; doubled each time, up to
_LONGEST_BREAK = 512
_PROBE_EVERY = 64  # rounds after which one without candidates refreshes the plain step's time
_FIRST_PLAIN = 2  # rounds without candidates that a session begins with, to learn that time
_SPEEDUPS = (1.0, 1.6)  # that prices follow: a loop's speed is no measure for the text after it
_NEWS = 0.02  # how far a round moves the price


@dataclass(kw_only=True)
class Clock:
    """What a session remembers between generations: the time of a plain step, ms; None before any."""

    plain_ms: float | None = None


class Pace:
    """Prices for each round of one generation; here none, so that every round drafts its whole budget."""

    switched_off = 0  # times that speculation was found slower than plain decoding

    def price(self, cached: int) -> Price | None:
        """Price of candidates after `cached` tokens; None: no candidates in this round."""
        return FREE

    def note(self, *, tokens: int, nodes: int, milliseconds: float) -> None:
        """One round is done: tokens it brought, nodes it verified, wall-clock time it took."""


class FixedPace(Pace):
    """Prices that depend on tuning and context alone, so that what is drafted does not depend on the clock."""

    def __init__(self, costs: Costs, speedup: float) -> None:
        self._costs, self._speedup = costs, speedup
        self._at, self._price = -1, FREE

    def price(self, cached: int) -> Price | None:
        """Prices at this context; those of up to 63 tokens back are good enough, and cost nothing."""
        if self._at != cached >> 6:
            self._at, self._price = cached >> 6, self._costs.price(self._speedup, cached)
        return self._price


class LivePace(FixedPace):
    """Follows the clock: real speed corrects the price, and switches speculation off and on again.

    The speed of all rounds is held against the time of those without candidates, averaged over the same stretch of
    tokens, so that a machine that grows slower does not count against speculation.
    """

    def __init__(self, costs: Costs, speedup: float, clock: Clock) -> None:
        super().__init__(costs, speedup)
        self._clock = clock
        self._tokens = self._ms = 0.0  # decayed sums over rounds since speculation was switched on
        self._seen = 0  # tokens since then
        self._plain = [0.0, 0.0]  # decayed number of plain rounds and their milliseconds
        if clock.plain_ms is not None:
            self._plain = [_PLAIN_WEIGHT, _PLAIN_WEIGHT * clock.plain_ms]
        self._since_plain = 0  # rounds
        self._break, self._left = _BREAK, 0  # tokens: of the next break, of this one
        self.switched_off = 0

    def price(self, cached: int) -> Price | None:
        """None during a break, and in rounds that refresh the plain step's time."""
        if self._left > 0 or self._plain[0] < _FIRST_PLAIN or self._since_plain >= _PROBE_EVERY:
            return None
        return super().price(cached)

    def note(self, *, tokens: int, nodes: int, milliseconds: float) -> None:
        """Average the round in, and decide."""
        decay = 0.5 ** (tokens / _HALF_LIFE)
        known = self._clock.plain_ms
        self._since_plain += 1
        if nodes == 0:
            self._since_plain = 0
            one = milliseconds if known is None else min(milliseconds, _OUTLIER * known)
            count, total = self._plain
            if self._plain[0] < _FIRST_PLAIN:  # the first is cold
                self._plain = [count + 1.0, (count + 1.0) * (one if known is None else min(one, known))]
            else:
                keep = max(decay, 1.0 - 1.0 / _PLAIN_WEIGHT)
                self._plain = [keep * count + 1.0, keep * total + one]
            self._clock.plain_ms = known = self._plain[1] / self._plain[0]
        if known is None:
            return
        if self._left > 0:
            self._left = max(0, self._left - tokens)
            return
        if self._tokens == 0.0:  # on probation: as fast as plain until shown
            self._tokens, self._ms, self._seen = _HALF_LIFE / 2, _HALF_LIFE / 2 * known, 0
        self._seen += tokens
        self._tokens = self._tokens * decay + tokens
        self._ms = self._ms * decay + min(milliseconds, _OUTLIER * known * (1 + nodes))
        speedup = self._tokens / self._ms * known
        if speedup < _OFF_BELOW and self._seen >= _LEAST_TOKENS:
            self._left, self._break = self._break, min(2 * self._break, _LONGEST_BREAK)
            self._tokens = 0.0
            self.switched_off += 1
        else:
            low, high = _SPEEDUPS
            self._speedup += _NEWS * (min(max(speedup, low), high) - self._speedup)
