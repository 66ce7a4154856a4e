"""Prompts, alone or with the target's answers, as the token sequences that are measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elsi_edge.artifacts import PromptRow
from elsi_edge.calibration.cka import LEAST_ROWS
from elsi_edge.calibration.statistics import kept_count
from elsi_edge.errors import DataError, PromptError, SelectionError
from elsi_edge.models import SourceModel
from elsi_edge.text import TextCodec


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Token sequences with the positions that count."""

    ids: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]  # first position of each that counts
    how: Literal["chat", "raw"]
    text: Literal["prompts", "answers"]
    prefix: int  # tokens that the template puts before every prompt

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(ids) for ids in self.ids]

    @property
    def eligible(self) -> list[int]:
        """Positions of each sequence that count."""
        return [max(0, len(ids) - start) for ids, start in zip(self.ids, self.first, strict=True)]

    def kept(self, keep: float) -> int:
        """Positions of all sequences of which the filter keeps this share."""
        return sum(kept_count(count, keep) for count in self.eligible)


def render(
    model: SourceModel, prompts: Sequence[PromptRow], *, skip: int, answers: Sequence[Sequence[int]] | None = None
) -> Rendered:
    """The first turn of every prompt through the chat template, or as it is for a model without one.

    answers: the target's own, token ids in the prompts' order. With them only positions that predict an answer's tokens
    count: that is where a draft will work. Without them all from `skip` and the template's own head on: states over
    that head are the same in every prompt, copies and not samples.
    Raises DataError naming the prompt: too long for the context, or no position left in any.
    """
    codec = TextCodec.from_model_dir(model.directory)
    encoded = [_encode(codec, row, model.shape.context) for row in prompts]
    prefix = _common_head(codec, model.shape.context)
    least = max(skip, prefix)
    if answers is None:
        first = [least] * len(encoded)
        ids = [tuple(tokens) for tokens in encoded]
    else:
        first = [max(least, len(tokens) - 1) for tokens in encoded]
        ids = [(*tokens, *answer)[: model.shape.context] for tokens, answer in zip(encoded, answers, strict=True)]
    if all(len(tokens) <= start for tokens, start in zip(ids, first, strict=True)):
        longest = max(map(len, ids))
        raise DataError(
            f"no position is left to measure: the longest prompt has {longest} tokens, the first {least} are skipped; "
            "give longer prompts"
        )
    return Rendered(
        ids=tuple(ids),
        first=tuple(first),
        how="chat" if codec.has_template else "raw",
        text="prompts" if answers is None else "answers",
        prefix=prefix,
    )


def require_enough(rendered: Rendered, keep: float) -> None:
    """Raise SelectionError, before anything is run, for prompts that leave too few positions to compare taps on."""
    kept, eligible = rendered.kept(keep), sum(rendered.eligible)
    if kept < LEAST_ROWS:
        larger = " or a larger --keep" if eligible >= LEAST_ROWS else ""
        raise SelectionError(
            f"at least {LEAST_ROWS} kept positions are needed, these prompts leave {kept}: {keep:.0%} of the "
            f"{eligible} that count, of {sum(rendered.lengths)} tokens; give more or longer prompts{larger}"
        )


def encode_prompts(model: SourceModel, prompts: Sequence[PromptRow]) -> list[list[int]]:
    """Token ids that the target is to answer, the generation prompt included. Raises DataError naming the prompt."""
    codec = TextCodec.from_model_dir(model.directory)
    return [_encode(codec, row, model.shape.context) for row in prompts]


def _encode(codec: TextCodec, row: PromptRow, context: int) -> list[int]:
    try:
        return _ids(codec, row.turns[0], context)
    except PromptError as error:
        raise DataError(f"prompt {row.id!r}: {error}") from error


def _ids(codec: TextCodec, text: str, context: int) -> list[int]:
    if codec.has_template:
        return codec.encode_chat([{"role": "user", "content": text}], limit=context)
    return codec.encode_raw(text, limit=context)


def _common_head(codec: TextCodec, context: int) -> int:
    one, other = (_ids(codec, text, context) for text in ("a", "9"))
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
