"""What `bench --compare` says of two reports, made by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.artifacts import to_plain
from elsi_edge.cli import bench_compare, common
from elsi_edge.runtime.bench.compare import Change, Comparison, compare
from elsi_edge.runtime.bench.intervals import interval_of_change, ratio_of_sums
from elsi_edge.runtime.bench.json_form import report_json
from elsi_edge.runtime.bench.report import summarise
from tests.test_bench import made

MADE_OF = ("tokens/s, speculative", "tokens/s, plain", "speed-up over plain, total", "tau", "first token, ms")
OF_REPORTS = ("ms per token, p50", "ms per token, p99", "peak memory, bytes", "steady anonymous memory, bytes")


def answer(
    name: str,
    *,
    tokens: Sequence[int] = tuple(range(11)),
    seconds: float = 0.5,
    plain_seconds: float = 1.0,
    tau: float | None = 2.0,
    first_ms: float = 100.0,
    turn: int = 0,
) -> dict[str, Any]:
    """As `json_form` writes one, without what no comparison reads."""
    return {
        "id": name,
        "turn": turn,
        "token_ids": list(tokens),
        "seconds": [seconds],
        "tau": tau,
        "time_to_first_token_ms": first_ms,
        "plain": {"token_ids": list(tokens), "seconds": [plain_seconds], "time_to_first_token_ms": first_ms},
    }


def report(prompts: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    steady = {"anonymous": 200e6, "pss": 300e6}
    return {
        "prompts": list(prompts),
        "max_tokens": 11,
        "threads": 1,
        "ms_per_token": {"p50": 10.0, "p99": 40.0},
        "peak_memory_bytes": 400e6,
        "memory": {"steady": steady},
        **more,
    }


def changes(found: Comparison) -> dict[str, Change]:
    return {change.name: change for change in found.changes}


def several(count: int = 8, **more: Any) -> list[dict[str, Any]]:
    """Answers of different speed and length."""
    return [
        answer(f"p{i}", tokens=range(6 + 5 * i), seconds=0.2 + 0.1 * i, plain_seconds=0.5 + 0.2 * i, **more)
        for i in range(count)
    ]


def test_figures_are_those_of_the_reports_themselves() -> None:
    answers = [made(plain_s=1 + i / 10, fast_s=0.6 + i / 20, name=f"p{i}", tokens=range(11 + 4 * i)) for i in range(6)]
    value = report_json(summarise(answers))
    found = changes(compare(value, value))
    expected = (value["tokens_per_s"], value["plain"]["tokens_per_s"], value["speedup_total"], value["tau"])
    for name, figure in zip(MADE_OF, (*expected, value["time_to_first_token_ms"]), strict=True):
        assert found[name].before == pytest.approx(figure) == found[name].after
        assert (found[name].ratio, found[name].interval, found[name].verdict) == (1.0, (1.0, 1.0), "within noise")


def test_columns_ratio_and_interval_cannot_contradict_each_other() -> None:
    """Most answers are faster in B, but the long one that makes up the total is slower."""
    before = report([answer(f"p{i}") for i in range(8)] + [answer("long", tokens=range(401), seconds=10.0)])
    after = report([answer(f"p{i}", seconds=0.4) for i in range(8)] + [answer("long", tokens=range(401), seconds=20.0)])
    change = changes(compare(before, after))["tokens/s, speculative"]
    assert change.before == pytest.approx(480 / 14.0) and change.after == pytest.approx(480 / 23.2)
    assert change.ratio == pytest.approx(change.after / change.before) and change.ratio < 1.0
    assert change.interval is not None and change.interval[0] <= change.ratio <= change.interval[1]


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, "better"), (0.6, "worse"), (1.03, "within noise")])
def test_a_speed_that_changed_beyond_noise(factor: float, verdict: str) -> None:
    before, after = report(several()), report(several())
    for one in after["prompts"]:
        one["seconds"] = [one["seconds"][0] / factor]
    found = changes(compare(before, after))
    for name in ("tokens/s, speculative", "speed-up over plain, total"):
        assert found[name].ratio == pytest.approx(factor) and found[name].verdict == verdict
    assert {found[name].verdict for name in ("tokens/s, plain", "tau", "first token, ms")} == {"within noise"}


def test_figures_are_of_shared_answers_and_what_is_of_whole_reports_is_not_judged() -> None:
    """B has two more prompts, hard and slow ones: nothing became worse."""
    hard = [answer(f"hard{i}", seconds=5.0, tau=1.0, first_ms=900.0) for i in range(2)]
    after = report([*several(), *hard], tau=1.1, speedup=0.3, time_to_first_token_ms=500.0, peak_memory_bytes=900e6)
    before = report(several(), tau=2.0, speedup=2.0, time_to_first_token_ms=100.0)
    found = compare(before, after)
    assert (found.shared, found.only) == (8, (0, 2))
    named = changes(found)
    assert {named[name].ratio for name in MADE_OF} == {1.0}
    assert {named[name].verdict for name in OF_REPORTS} == {"not judged"}
    assert any("do not hold the same answers" in note for note in found.notes)
    # The same prompts to another length are no more the same answers.
    assert changes(compare(before, report(several(), max_tokens=64)))["peak memory, bytes"].verdict == "not judged"


def test_the_other_way_round_turns_verdicts_and_ratios_over() -> None:
    slow = report([{**one, "seconds": [2 * one["seconds"][0]], "tau": 1.5} for one in several()])
    there, back = (changes(compare(*pair)) for pair in ((slow, report(several())), (report(several()), slow)))
    for name in ("tokens/s, speculative", "tau", "speed-up over plain, total"):
        assert (there[name].verdict, back[name].verdict) == ("better", "worse")
        assert there[name].ratio == pytest.approx(1.0 / back[name].ratio)


def test_two_runs_of_one_bundle_are_within_noise_throughout() -> None:
    """As a run after another gave it: first tokens of 126 and 114.7 ms, other figures a few percent apart."""
    draw = np.random.default_rng(7)

    def a_run(speed: float, first_ms: float, **more: Any) -> dict[str, Any]:
        prompts = several(first_ms=0.0)
        for one in prompts:
            for arm in (one, one["plain"]):
                arm["seconds"] = [arm["seconds"][0] / speed * draw.uniform(0.97, 1.03)]
                arm["time_to_first_token_ms"] = first_ms * draw.uniform(0.95, 1.05)
        return report(prompts, time_to_first_token_ms=first_ms, **more)

    before = a_run(1.0, 126.0)
    after = a_run(1.04, 114.7, peak_memory_bytes=405e6, ms_per_token={"p50": 9.7, "p99": 31.0})
    found = compare(before, after)
    assert found.noise == 0.05
    verdicts = {change.name: change.verdict for change in found.changes}
    assert verdicts.pop("ms per token, p99") == "not judged"
    assert set(verdicts.values()) == {"within noise"}


def test_first_tokens_that_waver_in_one_report_hide_a_change() -> None:
    def readings(factor: float, wavering: float) -> dict[str, Any]:
        prompts = several(first_ms=100.0 * factor)
        for place, one in enumerate(prompts):
            one["plain"]["time_to_first_token_ms"] *= 1.0 + wavering * (-1.0) ** place
        return report(prompts)

    assert changes(compare(readings(1.0, 0.0), readings(0.8, 0.0)))["first token, ms"].verdict == "better"
    assert changes(compare(readings(1.0, 0.3), readings(0.8, 0.3)))["first token, ms"].verdict == "within noise"


@pytest.mark.parametrize(
    ("unsteady", "noise"),
    [
        ({"drift": 1.4}, 0.4),
        ({"spread": 0.3}, 0.3),
        ({"noise": {"load": {"own": 0.3, "others": 0.6, "steal": 0.0}, "words": ["others are here"]}}, 0.6),
        ({"noise": {"load": {"own": 0.3, "others": None, "steal": None}, "words": []}}, 0.05),
        ({"noise": {"load": None, "words": []}, "drift": None, "spread": None}, 0.05),
    ],
)
def test_an_unsteady_report_hides_small_changes(unsteady: dict[str, Any], noise: float) -> None:
    after = report([{**one, "seconds": [one["seconds"][0] / 1.25]} for one in several()], **unsteady)
    found = compare(report(several()), after)
    assert found.noise == pytest.approx(noise)
    assert found.changes[0].verdict == ("better" if noise < 0.25 else "within noise")
    assert ("B: others are here" in found.notes) == (noise == 0.6)


def test_tau_and_memory_have_a_noise_of_their_own() -> None:
    steady = {"anonymous": 190e6, "pss": 295e6}
    after = report(several(tau=2.1), memory={"steady": steady}, peak_memory_bytes=360e6)
    found = changes(compare(report(several(), drift=1.5), after))
    assert found["tau"].verdict == "better" and found["tau"].ratio == pytest.approx(1.05)
    assert found["steady anonymous memory, bytes"].verdict == "better" == found["peak memory, bytes"].verdict
    assert found["steady memory (Pss), bytes"].verdict == "within noise"


def test_tau_is_over_verifications() -> None:
    # 10 tokens in 5 verifications and 40 in 10; an answer of one token has none.
    answers = [answer("a", tau=2.0), answer("b", tokens=range(41), tau=4.0), answer("c", tokens=(1,), tau=None)]
    change = changes(compare(report(answers), report(answers)))["tau"]
    assert change.before == pytest.approx(50 / 15)


def test_answers_are_the_same_as_far_as_both_go() -> None:
    before = report([answer("a"), answer("b"), answer("c")])
    after = report([answer("a", tokens=range(5)), answer("b", tokens=range(30)), answer("c", tokens=(0, 1, 7))])
    found = compare(before, {**after, "max_tokens": 30, "partial": True})
    assert (found.shared, found.other_tokens) == (3, 1)
    assert found.differing == {"max_tokens": (11, 30), "partial": (None, True)}


def test_a_long_run_is_paired_turn_by_turn_and_as_often() -> None:
    """B went over its prompts three times, and slower at last; A went once."""
    again = [answer(f"p{i}", seconds=seconds) for seconds in (0.5, 1.0, 2.0) for i in range(4)]
    found = compare(report([answer(f"p{i}") for i in range(4)]), report(again))
    assert found.shared == 4 and found.only == (0, 0) and found.changes[0].ratio == 1.0


def test_one_answer_alone_is_not_judged_and_none_gives_no_figures() -> None:
    found = compare(report([answer("a")]), report([answer("a", seconds=0.1, tau=4.0)]))
    named = changes(found)
    assert {named[name].verdict for name in MADE_OF} == {"not judged"}
    assert named["tokens/s, speculative"].ratio == pytest.approx(5.0)
    none = compare(report([answer("a")]), report([answer("b")]))
    assert none.shared == 0 and none.only == (1, 1) and not set(MADE_OF) & set(changes(none))
    assert {change.verdict for change in none.changes} == {"not judged"}


def test_answers_of_one_token_have_no_speed() -> None:
    ends = [answer(name, tokens=(1,), seconds=0.0, plain_seconds=0.0, tau=None) for name in "abc"]
    assert list(changes(compare(report(ends), report(ends))))[:2] == ["first token, ms", "ms per token, p50"]


def test_several_thread_counts_are_said() -> None:
    short = [{"threads": 1}, {"threads": 2}]
    found = compare(report(several(), by_threads=short), report(several(), threads=2, by_threads=short[:1]))
    assert found.notes[0] == "A holds 2 thread counts; the first, 1 thread, is compared"
    assert not any("B holds" in note for note in found.notes) and found.differing == {"threads": (1, 2)}
    (note, *_) = compare(report(several()), report(several(), threads=2, by_threads=short)).notes
    assert note == "B holds 2 thread counts; the first, 2 threads, is compared"


def test_an_interval_of_a_change_is_narrow_where_answers_move_together() -> None:
    draw = np.random.default_rng(0)
    before = np.stack([draw.uniform(5, 50, 30), draw.uniform(0.1, 2.0, 30)], axis=1)  # [answers, values]
    after = before * [1.0, 0.8]
    assert interval_of_change(before, after, ratio_of_sums) == pytest.approx((1.25, 1.25))
    assert interval_of_change(before[:1], after[:1], ratio_of_sums) is None
    assert interval_of_change(before * [1.0, 0.0], after, ratio_of_sums) is None
    noisy = after * np.stack([np.ones(30), draw.uniform(0.5, 1.5, 30)], axis=1)
    low, high = interval_of_change(before, noisy, ratio_of_sums) or (0.0, 0.0)
    assert 1.0 < low < 1.25 < high < 1.6


def test_what_the_terminal_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, said = [tmp_path / "a.json", tmp_path / "b.json"], list[str]()
    form = {"format": "elsi-edge-bench", "format_version": 1}
    one = report([answer("a")], by_threads=[{"threads": 1}, {"threads": 2}], **form)
    two = report([answer("a", tokens=(9, 9)), answer("b")], **form)
    monkeypatch.setattr(common.out, "print", lambda text, **_: said.append(text) if isinstance(text, str) else None)
    for path, value in zip(paths, (one, two), strict=True):
        path.write_text(json.dumps(value))
    bench_compare.show(*paths, json=False)
    assert said[:2] == ["1 answer in both, 1 of them with other tokens", "in one alone: 0 answers of A, 1 answer of B"]
    assert said[2].startswith(
        "noise: differences of speed within 5% are taken for noise, of the first token within 10%"
    )
    assert said[3] == "A holds 2 thread counts; the first, 1 thread, is compared"
    assert to_plain(compare(one, two))["changes"][0]["verdict"] == "not judged"
    monkeypatch.setattr(common, "emit_json", lambda value: said.append(json.dumps(value)))
    bench_compare.show(*paths, json=True)
    assert json.loads(said[-1])["only"] == [0, 1]
