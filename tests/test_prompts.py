"""Prompts files: every record read, every fault named with its true line."""

import json
from pathlib import Path

import pytest

from elsi_edge.artifacts import PromptRow
from elsi_edge.errors import DataError
from elsi_edge.prompts import builtin_calibration_prompts, prompts_sha256, read_prompts, spread_over_categories


def write(directory: Path, data: bytes, name: str = "p.jsonl") -> Path:
    path = directory / name
    path.write_bytes(data)
    return path


def test_a_messy_file_is_read_whole(tmp_path: Path) -> None:
    rows = [
        b'\xef\xbb\xbf{"id": "a", "category": "qa", "source": "s", "turns": ["one", "two"]}\r\n',
        b"\r\n",
        b'{"question_id": 81, "category": "writing", "turns": ["three"], "reference": []}\n',
        '{"prompt": "line\u2028separator"}\n'.encode(),
        b"   \n",
        b'{"prompt": "five"}\n',
        b'{"id": 0, "prompt": "six"}',
    ]
    assert read_prompts(write(tmp_path, b"".join(rows))) == [
        PromptRow(id="a", turns=("one", "two"), category="qa", source="s"),
        PromptRow(id="81", turns=("three",), category="writing"),
        PromptRow(id="line-4", turns=("line\u2028separator",)),
        PromptRow(id="line-6", turns=("five",)),
        PromptRow(id="0", turns=("six",)),
    ]


def test_text_lines(tmp_path: Path) -> None:
    rows = read_prompts(write(tmp_path, "Hé\r\n\n {\n".encode(), "p.txt"))
    assert [(row.id, row.turns) for row in rows] == [("line-1", ("Hé",)), ("line-3", (" {",))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff\xfe"}', r"byte 0xff at position 13 is not UTF-8"),
        (b'{"prompt": "x"', r"not valid JSON \(Expecting ',' delimiter at column 15\)"),
        pytest.param(b"[" * 100_000, r"not valid JSON", id="deep"),
        (b'"x"', r"a JSON str where an object"),
        (b"{}", r"no 'turns' .* it has no keys"),
        (b'{"text": "x"}', r"no 'turns' .* it has \['text'\]"),
        (b'{"messages": []}', r"'messages' has no turn of a user"),
        (b'{"messages": {}}', r"'messages' must be a list of turns, it is a dict"),
        (b'{"messages": [{"role": "user"}]}', r"each turn of 'messages' needs the strings 'role' and 'content'"),
        (b'{"conversations": [{"from": "system", "value": "x"}]}', r"a turn of 'system' is not read"),
        (b'{"conversations": [{"from": "gpt", "value": "x"}]}', r"'conversations' has no turn of a user"),
        (b'{"data": "x"}', r"'data' must be a list of strings"),
        (b'{"dialog": [], "instruction": "x"}', r"no 'turns' .* it has \['dialog', 'instruction'\]"),
        (b'{"turns": []}', r"'turns' must be a list"),
        (b'{"turns": "x"}', r"'turns' must be a list"),
        (b'{"turns": ["x", 1]}', r"'turns' must be a list"),
        (b'{"id": "e", "prompt": ""}', r"the prompt of 'e' is empty"),
        (b'{"id": "e", "turns": ["x", " \\n"]}', r"turn 2 of 'e' is empty"),
        (b'{"prompt": "\\ud83d"}', r"the prompt of 'line-4' holds the lone surrogate U\+D83D"),
        (b'{"prompt": "x", "category": 3}', r"'category' is a int"),
        (b'{"id": "first", "prompt": "x"}', r"the id 'first' is used on line 1 already"),
    ],
)
def test_a_broken_record_is_named_by_its_true_line(tmp_path: Path, line: bytes, message: str) -> None:
    data = b'{"id": "first", "prompt": "x"}\n\n{"prompt": "y\xe2\x80\xa8"}\r\n' + line + b'\n{"prompt": "z"}\n'
    with pytest.raises(DataError, match=r"p\.jsonl, line 4: " + message) as caught:
        read_prompts(write(tmp_path, data))
    assert "\n" not in str(caught.value)


SHAREGPT = {
    "id": "s1",
    "conversations": [
        {"from": "gpt", "value": "left over"},
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "answer"},
        {"from": "human", "value": "two"},
    ],
}


def test_conversations_are_prompts_with_the_first_answer_beside_them(tmp_path: Path) -> None:
    rows = [
        SHAREGPT,
        {"prompt": "q", "prompt_id": "u1", "messages": [{"role": "user", "content": "q"}]},
        {"id": "u2", "data": ["x", "y", "z"]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    found = read_prompts(write(tmp_path, text.encode()))
    assert [(row.id, row.turns, row.answer) for row in found] == [
        ("s1", ("one", "two"), "answer"),
        ("u1", ("q",), ""),
        ("u2", ("x", "z"), "y"),
        ("line-4", ("a", "b"), ""),  # two user turns in a row: nobody answered the first
    ]


def test_a_file_that_is_one_array(tmp_path: Path) -> None:
    rows = read_prompts(write(tmp_path, json.dumps([SHAREGPT, {"prompt": "p"}], indent=1).encode(), "s.json"))
    assert [row.id for row in rows] == ["s1", "record-2"]
    for text, message in (("[{]", "not valid JSON"), ("[{}]", "record 1: no 'turns'"), ("[]", "holds no prompts")):
        with pytest.raises(DataError, match=message):
            read_prompts(write(tmp_path, text.encode(), "s.json"))


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "holds no prompts"), (b"\n \n", "holds no prompts"), ("x".encode("utf-16"), "is UTF-16")],
)
def test_files_without_prompts(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(write(tmp_path, data))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read: No such file"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_the_hash_is_over_turns_in_order() -> None:
    one, two = PromptRow(id="a", turns=("x", "y")), PromptRow(id="b", turns=("x",))
    assert prompts_sha256([one]) == prompts_sha256([PromptRow(id="z", turns=("x", "y"), category="c")])
    different = [[one], [two], [one, two], [two, one], [PromptRow(id="a", turns=("x y",))], []]
    assert len({prompts_sha256(rows) for rows in different}) == len(different)


def test_the_shipped_prompts_and_their_notice() -> None:
    rows = builtin_calibration_prompts()
    assert len(rows) == 256 and len({row.id for row in rows}) == 256
    notice = (Path(__file__).parents[1] / "elsi_edge" / "data" / "NOTICE.md").read_text(encoding="utf-8")
    table = {
        cells[1].strip(): int(cells[2])
        for cells in (line.split("|") for line in notice.splitlines())
        if len(cells) > 5 and cells[2].strip().isdigit()
    }
    counted = {source: sum(row.source == source for row in rows) for source in {row.source for row in rows}}
    assert table == counted, "NOTICE.md lists each source with the number of its rows"


def test_a_limit_takes_from_each_category_in_turn() -> None:
    rows = [PromptRow(id=f"{c}{n}", category=c, turns=("x",)) for c, n in (("a", 1), ("a", 2), ("b", 1), ("c", 1))]
    assert [row.id for row in spread_over_categories(rows, 3)] == ["a1", "b1", "c1"]
    assert [row.id for row in spread_over_categories(rows, 9)] == ["a1", "b1", "c1", "a2"]
