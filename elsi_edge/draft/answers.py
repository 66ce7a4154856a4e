"""The target's answers as token ids: the file given to distillation, and the one that it keeps for good."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsi_edge.errors import DataError
from elsi_edge.fsio import storage_errors


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target answered to one prompt."""

    id: str  # of the prompt
    temperature: float
    finish: str  # "stop" with the end token last, or "length"; "given" when the prompts file brought its text
    answer_ids: tuple[int, ...]
    decoder: str = ""  # "exact", or "batch": rounding may part its tokens from the exact mode's; "" is not known

    @property
    def key(self) -> str:
        """Unique within a set: prompt id and temperature."""
        return row_key(self.id, self.temperature)


def row_key(prompt_id: str, temperature: float) -> str:
    """Name of a distilled row: prompt id and temperature."""
    return f"{prompt_id}@{temperature:g}"


def read_answers(path: Path) -> list[Answer]:
    """Read JSONL or JSONL.gz of `{"id", "temperature", "finish", "answer_ids"}`; other keys are ignored.

    Raises DataError naming the line that is broken or repeated.
    """
    answers: list[Answer] = []
    lines: dict[str, int] = {}  # key -> line it was first used on
    for number, text in _lines(path):
        if not text.strip():
            continue
        answer = _parse(text, f"{path}, line {number}")
        if answer.key in lines:
            raise DataError(
                f"{path}, line {number}: prompt {answer.id!r} at temperature {answer.temperature:g} was answered on "
                f"line {lines[answer.key]} already; keep one of them"
            )
        lines[answer.key] = number
        answers.append(answer)
    if not answers:
        raise DataError(f"{path} holds no answers")
    return answers


class AnswerLog:
    """`answers.jsonl`, appended to as answers come; a last line torn by a kill is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Answer] = {}
        if path.is_file():
            self._read()

    def _read(self) -> None:
        with storage_errors(self.path):
            data = self.path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.decode(errors="replace").splitlines(), start=1):
            answer = _parse(line, f"{self.path}, line {number}")
            self.known[answer.key] = answer

    def add(self, answer: Answer, seed: int) -> None:
        """Append one answer, once. Raises StorageError."""
        if answer.key in self.known:
            return
        value: dict[str, Any] = {
            "id": answer.id,
            "temperature": answer.temperature,
            "seed": seed,
            "finish": answer.finish,
        }
        if answer.decoder:
            value["decoder"] = answer.decoder
        value["answer_ids"] = list(answer.answer_ids)
        with storage_errors(self.path), self.path.open("a") as handle:
            handle.write(json.dumps(value, separators=(",", ":")) + "\n")
        self.known[answer.key] = answer


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as handle:
                yield from enumerate(handle, start=1)
        else:
            with path.open(encoding="utf-8") as handle:
                yield from enumerate(handle, start=1)
    except UnicodeDecodeError as error:
        raise DataError(f"answers file {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"answers file {path} is cut short or not gzip ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"answers file {path} cannot be read: {error.strerror or error}") from error


def _parse(text: str, where: str) -> Answer:
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        raise DataError(f"{where}: expected an object with the keys id, temperature, finish and answer_ids")
    ids, temperature = value.get("answer_ids"), value.get("temperature", 0.0)
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise DataError(f"{where}: answer_ids must be a list of token ids")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 100:
        raise DataError(f"{where}: temperature is {temperature!r}, expected a number of at least 0")
    return Answer(
        id=value["id"],
        temperature=float(temperature),
        finish=str(value.get("finish", "")),
        answer_ids=tuple(ids),
        decoder=str(value.get("decoder", "")),
    )
