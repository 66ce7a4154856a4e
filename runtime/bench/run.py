"""Plain against speculative decoding of the same prompts, answer by answer, so that both see the same machine."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elsi_edge.artifacts import PromptRow
from elsi_edge.errors import ConfigError, DataError, PromptError
from elsi_edge.runtime.bench.answers import BenchAnswer, decode_seconds
from elsi_edge.runtime.bench.energy import EnergyMeter
from elsi_edge.runtime.options import PROPOSALS, GenerateOptions, Proposal
from elsi_edge.runtime.result import GenerationResult
from elsi_edge.runtime.session import Session

DEFAULT_BENCH_TOKENS = 128  # of an answer
MAX_SECONDS = 86_400
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
    seconds: float = 0.0  # go over the prompts again and again for so long; 0 = once

    def __post_init__(self) -> None:
        if self.max_tokens == 1:
            raise ConfigError("--max-tokens is 1, and speeds are of the tokens after the first: it must be at least 2")
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}, it must be at least 1")
        if not 0.0 <= self.seconds <= MAX_SECONDS:
            raise ConfigError(f"--seconds is {self.seconds:g}, it must be 0 (the prompts once) to {MAX_SECONDS}")

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
            seconds.append(decode_seconds(result))
        if last and all(abs(now - then) <= _STABLE * then for now, then in zip(seconds, last, strict=True)):
            return run
        last = seconds
    return _WARM_UP_RUNS


def measure(session: Session, rows: Sequence[PromptRow], settings: BenchSettings) -> Iterator[BenchAnswer]:
    """Answer every turn plain and speculatively, back to back and taking turns at going first.

    Turns of a prompt are played as one conversation, with the plain answers as its history in both arms; turns that no
    longer fit the context are left out. A model without a chat template continues the first turn alone. With
    `settings.seconds` the prompts come again and again until that time has passed.
    """
    pairs = _Pairs(session, settings)
    while True:
        for row in rows:
            for answer in _conversation(pairs, row):
                yield answer
                if settings.seconds and answer.at_s >= settings.seconds:
                    return
        if not settings.seconds:
            return


def _conversation(pairs: "_Pairs", row: PromptRow) -> Iterator[BenchAnswer]:
    has_template = pairs.session.codec.has_template
    messages: list[Mapping[str, str]] = []
    for number, turn in enumerate(row.turns if has_template else row.turns[:1]):
        messages = [*messages, {"role": "user", "content": turn}]
        try:
            answer = pairs.answer(row, number, messages if has_template else turn)
        except PromptError:
            if number == 0:
                raise
            return
        yield answer
        messages = [*messages, {"role": "assistant", "content": answer.plain.text}]


class _Pairs:
    """Both ways of one answer after another."""

    def __init__(self, session: Session, settings: BenchSettings) -> None:
        self.session, self.settings = session, settings
        self._meter = EnergyMeter()
        self._begun = time.perf_counter()
        self._rows = 0

    def answer(self, row: PromptRow, turn: int, prompt: str | Sequence[Mapping[str, str]]) -> BenchAnswer:
        """Every repeat, plain and speculative in turn. Who goes first changes from prompt to prompt and from turn to
        turn, so that neither way is always first where texts are longest."""
        self._rows += turn == 0
        results: dict[bool, list[GenerationResult]] = {True: [], False: []}
        joules = {True: 0.0, False: 0.0}
        for repeat in range(self.settings.repeats):
            first = (self._rows + turn + repeat) % 2 == 1
            for plain in (first, not first):
                before = self._meter.joules()
                results[plain].append(self.session.generate(prompt, self.settings.options(plain=plain)))
                joules[plain] += self._meter.joules() - before
        return BenchAnswer(
            id=row.id,
            category=row.category or "uncategorised",
            turn=turn,
            plain_runs=tuple(results[True]),
            speculative_runs=tuple(results[False]),
            at_s=time.perf_counter() - self._begun,
            joules=(joules[True], joules[False]) if self._meter.readable else None,
        )
