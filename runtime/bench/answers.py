"""One turn of one prompt, answered both ways. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from elsi_edge.loops import is_looping
from elsi_edge.runtime.result import GenerationResult


@dataclass(frozen=True, kw_only=True)
class BenchAnswer:
    """Every repeat of both ways, at least one of each."""

    id: str
    category: str
    turn: int  # from 0
    plain_runs: tuple[GenerationResult, ...]
    speculative_runs: tuple[GenerationResult, ...]
    at_s: float = 0.0  # when it was done, seconds since the bench began
    joules: tuple[float, float] | None = None  # plain, speculative, all repeats; None where nothing can be read

    @property
    def plain(self) -> GenerationResult:
        """The first repeat."""
        return self.plain_runs[0]

    @property
    def speculative(self) -> GenerationResult:
        """The first repeat."""
        return self.speculative_runs[0]

    @property
    def repeats(self) -> int:
        """Times that each way answered."""
        return len(self.plain_runs)

    @property
    def plain_seconds(self) -> float:
        """After the first token, all repeats together."""
        return sum(map(decode_seconds, self.plain_runs))

    @property
    def speculative_seconds(self) -> float:
        """After the first token, all repeats together."""
        return sum(map(decode_seconds, self.speculative_runs))

    @property
    def identical(self) -> bool:
        """Whether every repeat of both ways gave the same tokens."""
        return all(run.token_ids == self.plain.token_ids for run in (*self.plain_runs, *self.speculative_runs))

    @property
    def looping(self) -> bool:
        """Whether the plain answer repeats itself."""
        return is_looping(self.plain.token_ids)

    @property
    def speedup(self) -> float | None:
        """Speculative over plain tokens/s without prefill; None for answers of a single token."""
        after_first = [len(one.token_ids) - 1 for one in (self.plain, self.speculative)]
        if min(after_first) < 1:
            return None
        return after_first[1] / self.speculative_seconds / (after_first[0] / self.plain_seconds)

    @property
    def end_to_end(self) -> float:
        """Speculative over plain tokens/s, prefill included."""
        speeds = [
            sum(len(run.token_ids) for run in runs) / sum(map(end_to_end_seconds, runs))
            for runs in (self.plain_runs, self.speculative_runs)
        ]
        return speeds[1] / speeds[0]


def decode_seconds(result: GenerationResult) -> float:
    """Of a generation after its first token."""
    timings = result.timings
    return timings.propose + timings.verify + timings.other


def end_to_end_seconds(result: GenerationResult) -> float:
    """Of a generation from the encoded prompt to the last token."""
    return result.time_to_first_token_ms / 1e3 + decode_seconds(result)


def by_category(answers: Sequence[BenchAnswer]) -> dict[str, list[BenchAnswer]]:
    """Answers by category, in the order in which categories first appear."""
    groups: dict[str, list[BenchAnswer]] = {}
    for answer in answers:
        groups.setdefault(answer.category, []).append(answer)
    return groups
