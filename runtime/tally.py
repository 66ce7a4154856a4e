"""Running counts of a generation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from elsi_edge.runtime.decode import Round
from elsi_edge.runtime.result import SourceCounts
from elsi_edge.runtime.tree import Source, Tree

_DRAFT: Source = "draft"


@dataclass(kw_only=True)
class Tally:
    """Sums over rounds."""

    verifications: int = 0
    emitted: int = 0  # tokens that verifications brought and the answer used
    drafted: int = 0
    empty: int = 0  # rounds without candidates
    by_depth: list[int] = field(default_factory=list)
    propose: float = 0.0  # seconds
    verify: float = 0.0
    _nodes: list[tuple[Tree, tuple[int, ...]]] = field(default_factory=list)  # with the rows that were accepted

    def add(self, one: Round, used: int) -> None:
        """Count a round of whose tokens the answer used the first `used`."""
        self.verifications += 1
        self.emitted += used
        self.drafted += one.drafted
        self.empty += one.drafted == 0
        self.propose += one.seconds_propose
        self.verify += one.seconds_target
        accepted = min(used, len(one.tokens) - 1)  # drafts beyond the answer's end do not count
        for depth in range(accepted):
            if depth == len(self.by_depth):
                self.by_depth.append(0)
            self.by_depth[depth] += 1
        if one.drafted:
            self._nodes.append((one.tree, one.rows[1 : accepted + 1]))  # counted when the answer has ended

    def by_source(self) -> Mapping[Source, SourceCounts]:
        """Of every source that proposed anything."""
        drafted: Counter[tuple[Source, int]] = Counter()
        accepted: Counter[tuple[Source, int]] = Counter()
        for tree, rows in self._nodes:
            sources = tree.sources or (_DRAFT,) * tree.size
            drafted.update(zip(sources, tree.depths()[1:].tolist(), strict=True))
            accepted.update((sources[row - 1], depth) for depth, row in enumerate(rows, start=1))
        names: tuple[Source, ...] = ("draft", "ngram", "both")
        return {name: _counts(name, drafted, accepted) for name in names if any(key[0] == name for key in drafted)}


def _counts(
    name: Source, drafted: Mapping[tuple[Source, int], int], accepted: Mapping[tuple[Source, int], int]
) -> SourceCounts:
    deepest = max(depth for source, depth in drafted if source == name)
    nodes, right = (
        tuple(counts.get((name, depth), 0) for depth in range(1, deepest + 1)) for counts in (drafted, accepted)
    )
    return SourceCounts(drafted=sum(nodes), accepted=sum(right), drafted_by_depth=nodes, accepted_by_depth=right)
