"""Prompts files: one conversation a record, read strictly, with errors that name the true line.

Read are `.txt` (one prompt a line) and JSON Lines of three layouts: ours `{"id", "category", "turns"}`, Spec-Bench's
`{"question_id", "category", "turns"}` (Xia et al. 2024), and `{"prompt"}`. Keys that are not named here are ignored.
"""

import codecs
import hashlib
import importlib.resources
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from elsi_edge.artifacts import PromptRow
from elsi_edge.errors import DataError

_BUILTIN = "calibration_prompts.jsonl"
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_prompts(path: Path) -> list[PromptRow]:
    """Every record of a prompts file, in order. Blank lines are skipped, a byte order mark is allowed.

    Raises DataError naming file and line: unreadable, not UTF-8, not JSON, a record without turns, an empty prompt,
    an id used twice, no prompt at all.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"prompts file {path} cannot be read: {error.strerror or error}") from error
    return _parse(data, str(path), plain=path.suffix.lower() == ".txt")


def builtin_calibration_prompts() -> list[PromptRow]:
    """The 256 calibration prompts that ship with elsi-edge; sources and licences in `elsi_edge/data/NOTICE.md`."""
    data = importlib.resources.files("elsi_edge.data").joinpath(_BUILTIN).read_bytes()
    return _parse(data, f"built-in {_BUILTIN}", plain=False)


def spread_over_categories(rows: Sequence[PromptRow], count: int) -> list[PromptRow]:
    """`count` rows, taken from the categories in turn, each category in the file's order."""
    by_category: dict[str, list[PromptRow]] = defaultdict(list)
    for row in rows:
        by_category[row.category].append(row)
    mixed = [row for layer in zip_longest(*by_category.values()) for row in layer if row is not None]
    return mixed[:count]


def prompts_sha256(rows: Sequence[PromptRow]) -> str:
    """Hex SHA-256 over the turns of all rows, in order; ids and categories do not count."""
    canonical = json.dumps([list(row.turns) for row in rows], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parse(data: bytes, name: str, *, plain: bool) -> list[PromptRow]:
    rows: list[PromptRow] = []
    lines: dict[str, int] = {}  # id -> line it was first used on
    for number, text in _lines(data, name):
        where = f"{name}, line {number}"
        row = _checked(PromptRow(id=f"line-{number}", turns=(text,)) if plain else _row(text, where, number), where)
        if row.id in lines:
            raise DataError(
                f"{where}: the id {row.id!r} is used on line {lines[row.id]} already; give each row its own"
            )
        lines[row.id] = number
        rows.append(row)
    if not rows:
        raise DataError(f"{name} holds no prompts; write one a line")
    return rows


def _lines(data: bytes, name: str) -> Iterator[tuple[int, str]]:
    if data.startswith(_WIDE_MARKS):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
    # Split on the newline byte alone: str.splitlines also cuts at U+2028 and the like, which JSON allows in strings.
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            text = raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            where = f"byte 0x{raw[error.start]:02x} at position {error.start + 1}"
            raise DataError(f"{name}, line {number}: {where} is not UTF-8; re-encode the file") from error
        if text.strip():
            yield number, text


def _row(text: str, where: str, number: int) -> PromptRow:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: not valid JSON ({detail}); write one object a line, or name the file .txt"
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: a JSON {type(value).__name__} where an object with 'turns' or 'prompt' is needed")
    identity = next((value[key] for key in ("id", "question_id") if value.get(key) is not None), f"line-{number}")
    return PromptRow(
        id=str(identity),
        turns=_turns(value, where),
        category=_string(value, "category", where),
        source=_string(value, "source", where),
    )


def _turns(value: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"{where}: 'turns' must be a list of one or more strings, the user's turns")
        return tuple(turns)
    if isinstance(value.get("prompt"), str):
        return (value["prompt"],)
    if "messages" in value:
        raise DataError(f"{where}: 'messages' is not read; give the user's turns as 'turns': [\"...\"]")
    raise DataError(
        f"{where}: no 'turns' (list of strings) and no 'prompt' (string); it has {sorted(value) or 'no keys'}"
    )


def _string(value: Mapping[str, Any], key: str, where: str) -> str:
    found = value.get(key, "")
    if not isinstance(found, str):
        raise DataError(f"{where}: {key!r} is a {type(found).__name__}, it must be a string")
    return found


def _checked(row: PromptRow, where: str) -> PromptRow:
    for index, turn in enumerate(row.turns, start=1):
        which = f"turn {index} of {row.id!r}" if len(row.turns) > 1 else f"the prompt of {row.id!r}"
        if not turn.strip():
            raise DataError(f"{where}: {which} is empty; give it text or delete the row")
        try:
            turn.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(turn[error.start]):04X}"
            raise DataError(f"{where}: {which} holds the lone surrogate {code}, which is no character") from error
    return row
