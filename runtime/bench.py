"""Plain against speculative decoding of the same prompts, answer by answer, so that both see the same machine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elsi_edge.artifacts import PromptRow
from elsi_edge.errors import ConfigError, DataError, PromptError
from elsi_edge.runtime.bench_report import BenchAnswer
from elsi_edge.runtime.options import PROPOSALS, GenerateOptions, Proposal
from elsi_edge.runtime.result import GenerationResult
from elsi_edge.runtime.session import Session

DEFAULT_BENCH_TOKENS = 128  # of an answer
_WARM_UP_TOKENS = 16
_WARM_UP_RUNS = 4  # at most
_STABLE = 0.10  # relative change between warm-up runs under which the machine counts as warm


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured."""

    max_tokens: int = DEFAULT_BENCH_TOKENS  # of each answer
    draft_nodes: int | None = None  # N; None = what pays, by tuning or default
    proposals: tuple[Proposal, ...] = PROPOSALS  # sources of candidates
    exact: bool = True
    repeats: int = 1  # of each answer, plain and speculative

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}, it must be at least 1")

    def options(self, *, plain: bool, max_tokens: int | None = None) -> GenerateOptions:
        """Greedy options of one arm; both arms run the same target graph."""
        return GenerateOptions(
            plain=plain,
            draft_nodes=None if plain else self.draft_nodes,
            proposals=self.proposals,
            exact=self.exact,
            max_tokens=max_tokens or self.max_tokens,
        )


def check_prompts(session: Session, rows: Sequence[PromptRow]) -> None:
    """Raise DataError naming the first prompt whose first turn cannot be run, before anything is measured."""
    options = GenerateOptions()
    for row in rows:
        try:
            session.encode(row.turns[0], options)
        except PromptError as error:
            raise DataError(f"prompt {row.id!r}: {error}") from error


def warm_up(session: Session, row: PromptRow, settings: BenchSettings) -> int:
    """Run both arms until two runs in a row take the same time, within 10 %; how many runs that took."""
    last: list[float] = []
    for run in range(1, _WARM_UP_RUNS + 1):
        seconds = []
        for plain in (True, False):
            result = session.generate(row.turns[0], settings.options(plain=plain, max_tokens=_WARM_UP_TOKENS))
            seconds.append(_decode_seconds(result))
        if last and all(abs(now - then) <= _STABLE * then for now, then in zip(seconds, last, strict=True)):
            return run
        last = seconds
    return _WARM_UP_RUNS


def measure(session: Session, rows: Sequence[PromptRow], settings: BenchSettings) -> Iterator[BenchAnswer]:
    """Answer every turn plain and speculatively, back to back and taking turns at going first.

    Turns of a prompt are played as one conversation, with the plain answers as its history in both arms; turns that no
    longer fit the context are left out. A model without a chat template continues the first turn alone.
    """
    parity = 0
    for row in rows:
        messages: list[Mapping[str, str]] = []
        turns = row.turns if session.codec.has_template else row.turns[:1]
        for number, turn in enumerate(turns):
            messages = [*messages, {"role": "user", "content": turn}]
            prompt = messages if session.codec.has_template else turn
            try:
                answer = _pair(session, row, number, prompt, settings, plain_first=parity % 2 == 0)
            except PromptError:
                if number == 0:
                    raise
                break
            parity += 1
            yield answer
            messages = [*messages, {"role": "assistant", "content": answer.plain.text}]


def _pair(
    session: Session,
    row: PromptRow,
    turn: int,
    prompt: str | Sequence[Mapping[str, str]],
    settings: BenchSettings,
    *,
    plain_first: bool,
) -> BenchAnswer:
    results: dict[bool, list[GenerationResult]] = {True: [], False: []}
    for repeat in range(settings.repeats):
        first = plain_first == (repeat % 2 == 0)
        for plain in (first, not first):
            results[plain].append(session.generate(prompt, settings.options(plain=plain)))
    every = [result.token_ids for arm in results.values() for result in arm]
    return BenchAnswer(
        id=row.id,
        category=row.category or "uncategorised",
        turn=turn,
        plain=results[True][0],
        speculative=results[False][0],
        plain_seconds=sum(map(_decode_seconds, results[True])) / settings.repeats,
        speculative_seconds=sum(map(_decode_seconds, results[False])) / settings.repeats,
        repeats=settings.repeats,
        identical=all(ids == every[0] for ids in every),
    )


def _decode_seconds(result: GenerationResult) -> float:
    timings = result.timings
    return timings.propose + timings.verify + timings.other
