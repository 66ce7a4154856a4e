"""Prompt lookup: what followed the longest earlier match of the last tokens, in the prompt and the answer so far.

Positions with the same last two tokens are chained from the latest back, as deflate chains its hashes (RFC 1951,
section 4), and a look-up walks at most CANDIDATES of them: appending is O(1), a look-up bounded, and the index takes
under 300 bytes a token. Prompt lookup decoding and REST (arXiv 2311.08252) propose from such matches.
"""

from collections.abc import Iterable
from typing import NamedTuple

SHORTEST = 2  # tokens of a match at least
LONGEST = 24  # tokens compared at most
CANDIDATES = 32  # earlier positions looked at
_BITS = 32  # of a token id in a key

# Matches by length, from FROM[i] tokens on: how often their continuation was right on SmolLM2's own greedy answers.
FROM = (2, 3, 4, 5, 7, 10, 16)
PRIOR = (0.58, 0.62, 0.73, 0.77, 0.85, 0.88, 0.98)
_PRIOR_WEIGHT = 6.0  # trials that a prior counts for
_FADE = 0.97  # weight that a trial loses with each later one of its kind


class Match(NamedTuple):
    """An earlier occurrence of the last tokens."""

    token: int  # that followed it
    length: int  # tokens that agree, SHORTEST..LONGEST


class NgramIndex:
    """Tokens so far, and where their last two occurred before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # pair of tokens -> the last place where its second one stands
        self._earlier: list[int] = []  # by place: the place before it with the same pair, -1 for none

    def append(self, token: int) -> None:
        """Add one token."""
        place = len(self.tokens)
        self.tokens.append(token)
        if place == 0:
            self._earlier.append(-1)
            return
        key = self.tokens[place - 1] << _BITS | token
        self._earlier.append(self._latest.get(key, -1))
        self._latest[key] = place

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens."""
        for token in tokens:
            self.append(token)

    def truncate(self, length: int) -> None:
        """Forget everything but the first `length` tokens."""
        tokens = self.tokens
        while len(tokens) > length:
            place = len(tokens) - 1
            earlier = self._earlier.pop()
            if place > 0:
                key = tokens[place - 1] << _BITS | tokens[place]
                if earlier < 0:
                    del self._latest[key]
                else:
                    self._latest[key] = earlier
            tokens.pop()

    def matches(self, width: int = 1) -> list[Match]:
        """Up to `width` different continuations of the end, longest match first, of equal ones the latest."""
        tokens = self.tokens
        last = len(tokens) - 1
        found: dict[int, int] = {}  # continuation -> length of its longest match
        place = self._earlier[last] if last > 0 else -1
        for _ in range(CANDIDATES):
            if place < 0:
                break
            length, most = SHORTEST, min(LONGEST, place + 1)
            while length < most and tokens[place - length] == tokens[last - length]:
                length += 1
            token = tokens[place + 1]
            if length > found.get(token, 0):
                found[token] = length
                if length == LONGEST and width == 1:
                    break
            place = self._earlier[place]
        if len(found) > 1:
            best = sorted(found.items(), key=lambda item: -item[1])  # stable: the latest first among equals
            return [Match(token, length) for token, length in best[:width]]
        return [Match(token, length) for token, length in found.items()]


def kind(length: int) -> int:
    """Index into FROM of a match of `length` tokens."""
    found = len(FROM) - 1
    while FROM[found] > length:
        found -= 1
    return found


class NgramRecord:
    """How often matches of each kind were right lately, over a prior from other text."""

    def __init__(self, prior: tuple[float, ...] = PRIOR) -> None:
        self._prior = prior
        self.reset()

    def reset(self) -> None:
        """Back to the prior."""
        self._right = [0.0] * len(FROM)
        self._tried = [0.0] * len(FROM)

    def note(self, length: int, right: bool) -> None:
        """Count one match."""
        one = kind(length)
        self._right[one] = self._right[one] * _FADE + right
        self._tried[one] = self._tried[one] * _FADE + 1.0

    def probability(self, length: int) -> float:
        """That the continuation of a match of this length is right."""
        one = kind(length)
        return (self._prior[one] * _PRIOR_WEIGHT + self._right[one]) / (_PRIOR_WEIGHT + self._tried[one])
