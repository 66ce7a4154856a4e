"""Prompts files: one conversation a record, read strictly, with errors that name the true line.

Read are `.txt` (one prompt a line), JSON Lines, and `.json` with one array of records, in these layouts:

- ours `{"id", "category", "turns"}`, Spec-Bench's `{"question_id", "category", "turns"}` (Xia et al. 2024), and
  `{"prompt"}`;
- ShareGPT `{"id", "conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}, ...]}`;
- UltraChat `{"prompt_id", "messages": [{"role", "content"}, ...]}`, or `{"id", "data": [user, assistant, user, ...]}`.

Of conversations the user's turns are taken, and what the assistant said to the first of them as the row's `answer`;
an assistant's words before the first user turn are passed over. Keys that are not named here are ignored.
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
# Who speaks, by the names in use.
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}
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
    if path.suffix.lower() == ".json" and data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return _collect(_array(data, str(path)), str(path))
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
    def rows() -> Iterator[tuple[str, PromptRow]]:
        for number, text in _lines(data, name):
            where = f"{name}, line {number}"
            if plain:
                yield where, PromptRow(id=f"line-{number}", turns=(text,))
            else:
                yield where, _row(_value(text, where), where, f"line-{number}")

    return _collect(rows(), name)


def _array(data: bytes, name: str) -> Iterator[tuple[str, PromptRow]]:
    """Records of a file that is one JSON array, as ShareGPT's is."""
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 ({error.reason} at byte {error.start}); re-encode the file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON ({error})") from error
    for number, value in enumerate(values, start=1):
        where = f"{name}, record {number}"
        yield where, _row(value, where, f"record-{number}")


def _collect(found: Iterator[tuple[str, PromptRow]], name: str) -> list[PromptRow]:
    rows: list[PromptRow] = []
    places: dict[str, str] = {}  # id -> where it was first used
    for where, row in found:
        _checked(row, where)
        place = where.removeprefix(f"{name}, ")
        if row.id in places:
            raise DataError(f"{where}: the id {row.id!r} is used on {places[row.id]} already; give each row its own")
        places[row.id] = place
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


def _value(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: not valid JSON ({detail}); write one object a line, or name the file .txt"
        ) from error


def _row(value: Any, where: str, name: str) -> PromptRow:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a JSON {type(value).__name__} where an object with 'turns' or 'prompt' is needed")
    keys = ("id", "question_id", "prompt_id")
    turns, answer = _turns(value, where)
    return PromptRow(
        id=str(next((value[key] for key in keys if value.get(key) is not None), name)),
        turns=turns,
        category=_string(value, "category", where),
        source=_string(value, "source", where),
        answer=answer,
    )


def _turns(value: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], str]:
    """The user's turns, and what an assistant says to the first of them ("" where nothing is)."""
    if "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"{where}: 'turns' must be a list of one or more strings, the user's turns")
        return tuple(turns), ""
    for key, who, what in (("conversations", "from", "value"), ("messages", "role", "content")):
        if key in value:
            return _conversation(_said(value[key], key, who, what, where), key, where)
    if "data" in value:
        texts = value["data"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: 'data' must be a list of strings, user and assistant by turns")
        return _conversation([(("user", "assistant")[k % 2], text) for k, text in enumerate(texts)], "data", where)
    if isinstance(value.get("prompt"), str):
        return (value["prompt"],), ""
    raise DataError(
        f"{where}: no 'turns' (list of strings), no 'prompt' (string), and no 'conversations', 'messages' or 'data' of "
        f"a conversation; it has {sorted(value) or 'no keys'}"
    )


def _said(turns: Any, key: str, who: str, what: str, where: str) -> list[tuple[str, str]]:
    """(role, text) of each turn."""
    if not isinstance(turns, list):
        raise DataError(f"{where}: {key!r} must be a list of turns, it is a {type(turns).__name__}")
    said = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get(who), str) or not isinstance(turn.get(what), str):
            has = sorted(turn) if isinstance(turn, dict) else type(turn).__name__
            raise DataError(f"{where}: each turn of {key!r} needs the strings {who!r} and {what!r}; one has {has}")
        role = _ROLES.get(turn[who].lower())
        if role is None:
            # A system text that is left out without a word would change what the target answers.
            raise DataError(f"{where}: a turn of {turn[who]!r} is not read; delete that turn, or the row")
        said.append((role, turn[what]))
    return said


def _conversation(said: Sequence[tuple[str, str]], key: str, where: str) -> tuple[tuple[str, ...], str]:
    users = [place for place, (role, _) in enumerate(said) if role == "user"]
    if not users:
        raise DataError(f"{where}: {key!r} has no turn of a user; delete the row")
    after = said[users[0] + 1 : users[0] + 2]
    answer = after[0][1] if after and after[0][0] == "assistant" else ""
    return tuple(said[place][1] for place in users), answer


def _string(value: Mapping[str, Any], key: str, where: str) -> str:
    found = value.get(key, "")
    if not isinstance(found, str):
        raise DataError(f"{where}: {key!r} is a {type(found).__name__}, it must be a string")
    return found


def _checked(row: PromptRow, where: str) -> None:
    for index, turn in enumerate(row.turns, start=1):
        which = f"turn {index} of {row.id!r}" if len(row.turns) > 1 else f"the prompt of {row.id!r}"
        if not turn.strip():
            raise DataError(f"{where}: {which} is empty; give it text or delete the row")
        try:
            turn.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(turn[error.start]):04X}"
            raise DataError(f"{where}: {which} holds the lone surrogate {code}, which is no character") from error
