"""Sessions: prompts in, events and results out; budgets, the end of the context, and one generation at a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elsi_edge.artifacts import Precision
from elsi_edge.errors import BundleError, PromptError, ProviderError, UsageError
from elsi_edge.machine import cores
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import resolve_provider
from elsi_edge.runtime.policy import DEFAULT_DRAFT_NODES
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.toy import ToyCodec, toy_session
from elsi_edge.runtime.tree import Tree
from tests.toy_proposers import CODEC, Endless, NoisyProposer, OracleProposer, plain_tokens, session_for, toy_target

MakeBundle = Callable[..., Path]
ONE_THREAD = SessionSettings(threads=1)


# --- the end of the context ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [0, 1, 3, 9])
def test_prompt_and_answer_reach_the_context_exactly(nodes: int) -> None:
    endless = ToyCodec(CODEC.pieces)
    options = GenerateOptions(max_tokens=500)
    for size in (1, 2, 5, 12):
        prompt = "c" * size
        answer = plain_tokens(prompt, GenerateOptions(max_tokens=80), seed=1)
        proposer = OracleProposer(answer) if nodes % 2 else NoisyProposer(answer)
        session = toy_session(toy_target(1), proposer, codec=endless, context=40)
        result = session.generate(prompt, replace(options, draft_nodes=nodes))
        assert result.prompt_tokens == size
        assert len(result.token_ids) == 40 - size
        assert result.finish_reason == "length"
        assert result.token_ids == answer[: 40 - size]


def test_a_prompt_must_leave_room_for_one_token() -> None:
    session = session_for(None, context=10)
    assert len(session.generate("c" * 9).token_ids) == 1
    with pytest.raises(PromptError, match="10 tokens") as caught:
        session.generate("c" * 10)
    assert caught.value.exit_code == 2
    with pytest.raises(PromptError, match="10 tokens"):
        session.stream("c" * 10)  # before the first event is asked for
    with pytest.raises(PromptError, match="no tokens"):
        session.generate("", GenerateOptions(raw=True))


def test_one_token_at_most() -> None:
    result = session_for(OracleProposer([1] * 9)).generate("ab", GenerateOptions(max_tokens=1, draft_nodes=8))
    assert len(result.token_ids) == 1
    assert (result.tau, result.tokens_per_s, result.verifications, result.drafted) == (None, None, 0, 0)
    assert result.finish_reason == "length"


# --- prompts -------------------------------------------------------------------------------------------------------


def test_conversations_and_raw_prompts() -> None:
    session = session_for(None)
    conversation = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert session.generate(conversation).prompt_tokens == 2
    assert session.generate("ab", GenerateOptions(system="c")).prompt_tokens == 2
    assert session.generate("ab", GenerateOptions(raw=True)).prompt_tokens == 1
    with pytest.raises(PromptError, match="conversation"):
        session.generate(conversation, GenerateOptions(raw=True))


def test_the_prompt_is_not_searched_for_stops() -> None:
    options = GenerateOptions(max_tokens=20, stop=("c",))
    plain = session_for(None, seed=10).generate("cc", replace(options, stop=()))
    stopped = session_for(None, seed=10).generate("cc", options)
    assert "c" in plain.text
    assert stopped.text == plain.text.split("c")[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text != ""


# --- streams -------------------------------------------------------------------------------------------------------


def test_events_add_up_to_the_result() -> None:
    options = GenerateOptions(max_tokens=25, draft_nodes=5)
    answer = plain_tokens("abc", options, seed=9)
    events = list(session_for(OracleProposer(answer), seed=9).stream("abc", options))
    result = events[-1].result
    assert result is not None
    assert [event.result for event in events[:-1]] == [None] * (len(events) - 1)
    assert tuple(token for event in events for token in event.token_ids) == result.token_ids
    assert "".join(event.text for event in events) == result.text
    assert len(events) == 1 + result.verifications


def test_a_stream_closed_early_leaves_the_session_usable() -> None:
    options = GenerateOptions(max_tokens=25, draft_nodes=4)
    answer = plain_tokens("abc", options, seed=9)
    session = session_for(NoisyProposer(answer), seed=9)
    expected = session.generate("abc", options)
    for events_taken in range(4):
        stream = session.stream("zz", options)
        for _ in range(events_taken):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert session.generate("abc", options).token_ids == expected.token_ids


def test_an_interrupt_leaves_the_session_usable() -> None:
    options = GenerateOptions(max_tokens=25, draft_nodes=4)
    answer = plain_tokens("abc", options, seed=9)

    class Interrupted(NoisyProposer):
        armed = False

        def propose(self, bounds: Bounds) -> Tree:
            if self.armed and self.place > 5:
                raise KeyboardInterrupt
            return super().propose(bounds)

    proposer = Interrupted(answer)
    session = session_for(proposer, seed=9)
    expected = session.generate("abc", options)
    proposer.armed = True
    with pytest.raises(KeyboardInterrupt):
        session.generate("abc", options)
    proposer.armed = False
    assert session.generate("abc", options).token_ids == expected.token_ids


def test_a_second_generation_ends_the_first_instead_of_spoiling_it() -> None:
    session = session_for(None, seed=9)
    first = session.stream("ab", GenerateOptions(max_tokens=20))
    next(first)
    session.generate("cc")
    with pytest.raises(UsageError, match="another one on the same session"):
        next(first)


# --- budgets and results -------------------------------------------------------------------------------------------


def test_exact_mode_holds_chains_of_at_most_15_at_int4_and_int8() -> None:
    answer = plain_tokens("ab", GenerateOptions(max_tokens=8))
    precisions: tuple[Precision, ...] = ("int4", "int8")
    for precision in precisions:
        session = session_for(OracleProposer(answer), precision=precision)
        with pytest.raises(UsageError, match="--draft-nodes is 16") as caught:
            session.generate("ab", GenerateOptions(draft_nodes=16))
        assert caught.value.exit_code == 2
        assert "--no-exact" in str(caught.value)
        exact = session.generate("ab", GenerateOptions(draft_nodes=15, max_tokens=8))
        assert (exact.mode, exact.exact, exact.draft_nodes) == ("chain", True, 15)
        loose = session.generate("ab", GenerateOptions(draft_nodes=16, exact=False, max_tokens=8))
        assert (loose.mode, loose.exact) == ("tree", False)
        assert "kernel noise" in loose.exactness
    fp32 = session_for(OracleProposer(answer)).generate("ab", GenerateOptions(draft_nodes=30, max_tokens=8))
    assert (fp32.mode, fp32.exact) == ("tree", True)


def test_a_session_without_a_draft() -> None:
    session = session_for(None)
    with pytest.raises(BundleError, match="no draft"):
        session.generate("ab", GenerateOptions(draft_nodes=2))
    for options in (GenerateOptions(), GenerateOptions(plain=True), GenerateOptions(draft_nodes=0)):
        result = session.generate("ab", options)
        assert (result.mode, result.draft_nodes, result.drafted) == ("plain", 0, 0)
        assert result.tau in (1.0, None)


def test_what_a_result_records() -> None:
    session = session_for(NoisyProposer(), seed=9)
    greedy = session.generate("ab", GenerateOptions(max_tokens=10, seed=5))
    assert greedy.seed is None
    assert greedy.draft_nodes == DEFAULT_DRAFT_NODES["fp32"]
    assert (greedy.provider, greedy.threads, greedy.precision) == ("CPUExecutionProvider", 1, "fp32")
    assert greedy.peak_memory_bytes > 1 << 20
    timings = greedy.timings
    assert min(timings.prefill, timings.propose, timings.verify) > 0.0
    assert greedy.time_to_first_token_ms == pytest.approx(timings.prefill * 1e3)
    drawn = session.generate("ab", GenerateOptions(max_tokens=10, temperature=1.0))
    assert drawn.seed is not None
    again = session.generate("ab", GenerateOptions(max_tokens=10, temperature=1.0, seed=drawn.seed))
    assert again.token_ids == drawn.token_ids
    session.settings = SessionSettings()
    assert session.generate("ab").threads == cores().usable


def test_providers() -> None:
    assert resolve_provider("cpu") == resolve_provider("CPUExecutionProvider") == "CPUExecutionProvider"
    with pytest.raises(UsageError, match="typo"):
        resolve_provider("typo")
    with pytest.raises(ProviderError, match="pip install onnxruntime-qnn"):
        resolve_provider("qnn")
    with pytest.raises(ProviderError):
        Session.open("nowhere", SessionSettings(provider="CUDAExecutionProvider"))


# --- on bundles ----------------------------------------------------------------------------------------------------


def test_the_context_ends_alike_on_a_real_bundle(tiny_bundle: MakeBundle) -> None:
    session = Session.open(tiny_bundle("fp32"), ONE_THREAD)
    session.codec = Endless(session.codec)
    prompt = "Marn keeps a small ferry on the river Ull. " * 7
    sampled = GenerateOptions(temperature=4.0, seed=1, max_tokens=999)
    plain = session.generate(prompt, replace(sampled, plain=True))
    assert 20 < len(plain.token_ids) < 100
    assert plain.prompt_tokens + len(plain.token_ids) == session.context
    assert plain.finish_reason == "length"
    for nodes in (1, 8):
        result = session.generate(prompt, replace(sampled, draft_nodes=nodes))
        assert result.token_ids == plain.token_ids
        assert result.finish_reason == "length"


def test_a_bundle_without_a_draft_speculates_by_ngrams(tiny_bundle: MakeBundle) -> None:
    session = Session.open(tiny_bundle("int4", plain=True), ONE_THREAD)
    session.codec = Endless(session.codec)
    assert not session.has_draft
    prompt = "Marn keeps a small ferry. " * 4
    for temperature in (0.0, 3.0):
        options = GenerateOptions(max_tokens=60, temperature=temperature, seed=1)
        plain = session.generate(prompt, replace(options, plain=True))
        for nodes in (None, 3):
            result = session.generate(prompt, replace(options, draft_nodes=nodes))
            # Untuned, exact trees are drafted only where a number of nodes is asked for.
            assert (plain.mode, result.mode) == ("plain", "tree" if session.exact_trees and nodes else "chain")
            assert result.token_ids == plain.token_ids
            assert set(result.by_source) <= {"ngram"}
            assert nodes is None or result.drafted > 0
    with pytest.raises(BundleError, match="--proposals is draft, but this bundle has no draft"):
        session.generate("Marn", GenerateOptions(proposals=("draft",)))


def test_two_sessions_side_by_side_do_not_disturb_each_other(tiny_bundle: MakeBundle) -> None:
    one, other = (Session.open(tiny_bundle(precision), ONE_THREAD) for precision in ("fp32", "int4"))
    options = GenerateOptions(max_tokens=12)
    alone = one.generate("Marn", options), other.generate("the mill", options)
    streams = one.stream("Marn", options), other.stream("the mill", options)
    results: list[object] = [None, None]
    while None in results:
        for index, stream in enumerate(streams):
            event = next(stream, None)
            if event is not None and event.result is not None:
                results[index] = event.result.token_ids
    assert results == [result.token_ids for result in alone]


def test_switching_between_exact_and_not_reloads_the_graph(tiny_bundle: MakeBundle) -> None:
    session = Session.open(tiny_bundle("int4"), replace(ONE_THREAD, native=False))
    options = GenerateOptions(max_tokens=10, draft_nodes=3)
    first = session.generate("Marn", options)
    loose = session.generate("Marn", replace(options, exact=False))
    again = session.generate("Marn", options)
    assert (first.mode, loose.mode, again.mode) == ("chain", "tree", "chain")
    assert first.token_ids == again.token_ids


def test_a_huge_prompt_is_refused_before_it_is_encoded_whole(tiny_bundle: MakeBundle) -> None:
    session = Session.open(tiny_bundle("fp32"), ONE_THREAD)
    with pytest.raises(PromptError, match="255 fit"):
        session.generate("word and word " * 400_000)
