"""What proposing costs, in tokens. Pure, no I/O.

A round brings E tokens in C milliseconds, and rounds differ. The tokens per millisecond over many rounds are greatest
when every round maximises E - rate * C, with `rate` the tokens per millisecond of the best policy itself (Dinkelbach's
treatment of a fractional programme; a renewal-reward argument). So a candidate is worth its place while the
probability that it is accepted exceeds its marginal milliseconds times the rate: its price. Choosing candidates one by
one under that rule is greedy, since what a draft's next call will say is known by its distribution only.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elsi_edge.artifacts import Precision
from elsi_edge.runtime.options import MAX_DRAFT_NODES


@dataclass(frozen=True, kw_only=True)
class Price:
    """Prices of one round, in tokens."""

    nodes: tuple[float, ...]  # by number of drafted nodes 0..MAX_DRAFT_NODES: of verifying so many beside the root
    entry: float = 0.0  # of the draft's first call in a round
    level: float = 0.0  # of each further one

    def node(self, count: int) -> float:
        """Of the `count`-th drafted node (from 1), beside those before it."""
        return self.nodes[count] - self.nodes[count - 1]

    def least_node(self, budget: int) -> float:
        """Of the cheapest of `budget` drafted nodes: one less likely is worth its place in no tree of so many."""
        return self._least[budget]

    @functools.cached_property
    def _least(self) -> tuple[float, ...]:
        steps = (after - before for before, after in itertools.pairwise(self.nodes))
        return (0.0, *itertools.accumulate(steps, min))

    def mean_node(self, count: int) -> float:
        """Of one of `count` drafted nodes."""
        return self.nodes[count] / count if count else 0.0


FREE = Price(nodes=(0.0,) * (MAX_DRAFT_NODES + 1))  # every node is taken: a budget that the user named


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a device takes for the parts of a round, as measured, or as guessed before that; in any one unit of time."""

    contexts: tuple[int, ...]  # tokens in the cache at which verifying was timed, ascending, one or two
    verify: tuple[tuple[float, ...], ...]  # by context, by rows 1..R; as long as the last row goes on beyond R
    entry: float  # the draft's first call in a round
    level: float  # each further one

    def rows(self, count: int, past: int) -> float:
        """Of verifying `count` rows after `past` cached tokens: linear between contexts, and beyond them."""
        row = min(count, len(self.verify[0])) - 1
        first = self.verify[0][row]
        if len(self.contexts) > 1:
            slope = (self.verify[1][row] - first) / (self.contexts[1] - self.contexts[0])
            first += max(0.0, slope) * (past - self.contexts[0])
        return max(first, 1e-9)

    def price(self, speedup: float, past: int) -> Price:
        """Prices when rounds bring `speedup` tokens in the time of one plain step."""
        plain = self.rows(1, past)
        nodes = [speedup * (self.rows(1 + count, past) / plain - 1.0) for count in range(len(FREE.nodes))]
        for count in range(1, len(nodes)):
            nodes[count] = max(nodes[count], nodes[count - 1])  # more rows never cost less, whatever noise says
        return Price(nodes=tuple(nodes), entry=speedup * self.entry / plain, level=speedup * self.level / plain)


# Until the device is measured: milliseconds relative to one row, on two cores of a server CPU. A device that is richer
# in compute has flatter curves, so what pays here pays there.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_TYPICAL: Mapping[Precision, Sequence[float]] = {
    "fp32": (1.0, 1.12, 1.20, 1.23, 1.31, 1.53, 1.80, 2.21, 3.80),
    "int8": (1.0, 1.30, 1.53, 1.72, 2.08, 2.40, 3.10, 3.81, 6.6),
    "int4": (1.0, 1.32, 1.68, 1.93, 2.46, 2.98, 4.00, 5.02, 9.1),
}
_TYPICAL_DRAFT: Mapping[Precision, tuple[float, float]] = {  # the first call of a round, each further one
    "fp32": (0.06, 0.03),
    "int8": (0.11, 0.06),
    "int4": (0.12, 0.07),
}
# The same with the native operators.
_NATIVE: Mapping[Precision, Sequence[float]] = {
    "fp32": _TYPICAL["fp32"],
    "int8": (1.0, 1.05, 1.09, 1.16, 1.32, 1.52, 1.95, 2.50, 4.4),
    "int4": (1.0, 1.02, 1.09, 1.14, 1.33, 1.51, 2.00, 2.64, 4.7),
}
_NATIVE_DRAFT: Mapping[Precision, tuple[float, float]] = {
    "fp32": _TYPICAL_DRAFT["fp32"],
    "int8": (0.12, 0.06),
    "int4": (0.13, 0.07),
}


def typical(precision: Precision, *, native: bool = False) -> Costs:
    """Costs to go by until the device is measured, relative to one plain step; `native` with the native operators."""
    curves, drafts = (_NATIVE, _NATIVE_DRAFT) if native else (_TYPICAL, _TYPICAL_DRAFT)
    rows = interpolate(dict(zip(_ROWS, curves[precision], strict=True)), MAX_DRAFT_NODES + 1)
    entry, level = drafts[precision]
    return Costs(contexts=(256,), verify=(rows,), entry=entry, level=level)


def fixed(precision: Precision) -> Costs:
    """The same for graphs of fixed size, where verifying costs as much for one row as for all."""
    entry, level = _TYPICAL_DRAFT[precision]
    return Costs(contexts=(256,), verify=((1.0,),), entry=entry, level=level)


def interpolate(measured: Mapping[int, float], rows: int) -> tuple[float, ...]:
    """Values at 1..rows from values at some: linear between, and beyond with the slope of the last two."""
    known = sorted(measured)
    values = []
    for row in range(1, rows + 1):
        right = next((i for i, at in enumerate(known) if at >= row), len(known) - 1)
        right = max(right, min(1, len(known) - 1))
        low, high = known[max(0, right - 1)], known[right]
        share = (row - low) / (high - low) if high > low else 0.0
        values.append(measured[low] + share * (measured[high] - measured[low]))
    return tuple(values)
