"""The next turn of a conversation keeps what the caches hold, and says what a fresh session would say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elsi_edge.artifacts import Precision
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree
from tests.cli_run import Run
from tests.test_runtime_graphs import PAST, open_target
from tests.toy_proposers import EOS, NoisyProposer, OracleProposer, plain_tokens, session_for

MakeBundle = Callable[..., Path]
ONE_THREAD = SessionSettings(threads=1)
Message = dict[str, str]
WAYS = {
    "plain": GenerateOptions(max_tokens=14, reuse_prefix=True, plain=True),
    "auto": GenerateOptions(max_tokens=14, reuse_prefix=True),
    "fixed": GenerateOptions(max_tokens=14, reuse_prefix=True, draft_nodes=4),
    "ngram": GenerateOptions(max_tokens=14, reuse_prefix=True, draft_nodes=3, proposals=("ngram",)),
    "fresh": GenerateOptions(max_tokens=14, plain=True),
}
TURNS = ("Marn keeps a small ferry on the river Ull.", "And the mill?", "Marn keeps a small ferry.")


def talk(session: Session, options: GenerateOptions) -> tuple[list[tuple[int, ...]], list[int]]:
    """Answers to all turns, and how many tokens of each prompt were there already."""
    history: list[Message] = []
    answers, reused = [], []
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        result = session.generate(history, options)
        answers.append(result.token_ids)
        reused.append(result.reused_tokens)
        history.append({"role": "assistant", "content": result.text})
    return answers, reused


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("temperature", [0.0, 2.5])
def test_turns_equal_those_of_a_plain_chat_and_of_fresh_sessions(
    tiny_bundle: MakeBundle, precision: Precision, temperature: float
) -> None:
    found = {}
    for name, options in WAYS.items():
        session = Session.open(tiny_bundle(precision), ONE_THREAD)
        found[name], reused = talk(session, replace(options, temperature=temperature, seed=5))
        assert reused[0] == 0
        assert (min(reused[1:]) > 10) == (name != "fresh")
    assert len({tuple(answers) for answers in found.values()}) == 1
    assert len({token for answer in found["plain"] for token in answer}) > (3 if temperature else 0)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_prefill_of_any_length_gives_the_bits_of_one_row_a_step(
    tiny_bundle: MakeBundle, precision: Precision
) -> None:
    """Why a chat may keep keys that decoding made where a fresh session makes them in its prefill."""

    def keys(
        target: OrtTarget, block: int, tokens: list[int]
    ) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        target.keep(0)
        for start in range(0, len(tokens), block):
            part = tokens[start : start + block]
            target.verify(part[0], Tree.chain(part[1:]))
            target.commit(range(len(part)))
        return [buffer[:, :, : len(tokens)].copy() for buffer in target.cache.buffers]

    target = open_target(tiny_bundle(precision), "target-chain")
    tokens = np.random.default_rng(0).integers(6, 300, 90).tolist()
    singly = keys(target, 1, tokens)
    for block in (16, 17, 40, 90):
        assert all(np.array_equal(a, b) for a, b in zip(keys(target, block, tokens), singly, strict=True))
    assert len(PAST) == 12


def test_rows_beyond_the_answers_end_are_not_kept() -> None:
    """An oracle's chain runs on past the end token; what the target said there was never part of the answer."""
    options = GenerateOptions(max_tokens=20, reuse_prefix=True)
    for world in range(40):
        answer = plain_tokens("abc", options, seed=world)
        if EOS not in answer or {9, 10} & set(answer[: answer.index(EOS)]):  # halves of a character
            continue
        fast, plain = session_for(OracleProposer(answer), seed=world), session_for(None, seed=world)
        first = fast.generate("abc", replace(options, draft_nodes=9))
        assert first.token_ids == plain.generate("abc", options).token_ids == answer[: answer.index(EOS) + 1]
        text = "abc" + first.text + "ab"
        turns = fast.generate(text, replace(options, draft_nodes=9)), plain.generate(text, options)
        assert turns[0].token_ids == turns[1].token_ids
        assert turns[0].reused_tokens == turns[1].reused_tokens
        break
    else:
        pytest.fail("no toy world whose answer ends")


def test_what_was_cancelled_is_kept_as_far_as_it_was_shown() -> None:
    options = GenerateOptions(max_tokens=25, draft_nodes=4, reuse_prefix=True)
    answer = plain_tokens("abc", options, seed=9)
    session = session_for(NoisyProposer(answer), seed=9)
    for taken in range(1, 6):
        stream = session.stream("abc", options)
        shown = "abc" + "".join(next(stream).text for _ in range(taken))
        stream.close()  # type: ignore[attr-defined]
        turn = session.generate(shown + "x", options)
        fresh = session_for(None, seed=9).generate(shown + "x", replace(options, draft_nodes=None))
        assert turn.token_ids == fresh.token_ids
        assert turn.reused_tokens > 0


def test_an_interrupt_inside_a_round_forgets_the_caches() -> None:
    options = GenerateOptions(max_tokens=25, draft_nodes=4, reuse_prefix=True)
    answer = plain_tokens("abc", options, seed=9)
    session = session_for(NoisyProposer(answer), seed=9)
    commit = session.engine(exact=True).target.commit

    def torn(rows: object) -> None:
        raise KeyboardInterrupt

    session.engine(exact=True).target.commit = torn  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.generate("abc", options)
    session.engine(exact=True).target.commit = commit  # type: ignore[method-assign]
    result = session.generate("abc", options)
    assert result.reused_tokens == 0
    assert result.token_ids == session_for(None, seed=9).generate("abc", replace(options, draft_nodes=None)).token_ids


def test_modes_share_what_fits() -> None:
    """After a plain turn the draft knows nothing of it, so a drafting turn begins anew; the other way round is fine."""
    options = GenerateOptions(max_tokens=8, reuse_prefix=True, draft_nodes=3)
    answer = plain_tokens("abcd", options, seed=2)
    session = session_for(OracleProposer(answer), seed=2)
    session.generate("abcd", options)
    assert session.generate("abcdx", replace(options, draft_nodes=0)).reused_tokens > 0
    assert session.generate("abcdx", options).reused_tokens == 0
    assert session.generate("abcdx", options).reused_tokens > 0
    assert session.generate("abcdx", replace(options, reuse_prefix=False)).reused_tokens == 0


def test_chat_reuses_the_prefix(run: Run, tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    reused: list[int] = []
    take = Session._result

    def noting(self: Session, one: object, options: GenerateOptions) -> object:
        result = take(self, one, options)  # type: ignore[arg-type]
        reused.append(result.reused_tokens)
        return result

    monkeypatch.setattr(Session, "_result", noting)
    done = run("chat", tiny_bundle("int4"), "--max-tokens", 6, stdin=b"Marn keeps\nAnd the mill?\n")
    assert done.code == 0 and len(reused) == 2 and reused[1] > 0
