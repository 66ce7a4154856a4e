"""Where an answer ends and which of its text may be shown, token by token."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_edge.runtime.answer import Answer
from elsi_edge.runtime.toy import ToyCodec

PIECES: list[str | bytes] = ["a", "b", "c", "ab", "b c", " ", b"\xf0\x9f", b"\x99\x82", b"\xc3", b"\xa9", "abc", "", ""]
EOS = (11, 12)
CODEC = ToyCodec(PIECES, eos_ids=EOS)


def run(tokens: Sequence[int], *, stop: Sequence[str] = (), limit: int = 99) -> tuple[Answer, list[str]]:
    """Push tokens until the answer ends; the pieces shown."""
    answer = Answer(CODEC.stream(), eos_ids=CODEC.eos_ids, stop=stop, limit=limit)
    shown = []
    for token in tokens:
        shown.append(answer.push(token))
        if answer.finish_reason is not None:
            break
    assert "".join(shown) == answer.text
    return answer, shown


@pytest.mark.parametrize("eos", EOS)
def test_any_end_token_ends_it_and_gives_no_text(eos: int) -> None:
    answer, _ = run([0, 1, eos, 2])
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("ab", "stop", [0, 1, eos])


def test_the_limit_counts_tokens() -> None:
    answer, _ = run([0, 3, 2, 2], limit=2)
    assert (answer.text, answer.finish_reason, answer.token_ids) == ("aab", "length", [0, 3])
    answer, _ = run([10], limit=1)
    assert (answer.text, answer.finish_reason) == ("abc", "length")


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    answer, _ = run([0, 11], limit=2)
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("a", "stop", 2)


def test_a_stop_text_at_the_limit_is_a_stop() -> None:
    answer, _ = run([0, 1], limit=2, stop=["b"])
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_no_letter_of_a_stop_text_that_spans_tokens_is_shown() -> None:
    answer, shown = run([2, 0, 1, 2, 0], stop=["abc"])
    assert (answer.text, answer.finish_reason) == ("c", "stop")
    assert shown == ["c", "", "", ""]


def test_text_that_might_have_become_a_stop_is_shown_once_it_cannot() -> None:
    answer, shown = run([0, 1, 1, 11], stop=["abc"])
    assert (answer.text, answer.finish_reason) == ("abb", "stop")
    assert shown == ["", "", "abb", ""]


def test_held_back_text_is_shown_at_the_end() -> None:
    assert run([2, 0, 1], stop=["abc"], limit=3)[0].text == "cab"
    assert run([2, 0, 1, 11], stop=["abc"])[0].text == "cab"


def test_the_start_of_a_stop_within_its_own_repetition() -> None:
    answer, _ = run([0, 0, 0, 1], stop=["aab"])
    assert (answer.text, answer.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("stop", [["ab", "b c"], ["b c", "ab"]])
def test_of_overlapping_stops_the_one_that_starts_earliest_counts(stop: list[str]) -> None:
    assert run([2, 0, 4], stop=stop)[0].text == "c"  # "c", "a", "b c": both are complete with the same token
    assert run([2, 2, 4], stop=stop)[0].text == "cc"


def test_of_stops_that_start_together_the_text_is_the_same() -> None:
    for stop in (["ab", "abc"], ["abc", "ab"]):
        assert run([2, 10], stop=stop)[0].text == "c"
        assert run([2, 0, 1, 2], stop=stop)[0].text == "c"


def test_text_before_and_after_a_stop_in_one_token() -> None:
    answer, _ = run([10, 2], stop=["b"])
    assert (answer.text, answer.token_ids) == ("a", [10])


def test_characters_are_held_back_until_they_are_complete() -> None:
    answer, shown = run([6, 7, 8, 9, 11])
    assert shown == ["", "🙂", "", "é", ""]
    assert answer.text == "🙂é"


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    assert run([0, 6, 11])[0].text == "a\ufffd"
    assert run([0, 6], limit=2)[0].text == "a\ufffd"


def test_a_stop_text_in_the_middle_of_split_characters() -> None:
    answer, shown = run([8, 9, 6, 7, 0], stop=["🙂"])
    assert (answer.text, answer.finish_reason) == ("é", "stop")
    assert shown == ["", "é", "", ""]


def test_cancelling_keeps_what_was_said() -> None:
    answer, _ = run([2, 0, 1], stop=["abc"])
    assert answer.cancel() == "ab"
    assert (answer.text, answer.finish_reason) == ("cab", "cancelled")
    assert answer.cancel() == ""


def test_nothing_after_the_end() -> None:
    answer, _ = run([11])
    with pytest.raises(ValueError, match="ended"):
        answer.push(0)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 12), max_size=25),
    st.lists(st.text("abc é🙂", min_size=1, max_size=4), max_size=3),
    st.integers(1, 20),
)
def test_what_is_shown_is_final_and_free_of_stops(tokens: list[int], stop: list[str], limit: int) -> None:
    answer, shown = run(tokens, stop=stop, limit=limit)
    assert len(answer.token_ids) <= limit
    whole = CODEC.decode(answer.token_ids)
    so_far = ""
    for piece in shown:
        so_far += piece
        assert whole.startswith(so_far)
    assert not any(text in answer.text for text in stop)
    if answer.finish_reason == "length":
        assert answer.text == whole
    if answer.finish_reason == "stop" and answer.token_ids[-1] not in EOS:
        # The rest begins with a stop text, and no stop was complete one token earlier.
        assert any(whole[len(answer.text) :].startswith(text) for text in stop)
    if answer.finish_reason is None:
        assert len(answer.token_ids) == len(tokens)
        answer.cancel()
        assert answer.text == whole
