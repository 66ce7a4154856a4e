"""What there is to distill: prompts, each with a temperature and, where it is given, an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elsi_edge.artifacts import PromptRow
from elsi_edge.draft.answers import Answer, row_key
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.errors import DataError, PromptError


class ChatEncoder(Protocol):
    """The part of `TextCodec` that distillation uses."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def encode_raw(self, text: str) -> list[int]: ...

    @property
    def has_template(self) -> bool: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def template_sha256(self) -> str: ...

    @property
    def tokenizer_sha256(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row to make."""

    prompt: PromptRow
    temperature: float
    given: Answer | None

    @property
    def key(self) -> str:
        return row_key(self.prompt.id, self.temperature)


def encode_prompt(codec: ChatEncoder, prompt: PromptRow) -> list[int]:
    """Token ids of a prompt's first turn, through the chat template where the target has one."""
    turn = prompt.turns[0]
    return codec.encode_chat([{"role": "user", "content": turn}]) if codec.has_template else codec.encode_raw(turn)


def encode_named(codec: ChatEncoder, prompt: PromptRow) -> list[int]:
    """`encode_prompt`. Raises DataError naming the row: what is wrong stands in a file."""
    try:
        return encode_prompt(codec, prompt)
    except PromptError as error:
        raise DataError(f"row {prompt.id!r}: {error}") from error


def make_jobs(
    rows: Sequence[PromptRow], codec: ChatEncoder, settings: DistillSettings, answers: Sequence[Answer] | None
) -> list[Job]:
    """The first `settings.count` rows to make, in order: of the prompts' own answers, of `answers`, or to be generated.

    Raises DataError when none of the answers belongs to a prompt.
    """
    if settings.keep_answers:
        if answers is not None:
            raise DataError("answers come from the prompts file or from an answers file; give one of the two")
        taken = [Job(prompt=row, temperature=0.0, given=given_answer(codec, row)) for row in rows if row.answer]
        if not taken:
            raise DataError(f"none of the {len(rows)} prompts has an answer beside it; leave out --keep-answers")
        return taken[: settings.count]
    if answers is None:
        temperatures = settings.temperatures
        jobs = [
            Job(prompt=row, temperature=temperatures[index % len(temperatures)], given=None)
            for index, row in enumerate(rows)
        ]
        return jobs[: settings.count]
    prompts = {row.id: row for row in rows}
    jobs = [
        Job(prompt=prompts[answer.id], temperature=answer.temperature, given=answer)
        for answer in answers
        if answer.id in prompts
    ]
    if not jobs:
        raise DataError(
            f"none of the {len(answers)} answers belongs to one of the {len(rows)} prompts "
            f"(first answer id {answers[0].id!r}); give the prompts that were answered with --prompts"
        )
    return jobs[: settings.count]


def given_answer(codec: ChatEncoder, row: PromptRow) -> Answer:
    """A row's own answer as the target's chat template would have written it, its end token included.

    Raises DataError for a target without a template, and for one that writes an answered turn so that its tokens do
    not follow the prompt's.
    """
    if not codec.has_template:
        raise DataError("a target without a chat template has no place for given answers; leave out --keep-answers")
    prompt_ids = encode_prompt(codec, row)
    turns = [{"role": "user", "content": row.turns[0]}, {"role": "assistant", "content": row.answer}]
    whole = codec.encode_chat(turns)
    rest = whole[len(prompt_ids) :]
    ends = [place for place, token in enumerate(rest) if token in codec.eos_ids]
    if whole[: len(prompt_ids)] != prompt_ids or not ends:
        raise DataError(
            f"row {row.id!r}: the chat template does not write the answer right after the prompt and before an end "
            "token, so its tokens cannot be told apart; leave out --keep-answers"
        )
    return Answer(id=row.id, temperature=0.0, finish="given", answer_ids=tuple(rest[: ends[0] + 1]), decoder="given")
