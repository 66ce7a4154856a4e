"""Running counts of a generation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from elsi_edge.runtime.decode import Round
from elsi_edge.runtime.result import SourceCounts
from elsi_edge.runtime.tree import Source

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
    _drafted: Counter[tuple[Source, int]] = field(default_factory=Counter)
    _accepted: Counter[tuple[Source, int]] = field(default_factory=Counter)

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
        if not one.drafted:
            return
        sources = one.tree.sources or (_DRAFT,) * one.drafted
        for key in zip(sources, one.tree.depths()[1:].tolist(), strict=True):
            self._drafted[key] += 1
        for depth, row in enumerate(one.rows[1 : accepted + 1], start=1):
            self._accepted[sources[row - 1], depth] += 1

    def by_source(self) -> Mapping[Source, SourceCounts]:
        """Of every source that proposed anything."""
        names: tuple[Source, ...] = ("draft", "ngram", "both")
        return {name: self._counts(name) for name in names if any(key[0] == name for key in self._drafted)}

    def _counts(self, name: Source) -> SourceCounts:
        deepest = max(depth for source, depth in self._drafted if source == name)
        drafted, accepted = (
            tuple(counts[name, depth] for depth in range(1, deepest + 1)) for counts in (self._drafted, self._accepted)
        )
        return SourceCounts(
            drafted=sum(drafted), accepted=sum(accepted), drafted_by_depth=drafted, accepted_by_depth=accepted
        )
