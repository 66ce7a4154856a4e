"""What a bench measures and says, on a toy whose answers are known: the next letter of the alphabet, for ever."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.artifacts import PromptRow
from elsi_edge.errors import ConfigError, DataError
from elsi_edge.loops import is_looping
from elsi_edge.packaged import builtin_bench_prompts
from elsi_edge.runtime.bench.answers import BenchAnswer
from elsi_edge.runtime.bench.json_form import report_json
from elsi_edge.runtime.bench.report import summarise
from elsi_edge.runtime.bench.run import BenchSettings, check_prompts, measure, warm_up
from elsi_edge.runtime.proposal import Bounds
from elsi_edge.runtime.result import GenerationResult, Timings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.toy import ToyCodec, ToyTarget, toy_session
from elsi_edge.runtime.tree import Tree

LETTERS = "abcdefghijklmnopqrstuvwxyz"
V = len(LETTERS)


class Alphabet:
    """Proposes the letters that come next, or the wrong ones."""

    def __init__(self, *, step: int = 1) -> None:
        self.step, self.last = step, 0

    def keep(self, rows: int) -> None:
        self.last = 0

    def observe(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> None:
        self.last = next_tokens[-1]

    def propose(self, bounds: Bounds) -> Tree:
        count = min(bounds.budget, bounds.depth)
        return Tree.chain([(self.last + self.step * (i + 1)) % V for i in range(count)])


def alphabet_session(proposer: Alphabet | None, *, context: int = 4096) -> Session:
    def logits(last: tuple[int, ...]) -> NDArray[np.float32]:
        row = np.zeros(V, np.float32)
        row[(last[-1] + 1) % V] = 1.0
        return row

    codec = ToyCodec([*LETTERS], eos_ids=())
    return toy_session(ToyTarget(logits, vocab_size=V), proposer, codec=codec, context=context)


def row(name: str, *turns: str, category: str = "") -> PromptRow:
    return PromptRow(id=name, turns=turns, category=category)


def run(session: Session, rows: Sequence[PromptRow], **settings: int) -> list[BenchAnswer]:
    return list(measure(session, rows, BenchSettings(**settings)))  # type: ignore[arg-type]


def test_an_oracle_gives_the_whole_budget_and_the_bonus() -> None:
    answers = run(
        alphabet_session(Alphabet()), [row("1", "abc", category="x"), row("2", "q")], max_tokens=26, draft_nodes=4
    )
    report = report_json(summarise(answers))
    # 25 tokens after the first, five a verification.
    assert report["tau"] == 5.0 and report["accepted_per_verification"] == 4.0
    assert report["accepted_by_depth"] == [1.0, 1.0, 1.0, 1.0] and report["verifications"] == 10
    assert report["identical"] and report["exact"] and (report["tokens"], report["answers"]) == (52, 2)
    assert report["plain"]["tau"] == 1.0 and report["plain"]["accepted_by_depth"] == []
    assert list(report["categories"]) == ["x", "uncategorised"]
    assert report["prompts"][0]["text"] == "defghijklmnopqrstuvwxyzabc" == report["prompts"][0]["plain"]["text"]
    contract = {"tau", "tokens_per_s", "speedup", "exact", "identical", "peak_memory_bytes", "time_to_first_token_ms"}
    assert contract <= set(report)
    assert {"token_ids", "text", "finish_reason", "tau", "tokens_per_s"} <= set(report["prompts"][0])


def test_a_draft_that_is_always_wrong_still_gives_the_same_tokens() -> None:
    report = summarise(run(alphabet_session(Alphabet(step=2)), [row("1", "abc")], max_tokens=10, draft_nodes=3))
    assert report.identical and report.speculative.tau == 1.0
    assert report.speculative.accepted_by_depth == () and report.speculative.accepted_per_verification == 0.0


def test_speeds_are_tokens_after_the_first_over_seconds_after_the_first() -> None:
    (answer,) = run(alphabet_session(Alphabet()), [row("1", "a")], max_tokens=20, draft_nodes=2)
    report = summarise([answer])
    for result, arm in ((answer.plain, report.plain), (answer.speculative, report.speculative)):
        assert arm.tokens_per_s == pytest.approx(result.tokens_per_s, rel=0.02)
    assert report.speculative.tokens_per_s is not None and report.plain.tokens_per_s is not None
    assert report.speedup == pytest.approx(report.speculative.tokens_per_s / report.plain.tokens_per_s)


def test_turns_are_one_conversation_until_the_context_ends() -> None:
    rows = [row("1", "ab", "cd", "ef")]
    answers = run(alphabet_session(Alphabet(), context=64), rows, max_tokens=3, draft_nodes=2)
    # The toy's chat is its messages put together: "ab", then "ab" "cde" "cd", then that and "efg" "ef".
    assert [(a.turn, a.plain.prompt_tokens, a.plain.text) for a in answers] == [
        (0, 2, "cde"),
        (1, 7, "efg"),
        (2, 12, "ghi"),
    ]
    cut = run(alphabet_session(Alphabet(), context=10), rows, max_tokens=3, draft_nodes=2)
    assert [a.turn for a in cut] == [0, 1]


def test_arms_take_turns_at_going_first_and_repeats_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[bool] = []
    generate = Session.generate

    def spy(self: Session, prompt: object, options: object = None) -> GenerationResult:
        order.append(options.plain)  # type: ignore[attr-defined]
        return generate(self, prompt, options)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "generate", spy)
    answers = run(alphabet_session(Alphabet()), [row("1", "a"), row("2", "b")], max_tokens=5, repeats=2)
    assert order == [True, False, False, True, False, True, True, False]
    assert len(answers) == 2 and summarise(answers).speculative.tokens == 10
    order.clear()  # second turns, whose prompts are longer, take turns too
    run(alphabet_session(Alphabet()), [row("1", "a", "b"), row("2", "a", "b")], max_tokens=5)
    assert order == [True, False, False, True, False, True, True, False]


def made(
    *,
    plain_s: float,
    fast_s: float,
    tokens: Sequence[int] = tuple(range(11)),
    category: str = "c",
    name: str = "n",
    at_s: float = 0.0,
) -> BenchAnswer:
    """A synthetic answer: 10 tokens after the first in so many seconds."""

    def result(seconds: float, tau: float) -> GenerationResult:
        rest = len(tokens) - 1
        return GenerationResult(
            token_ids=tuple(tokens), text="", finish_reason="length", prompt_tokens=1, tau=tau,
            accepted_per_verification=tau - 1, verifications=round(rest / tau), drafted=0,
            accepted_by_depth=() if tau == 1 or not rest else (round(rest / tau),),
            tokens_per_s=rest / seconds if rest else None,
            time_to_first_token_ms=5.0, exact=True, exactness="", mode="chain", draft_nodes=1, seed=None,
            precision="int4", provider="p", threads=1, peak_memory_bytes=7, timings=Timings(verify=seconds),
            round_tokens=(int(tau),) * (rest // int(tau)), round_ms=(1e3 * tau * seconds / rest,) * (rest // int(tau))
            if rest else (),
        )  # fmt: skip

    return BenchAnswer(
        id=name, category=category, turn=0, plain_runs=(result(plain_s, 1.0),),
        speculative_runs=(result(fast_s, 2.0),), at_s=at_s,
    )  # fmt: skip


def test_speedup_is_the_median_of_pairs_and_the_total_stands_beside_it() -> None:
    report = summarise([made(plain_s=1, fast_s=1), made(plain_s=2, fast_s=1), made(plain_s=30, fast_s=10)])
    assert report.speedup == 2.0 and report.speedup_total == pytest.approx(33 / 12)
    assert report.speculative.tau == 2.0 and report.speculative.accepted_by_depth == (1.0,)
    assert report.drift == pytest.approx((20 / 32) / (10 / 1)) and report.peak_memory_bytes == 7


def test_an_answer_of_one_token_has_no_speed() -> None:
    report = summarise([made(plain_s=1, fast_s=1, tokens=(3,))])
    assert report.speedup is None and report.speculative.tokens_per_s is None and report.drift is None
    assert report_json(report)["prompts"][0]["speedup"] is None


def test_different_tokens_are_found() -> None:
    other = made(plain_s=1, fast_s=1, category="d")
    (run,) = other.speculative_runs
    answers = [made(plain_s=1, fast_s=1), replace(other, speculative_runs=(replace(run, token_ids=(9,)),))]
    report = summarise(answers)
    assert not report.identical
    assert {name: c["identical"] for name, c in report_json(report)["categories"].items()} == {"c": True, "d": False}


def test_looping_answers_are_counted_and_shown_apart() -> None:
    loop = (1, 2, 3) * 10
    assert is_looping(loop) and not is_looping(range(30)) and not is_looping(()) and not is_looping((1, 1))
    straight = [made(plain_s=1, fast_s=1) for _ in range(2)]
    report = summarise([*straight, *[made(plain_s=4, fast_s=1, tokens=loop) for _ in range(3)]])
    assert (report.looping, report.speedup, report.speedup_without_looping) == (3, 4.0, 1.0)
    assert report_json(report)["looping"] == {"answers": 3, "tau_without": 2.0, "speedup_without": 1.0}
    assert report.warnings == ("looping answers carry the speed-up: 4.00 with them, 1.00 without",)
    assert summarise(straight).warnings == ()
    (only,) = summarise([made(plain_s=1, fast_s=1, tokens=loop)]).warnings
    assert "every answer repeats itself" in only


def test_warm_up_stops_when_the_machine_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 9.0, 2.0, 2.0, 2.1, 1.9, 1.0, 1.0])

    def generate(self: Session, prompt: object, options: object = None) -> GenerationResult:
        assert options.max_tokens == 16  # type: ignore[attr-defined]
        return made(plain_s=next(seconds), fast_s=1).plain

    monkeypatch.setattr(Session, "generate", generate)
    assert warm_up(alphabet_session(Alphabet()), row("1", "a"), BenchSettings()) == 3


def test_a_prompt_that_cannot_run_is_named_before_anything_is_measured() -> None:
    session = alphabet_session(Alphabet(), context=8)
    with pytest.raises(DataError, match=r"^prompt 'long': the prompt has 9 tokens"):
        check_prompts(session, [row("ok", "abc"), row("long", "abcdefghi")])


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="--repeats is 0, it must be at least 1"):
        BenchSettings(repeats=0)


def test_the_built_in_prompts() -> None:
    rows = builtin_bench_prompts()
    categories = [r.category for r in rows]
    assert len(rows) == 24 and {categories.count(name) for name in categories} == {3}
    assert any(len(r.turns) > 1 for r in rows)
