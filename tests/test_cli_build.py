"""`build`: one command from model to bundle, resumed, skipped, refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.artifacts import PromptRow
from elsi_edge.cli import build_plan, build_stages
from elsi_edge.cli.build_plan import Plan, Stage, answer_budget, train_budget
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel

ROWS = [
    PromptRow(id=f"p{i}", turns=(f"Marn counts {i} planks, coils the rope and waits for bell {i}.",)) for i in range(40)
]
SMALL = ("--max-tokens", 6, "--vocab-size", 64, "--steps", 2, "--threads", 1)


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elsi_edge.prompts.builtin_calibration_prompts", lambda: ROWS)


def test_a_build_is_interrupted_resumed_reported_and_skipped(
    run: Run, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    command = ("build", tiny_model.model, "--hours", 1, "--work", work, *SMALL)
    place = work / "tiny-llama"
    original = build_stages.Build._distill

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    settings = build_stages.Build._train_settings  # several batches an epoch
    monkeypatch.setattr(
        build_stages.Build, "_train_settings", lambda self: replace(settings(self), batch_tokens=128, replay_tokens=0)
    )
    monkeypatch.setattr(build_stages.Build, "_distill", interrupted)
    done = run(*command)
    assert done.code == 130 and done.out == "", done.err
    assert "estimate for 1 h" in done.err and "the same command goes on" in done.err
    assert (place / "plain-int4" / "manifest.json").is_file() and (place / "selection.json").is_file()
    assert not (place / "shards").exists()
    seconds = json.loads((place / "build.json").read_text())["seconds"]
    assert seconds["plain bundle"] > 0 and seconds["calibrate"] > 0

    monkeypatch.setattr(build_stages.Build, "_distill", original)
    done = run(*command, "--json")
    assert done.code == 0, done.err
    assert "plain bundle: is there" in done.err and "calibrate: is there" in done.err
    result = done.json
    assert 0 < result["rows"] <= 40 and 0 < result["answer_tokens"] <= 40 * 6 and len(result["agreement"]) >= 3
    assert result["taps"] == json.loads((place / "selection.json").read_text())["taps"] and result["verdict"]
    assert (result["steps"], Path(result["path"])) == (2, place / "bundle-int4")
    assert set(result["components"]) >= {"draft", "target weights"}
    assert f"Next: elsi-edge bench {place / 'bundle-int4'}" in done.err
    assert json.loads((place / "build-report.json").read_text()) == result
    text = (place / "build-report.txt").read_text()
    assert f"{result['rows']} conversations" in text and result["verdict"][0] in text

    before = (place / "bundle-int4" / "manifest.json").stat().st_mtime_ns
    again = run(*command)
    assert again.code == 0 and again.err.count(": is there") == 5, again.err
    assert (place / "bundle-int4" / "manifest.json").stat().st_mtime_ns == before
    assert "agrees with the target" in again.out

    more = run(*command[:-4], "--steps", 3, "--threads", 1, "--json")
    assert more.code == 0 and more.json["steps"] == 3, more.err
    assert more.err.count(": is there") == 3 and "continues at step 2" in more.err
    assert (place / "bundle-int4" / "manifest.json").stat().st_mtime_ns != before

    one_line(run(*command, "--m", 2), 1, "shards of tap", "m = 2", "--work")


def test_the_estimate_alone_makes_nothing(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    done = run("build", tiny_model.model, "--hours", 2, "--work", tmp_path / "w", "--estimate", "--json")
    assert done.code == 0, done.err
    assert [stage["name"] for stage in done.json["stages"]] == list(build_plan.STAGES)
    assert sum(stage["seconds"] for stage in done.json["stages"]) == pytest.approx(7200, rel=0.01)
    assert done.json["disk"] > 0 and not (tmp_path / "w").exists()
    assert "33% goes to answers" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--hours", 0), 2, ("--hours is 0",)),
        (("--hours", 0.001), 2, ("--hours 0.001 leaves", "give at least")),
        (("--hours", 1, "--m", 3), 2, ("3",)),
        (("--hours", 1, "--prompts", "nowhere.jsonl"), 1, ("nowhere.jsonl",)),
    ],
)
def test_bad_usage_is_one_line(
    run: Run, tiny_model: TinyModel, arguments: tuple[object, ...], code: int, parts: tuple[str, ...]
) -> None:
    one_line(run("build", tiny_model.model, *arguments), code, *parts)
    assert not Path("elsi-work").exists()


def _plan(**changes: Any) -> Plan:
    stages = (
        Stage(name="plain bundle", seconds=1, disk=100, memory=5, done=True),
        Stage(name="train", seconds=1, disk=int(changes.get("disk", 10)), memory=int(changes.get("memory", 7))),
    )
    return Plan(hours=1, stages=stages, calibration_answers=0, answer_seconds=1)


def test_too_little_disk_or_memory_is_refused_before_anything(
    run: Run, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (_plan().disk, _plan().memory) == (10, 7)
    command = ("build", tiny_model.model, "--hours", 1, "--work", tmp_path / "w")
    for plan, code, part in (
        (_plan(disk=10**18), 1, "MB are free"),
        (_plan(memory=10**15), 1, "1000000.0 GB of memory"),
    ):
        monkeypatch.setattr(build_stages.Build, "plan", lambda _, plan=plan: plan)
        done = run(*command)
        assert done.code == code and part in done.err.splitlines()[-1] and done.out == ""
    assert not (tmp_path / "w").exists()


def test_how_the_hours_are_split() -> None:
    assert answer_budget(3, spent=1200, final=600) == pytest.approx((10800 - 1800) / 3)
    assert train_budget(3, spent=1200 + 3000, final=600) == pytest.approx(6000)
    assert answer_budget(0.1, spent=1200, final=600) == 0


class _Bar:
    def advance(self, n: float = 1.0) -> None:
        """Nothing to show."""


def test_answers_end_when_their_time_is_up_but_not_before_there_is_something() -> None:
    report = build_stages._Until(_Bar(), until=0.0)
    for _ in range(build_stages._LEAST_ROWS - 1):
        report.advance(1)
    with pytest.raises(build_stages.TimeIsUp):
        report.advance(1)
