"""The verbs of a bundle, run in this process on a tiny model: results, the JSON contract, and bad input in one line."""

import io
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from elsi_edge.bundle import Bundle
from elsi_edge.bundle_ref import find_bundle
from elsi_edge.cli import chat as chat_verb
from elsi_edge.cli import common, options
from elsi_edge.errors import BundleError, PromptError
from elsi_edge.fsio import sha256_file
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.policy import DEFAULT_DRAFT_NODES
from elsi_edge.runtime.result import GenerationEvent
from elsi_edge.runtime.session import Session
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel
from tests.test_boundaries import python

PROMPT = "Marn keeps a small ferry"


def edited(bundle: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a bundle whose manifest was changed."""
    shutil.copytree(bundle, to)
    file = to / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    return to


def without_draft(bundle: Path, to: Path) -> Path:
    return edited(bundle, to, lambda manifest: manifest.update(draft=None, selection=None))


def without_template(bundle: Path, to: Path) -> Path:
    shutil.copytree(bundle, to)
    text = json.loads((to / "text.json").read_text()) | {"template": "", "template_source": ""}
    (to / "text.json").write_text(json.dumps(text))
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["files"]["text.json"] = {
        "bytes": (to / "text.json").stat().st_size,
        "sha256": sha256_file(to / "text.json"),
    }
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


# --- generate --------------------------------------------------------------------------------------------------------


def test_generate_streams_text_and_says_one_line_about_it(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    bundle = tiny_bundle("fp32")
    as_json = run("generate", bundle, PROMPT, "--max-tokens", 24, "--json")
    assert as_json.code == 0 and as_json.err == "" and as_json.out.count("\n") == 1
    shown = run("generate", bundle, PROMPT, "--max-tokens", 24)
    assert (shown.code, shown.out) == (0, as_json.json["text"] + "\n")
    assert shown.err.count("\n") == 1 and "24 tokens (length); tau " in shown.err
    assert f"tree of up to {DEFAULT_DRAFT_NODES['fp32']} nodes, accepted " in shown.err
    assert run("generate", bundle, "-", "--max-tokens", 24, stdin=PROMPT.encode() + b"\n").out == shown.out


@pytest.mark.usefixtures("stock_operators")
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_generate_json_and_the_same_tokens_as_plain(run: Run, tiny_bundle: Callable[..., Path], precision: str) -> None:
    bundle = tiny_bundle(precision)
    fast = run("generate", bundle, PROMPT, "--max-tokens", 40, "--draft-nodes", 3, "--json").json
    plain = run("generate", bundle, PROMPT, "--max-tokens", 40, "--plain", "--json").json
    assert fast["token_ids"] == plain["token_ids"] and fast["text"] == plain["text"]
    assert (fast["exact"], fast["speedup"], fast["identical"]) == (True, None, None)
    assert (fast["draft_nodes"], plain["mode"]) == (3, "plain") and fast["mode"] == (
        "tree" if precision == "fp32" else "chain"
    )
    contract = {"token_ids", "text", "finish_reason", "tau", "tokens_per_s", "time_to_first_token_ms", "speedup"}
    assert contract | {"exact", "identical", "peak_memory_bytes", "seed", "threads", "provider"} <= set(fast)


def test_wide_trees_up_to_the_end_of_the_context(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    """Every node of the draft takes a slot, so its trees must shrink where the context ends."""
    arguments = ("generate", tiny_bundle("fp32"), PROMPT, "--max-tokens", 256, "--json")
    fast, plain = run(*arguments, "--draft-nodes", 30).json, run(*arguments, "--plain").json
    assert fast["token_ids"] == plain["token_ids"] and fast["finish_reason"] == plain["finish_reason"] == "length"


@pytest.mark.usefixtures("stock_operators")
def test_a_tree_at_int4_needs_no_exact(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    done = run("generate", tiny_bundle("int4"), PROMPT, "--no-exact", "--draft-nodes", 20, "--max-tokens", 8, "--json")
    assert done.json["mode"] == "tree" and not done.json["exact"] and "kernel noise" in done.json["exactness"]


def test_sampling_repeats_with_the_seed_that_is_shown(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    common_options = ("--temperature", 1.0, "--max-tokens", 12, "--json")
    first = run("generate", tiny_bundle("fp32"), PROMPT, *common_options).json
    again = run("generate", tiny_bundle("fp32"), PROMPT, *common_options, "--seed", first["seed"]).json
    assert first["token_ids"] == again["token_ids"] and isinstance(first["seed"], int)


def test_a_model_without_template_is_continued_raw_and_says_so(
    run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = without_template(tiny_bundle("fp32"), tmp_path / "b")
    done = run("generate", bundle, PROMPT, "--max-tokens", 4)
    assert done.code == 0 and "no chat template" in done.err
    raw = run("generate", tiny_bundle("fp32"), PROMPT, "--max-tokens", 4, "--raw")
    assert raw.out == done.out and "template" not in raw.err
    one_line(run("generate", bundle, PROMPT, "--system", "x"), 2, "no chat template", "--system")
    one_line(run("chat", bundle), 2, "no chat template", "generate --raw")


@pytest.mark.usefixtures("stock_operators")
@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ((PROMPT, "--temperature", "nan"), 2, ("--temperature is nan",)),
        ((PROMPT, "--temperature", "-1"), 2, ("--temperature is -1",)),
        ((PROMPT, "--top-p", "1.01"), 2, ("--top-p is 1.01", "at most 1")),
        ((PROMPT, "--top-k", "-1"), 2, ("--top-k is -1",)),
        ((PROMPT, "--min-p", "1.5"), 2, ("--min-p is 1.5",)),
        ((PROMPT, "--seed", "-1"), 2, ("--seed is -1",)),
        ((PROMPT, "--seed", str(1 << 63)), 2, ("--seed is 9223372036854775808",)),
        ((PROMPT, "--max-tokens", "0"), 2, ("--max-tokens is 0",)),
        ((PROMPT, "--stop", ""), 2, ("--stop is an empty text",)),
        ((PROMPT, "--stop", "\udce9"), 2, ("--stop is not clean UTF-8: byte 0xe9",)),
        ((PROMPT, "--draft-nodes", "16"), 2, ("--draft-nodes is 16", "at most 15", "--no-exact")),
        ((PROMPT, "--plain", "--draft-nodes", "2"), 2, ("--plain", "--draft-nodes is 2")),
        ((PROMPT, "--raw", "--system", "x"), 2, ("--raw", "--system")),
        ((PROMPT, "--threads", "-2"), 2, ("--threads is -2",)),
        ((PROMPT, "--provider", "typo"), 2, ("'typo'", "CPUExecutionProvider")),
        ((PROMPT, "--provider", "openvino"), 1, ("OpenVINOExecutionProvider", "pip install")),
        ((PROMPT, "--repetition-penalty", "0"), 2, ("--repetition-penalty is 0",)),
        ((PROMPT, "--frequency-penalty", "1.3"), 2, ("No such option",)),
        ((PROMPT, "--proposals", "oracle"), 2, ("--proposals is 'oracle'", "draft or ngram")),
        (("", "--raw"), 2, ("no tokens",)),
        (("x" * 3000,), 2, ("tokens", "255 fit")),
        (("caf\udce9",), 2, ("not clean UTF-8", "0xe9", "character 4")),
        (("-",), 2, ("prompt is empty", "--raw")),
        ((" \n",), 2, ("prompt is empty", "--raw")),
    ],
)
def test_generate_bad_input(
    run: Run, tiny_bundle: Callable[..., Path], arguments: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    one_line(run("generate", tiny_bundle("int4"), *arguments, "--json"), code, *parts)


def test_a_broken_bundle_is_one_line_in_every_verb(run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    good = tiny_bundle("int4")

    def broken(name: str, change: Callable[[Path], object]) -> Path:
        shutil.copytree(good, tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    def cut(place: Path) -> None:
        with (place / "target.weights").open("rb+") as handle:
            handle.truncate(1000)

    def alter(place: Path) -> None:
        data = bytearray((place / "target.weights").read_bytes())
        data[50] ^= 1
        (place / "target.weights").write_bytes(data)

    cases = [
        (broken("missing", lambda place: (place / "draft.onnx").unlink()), ("draft.onnx is missing",)),
        (broken("cut", cut), ("target.weights has 1000 bytes",)),
        (broken("altered", alter), ("target.weights was altered",)),
        (broken("json", lambda place: (place / "manifest.json").write_text("{")), ("not valid JSON",)),
        (edited(good, tmp_path / "version", lambda m: m.update(format_version=9)), ("format version 9", "reads 1")),
        (edited(good, tmp_path / "away", lambda m: m["graphs"].update(draft="../x.onnx")), ("'../x.onnx'",)),
        (edited(good, tmp_path / "back", lambda m: m["graphs"].update(draft="a\\x.onnx")), ("x.onnx'",)),
        (tmp_path / "nowhere", ("no bundle at", "elsi-edge export")),
    ]
    for path, parts in cases:
        for verb in (("generate", path, "x"), ("chat", path), ("bench", path)):
            one_line(run(*verb), 1, *parts)
        if path.exists():
            one_line(run("inspect", path), 1, *parts)


def stopping(
    monkeypatch: pytest.MonkeyPatch, after: int, how: Callable[[], None], seen: list[Any] | None = None
) -> None:
    """Let `how` happen after so many events of the first stream."""
    stream = Session.stream
    calls = 0

    def spy(self: Session, prompt: Any, options: GenerateOptions | None = None) -> Iterator[GenerationEvent]:
        nonlocal calls
        calls += 1
        if seen is not None:
            seen.append(prompt)
        for number, event in enumerate(stream(self, prompt, options)):
            if calls == 1 and number == after:
                how()
            yield event

    monkeypatch.setattr(Session, "stream", spy)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_twice() -> None:
    press()
    press()


def test_an_interrupted_answer_keeps_its_text(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("generate", tiny_bundle("fp32"), PROMPT, "--max-tokens", 12).out
    stopping(monkeypatch, 6, raise_interrupt)
    done = run("generate", tiny_bundle("fp32"), PROMPT, "--max-tokens", 12)
    assert (done.code, done.err) == (130, "interrupted\n")
    assert done.out.endswith("\n") and whole.startswith(done.out[:-1]) and 1 < len(done.out) < len(whole)


def test_an_interrupted_json_answer_prints_nothing(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping(monkeypatch, 2, raise_interrupt)
    done = run("generate", tiny_bundle("fp32"), PROMPT, "--json")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


# --- chat ------------------------------------------------------------------------------------------------------------


def fresh_answer(bundle: Path, messages: Sequence[dict[str, str]], max_tokens: int) -> str:
    return Session.open(bundle).generate(messages, GenerateOptions(max_tokens=max_tokens)).text


def test_chat_answers_as_a_fresh_session_would(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    bundle = tiny_bundle("fp32")
    done = run("chat", bundle, "--max-tokens", 6, "--system", "Be brief.", stdin="Once\n\n   \r\nNaïve 🙂".encode())
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}]
    first = fresh_answer(bundle, history, 6)
    history += [{"role": "assistant", "content": first}, {"role": "user", "content": "Naïve 🙂"}]
    assert (done.code, done.out) == (0, f"{first}\n{fresh_answer(bundle, history, 6)}\n")
    assert done.err.count("tokens/s") == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    stopping(monkeypatch, 3, press, seen)
    done = run("chat", tiny_bundle("fp32"), "--max-tokens", 24, stdin=b"Once\nAgain\n")
    assert done.code == 0 and "[stopped; the conversation keeps what was shown]" in done.err
    partial = seen[1][1]["content"]
    assert [m["role"] for m in seen[1]] == ["user", "assistant", "user"] and partial and done.out.startswith(partial)
    monkeypatch.undo()
    assert done.out == f"{partial}\n{fresh_answer(tiny_bundle('fp32'), seen[1], 24)}\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_any_text_leaves_the_turn_out(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    stopping(monkeypatch, 0, press, seen)
    monkeypatch.setattr(Session, "stream", _muted(Session.stream))
    done = run("chat", tiny_bundle("fp32"), "--max-tokens", 4, stdin=b"Once\nAgain\n")
    assert done.code == 0 and "this turn was left out" in done.err
    assert seen[1] == [{"role": "user", "content": "Again"}]


def _muted(stream: Callable[..., Iterator[GenerationEvent]]) -> Callable[..., Iterator[GenerationEvent]]:
    """The first event without its text."""

    def muted(self: Session, prompt: Any, options: GenerateOptions | None = None) -> Iterator[GenerationEvent]:
        for number, event in enumerate(stream(self, prompt, options)):
            yield GenerationEvent(text="", token_ids=event.token_ids) if number == 0 else event

    return muted


def test_ctrl_c_twice_or_at_the_prompt_leaves(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_verb, "_read_line", raise_interrupt)
    done = run("chat", tiny_bundle("fp32"))
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\n")))
    stopping(monkeypatch, 2, press_twice)
    assert run("chat", tiny_bundle("fp32"), stdin=b"Once\n").code == 130


def test_a_turn_that_cannot_run_is_left_out_and_the_chat_goes_on(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    turns = b"caf\xe9\n" + b"word " * 400 + b"\nOnce\n"
    done = run("chat", tiny_bundle("fp32"), "--max-tokens", 3, stdin=turns)
    alone = fresh_answer(tiny_bundle("fp32"), [{"role": "user", "content": "Once"}], 3)
    assert (done.code, done.out) == (0, alone + "\n")
    assert "byte 0xe9 at character 4" in done.err and "255 fit" in done.err


def test_a_conversation_beyond_the_context_drops_its_oldest_turns(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    stopping(monkeypatch, -1, press, seen)
    turn = b"the ferry on the river and the mill on the far bank and the ice and the pole of her mother\n"
    done = run("chat", tiny_bundle("fp32"), "--max-tokens", 20, "--system", "Oro.", stdin=turn * 6)
    assert done.code == 0 and "of 256 tokens; dropped the oldest turn" in done.err
    for messages in seen:
        roles = [message["role"] for message in messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]
        assert messages[0]["content"] == "Oro."
    assert len(seen) == 6 and len(seen[-1]) < 12


def test_fit_counts_in_pairs() -> None:
    def count(messages: list[dict[str, str]]) -> int:
        return sum(len(message["content"]) for message in messages)

    def talk(*sizes: int) -> list[dict[str, str]]:
        roles = ["user", "assistant"] * len(sizes)
        return [{"role": role, "content": "x" * size} for role, size in zip(roles, sizes, strict=False)]

    assert chat_verb.fit(talk(5, 5, 5), count, context=20, reserve=5) == (talk(5, 5, 5), "")
    kept, line = chat_verb.fit(talk(5, 5, 5), count, context=19, reserve=5)
    assert kept == talk(5) and line == (
        "note: the conversation has 15 of 19 tokens; dropped the oldest turn and its answer, 5 tokens stay"
    )
    kept, line = chat_verb.fit(talk(4, 4, 4, 4, 2), count, context=8, reserve=1)
    assert kept == talk(2) and "dropped the 2 oldest turns and their answers" in line
    assert chat_verb.fit(talk(7), count, context=8, reserve=5) == (talk(7), "")
    with pytest.raises(PromptError, match="this turn has 8 tokens, the context 8"):
        chat_verb.fit(talk(8), count, context=8, reserve=1)


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_tells_what_each_thing_is(
    run: Run, tiny_model: TinyModel, tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    found = run("inspect", tiny_bundle("int4"), "--json").json
    assert (found["kind"], found["taps"], found["precision"]) == ("bundle", [1], "int4")
    assert set(found["components"]) == {"target weights", "target graphs", "draft", "tokenizer"}
    assert found["bytes"] == sum(entry.bytes for entry in Bundle.load(tiny_bundle("int4")).manifest.files.values())
    assert found["text"]["end_tokens"] == [2, 5] and found["text"]["template"] == "chat_template.jinja"
    assert found["text"]["generation_defaults_not_used"] == {"temperature": 0.7}
    selection = tmp_path / "selection.json"
    selection.write_text(json.dumps(tiny_model.selection.to_json()))
    assert run("inspect", selection, "--json").json["kind"] == "selection"
    draft = run("inspect", tiny_model.draft, "--json").json
    assert (draft["kind"], draft["selection"]["taps"], draft["draft_vocab_size"]) == ("draft", [1], 128)
    model = run("inspect", tiny_model.model, "--json").json
    assert (model["kind"], model["shape"]["blocks"]) == ("model", 2)
    assert model["target_fingerprint"] == tiny_model.selection.target_fingerprint
    shown = run("inspect", tiny_bundle("int4"))
    assert "  generation defaults not used: temperature 0.7\n" in shown.out and "Next: elsi-edge bench" in shown.err


def test_inspect_shards(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    from elsi_edge.draft.shards import ShardManifest
    from elsi_edge.models import resolve

    ShardManifest(
        model="m", shape=resolve(str(tiny_model.model)).shape, selection=tiny_model.selection, target_fingerprint="f",
        tokenizer_sha256="t", template_sha256="t", prompts_sha256="p", required_ids=(1,), settings={"seed": 0},
    ).save(tmp_path)  # fmt: skip
    found = run("inspect", tmp_path, "--json").json
    assert (found["kind"], found["rows"], found["selection"]["taps"]) == ("shards", 0, [1])


def test_inspect_lists_what_a_work_directory_holds(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    place = tmp_path / "a b" / "tiny"
    (place / "calibration").mkdir(parents=True)
    (place / "calibration" / "report.html").touch()
    (place / "calibration" / "notes.json").write_text("[]")
    selection = replace(tiny_model.selection, tokens=77, settings={"tokens_read": 300})
    (place / "selection.json").write_text(json.dumps(selection.to_json()))
    numbers = {"format": "elsi-edge-calibration", "selection": selection.to_json()}
    (place / "calibration" / "calibration.json").write_text(json.dumps(numbers))
    shutil.copytree(tiny_model.draft, place / "draft")
    for start, names in (
        (place.parent, ["tiny/calibration/calibration.json", "tiny/calibration/report.html", "tiny/draft",
                        "tiny/selection.json"]),
        (place, ["calibration/calibration.json", "calibration/report.html", "draft", "selection.json"]),
        (place / "calibration", ["calibration.json", "report.html"]),
    ):  # fmt: skip
        found = run("inspect", start, "--json").json
        assert found["kind"] == "directory" and [each["path"] for each in found["holds"]] == names
        for each in found["holds"]:
            if each["command"].startswith("elsi-edge"):
                _, verb, path = shlex.split(each["command"])
                shown = run(verb, path)
                assert shown.code == 0
                assert each["what"] == "draft" or "kept positions  77\ntokens read     300\n" in shown.out
    assert f"elsi-edge inspect '{place}/draft'" in run("inspect", place).out
    (tmp_path / "empty").mkdir()
    one_line(run("inspect", tmp_path / "empty"), 1, "config.json")


def test_inspect_bad_input(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    one_line(run("inspect", other), 1, "is no selection")
    other.write_text("{")
    one_line(run("inspect", other), 1, "cannot be read", "calibrate again")
    value = tiny_model.selection.to_json()
    other.write_text(json.dumps({**value, "taps": [9]}))
    one_line(run("inspect", other), 1, "0..2")
    other.write_text(json.dumps({**value, "format_version": 3}))
    one_line(run("inspect", other), 1, "format version 3")
    one_line(run("inspect", "no such thing"), 1, "unknown model")
    shutil.copytree(tiny_model.draft, tmp_path / "draft")
    with (tmp_path / "draft" / "draft.safetensors").open("rb+") as handle:
        handle.truncate(500)
    one_line(run("inspect", tmp_path / "draft"), 1, "500 bytes")


# --- bench -----------------------------------------------------------------------------------------------------------


def test_a_bundle_that_is_not_there_is_made_in_the_same_work_directory(run: Run) -> None:
    one_line(run("generate", "my model", "Hi", "--work", "w w"), 1, "elsi-edge export 'my model' --work 'w w'\n")


def test_what_typer_says_carries_no_mark_of_its_library(run: Run) -> None:
    done = run("export", "m", "--precision", "fp16")
    one_line(done, 2, "Invalid value for '--precision': 'fp16' is not one of 'int4'")


def test_bench_json(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    done = run("bench", tiny_bundle("int4"), "--limit", 2, "--max-tokens", 8, "--draft-nodes", 3, "--json")
    assert done.code == 0 and done.out.count("\n") == 1
    assert done.err == "warm up ...\nbench: 2 answers\n"
    report = done.json
    assert report["identical"] and report["exact"] and not report["partial"] and report["draft_nodes"] == 3
    contract = {"tau", "tokens_per_s", "speedup", "peak_memory_bytes", "time_to_first_token_ms"}
    assert all(report[name] is not None for name in contract)
    assert report["answers"] == len(report["prompts"]) == 2 and report["plain"]["tokens_per_s"] > 0
    assert report["versions"]["onnxruntime"] and report["cpu"] and report["prompts_sha256"] and report["taps"] == [1]
    assert [group["answers"] for group in report["categories"].values()] == [1, 1]  # --limit takes of each in turn


def test_bench_shows_a_table(run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["Once", "And then?"], "category": "story"}\n')
    done = run("bench", tiny_bundle("fp32"), "--prompts", prompts, "--max-tokens", 6)
    assert done.code == 0 and "identical: yes (the same tokens" in done.out and "story" in done.out
    assert "median of the answers' own ratios" in done.out and "Next: elsi-edge tune" in done.err


@pytest.mark.usefixtures("stock_operators")
def test_bench_says_when_tokens_differ(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from elsi_edge.runtime.bench import run as measuring

    measure = measuring.measure

    def differing(*arguments: Any) -> Iterator[Any]:
        for answer in measure(*arguments):
            (run,) = answer.speculative_runs
            yield replace(answer, speculative_runs=(replace(run, token_ids=(*run.token_ids[:2], 9, 9)),))

    monkeypatch.setattr(measuring, "measure", differing)
    arguments = ("bench", tiny_bundle("fp32"), "--limit", 1, "--max-tokens", 4)
    done = run(*arguments, "--json")
    assert done.code == 1 and done.json["identical"] is False
    assert "differ in exact mode: prompt 'writing-1', turn 1, from token 3" in done.err
    assert run("bench", tiny_bundle("int4"), "--limit", 1, "--max-tokens", 4, "--no-exact", "--json").code == 0


def test_an_interrupted_bench_keeps_what_it_has(
    run: Run, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from elsi_edge.runtime.bench import run as measuring

    measure = measuring.measure

    def interrupted(*arguments: Any, keep: int = 1) -> Iterator[Any]:
        for number, answer in enumerate(measure(*arguments)):
            if number == keep:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(measuring, "measure", interrupted)
    arguments = ("bench", tiny_bundle("fp32"), "--limit", 3, "--max-tokens", 4)
    done = run(*arguments, "--json")
    assert done.code == 130 and done.json["partial"] is True and done.json["answers"] == 1
    monkeypatch.setattr(measuring, "measure", lambda *a: interrupted(*a, keep=0))
    done = run(*arguments, "--json")
    assert (done.code, done.out, done.err) == (130, "", "warm up ...\nbench: 3 answers\ninterrupted\n")


@pytest.mark.usefixtures("stock_operators")
def test_bench_bad_input(run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tiny_bundle("fp32")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": \n')
    one_line(run("bench", bundle, "--prompts", prompts), 1, "line 2", "not valid JSON")
    prompts.write_text('{"id": "x", "prompt": ""}\n')
    one_line(run("bench", bundle, "--prompts", prompts), 1, "line 1", "'x' is empty")
    prompts.write_text(json.dumps({"id": "long", "prompt": "x" * 3000}))
    one_line(run("bench", bundle, "--prompts", prompts), 1, "prompt 'long'", "255 fit")
    one_line(run("bench", bundle, "--prompts", tmp_path / "none.jsonl"), 1, "none.jsonl cannot be read")
    one_line(run("bench", bundle, "--repeats", 0), 2, "--repeats is 0")
    one_line(run("bench", bundle, "--max-tokens", 0), 2, "--max-tokens is 0")
    one_line(run("bench", tiny_bundle("int4"), "--draft-nodes", 16), 2, "at most 15", "--no-exact")
    one_line(run("bench", bundle, "--provider", "cuda"), 1, "CUDAExecutionProvider", "pip install")
    plain = without_draft(bundle, tmp_path / "plain")
    one_line(run("bench", plain, "--proposals", "draft"), 1, "no draft", "--proposals ngram")
    one_line(run("bench", bundle, "--proposals", "oracle"), 2, "--proposals is 'oracle', it must name draft or ngram")


def test_a_device_runs_every_verb_without_the_build_extra(tiny_bundle: Callable[..., Path]) -> None:
    bundle = str(tiny_bundle("int4"))
    verbs = [
        ["generate", bundle, "Once", "--max-tokens", "3"],
        ["bench", bundle, "--limit", "1", "--max-tokens", "3", "--json"],
        ["inspect", bundle, "--json"],
        ["chat", bundle, "--max-tokens", "3"],
    ]
    done = python(
        f"import io\nsys.stdin = io.TextIOWrapper(io.BytesIO(b'Once\\n'))\nfrom elsi_edge.cli import main\n"
        f"for verb in {verbs!r}:\n try: main(verb)\n except SystemExit as end: assert end.code == 0, verb\n"
    )
    assert done.returncode == 0, done.stderr


# --- where a bundle is asked for -------------------------------------------------------------------------------------


def test_a_model_name_finds_its_newest_complete_bundle(
    run: Run, tiny_model: TinyModel, tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    made = str(tiny_model.model)
    plain = without_draft(tiny_bundle("fp32"), work / "tiny-llama" / "plain-fp32")
    assert find_bundle(made, work).directory == plain and "plain-only" in find_bundle(made, work).note
    old = edited(tiny_bundle("fp32"), work / "tiny-llama" / "bundle-fp32", lambda m: None)
    new = edited(tiny_bundle("int4"), work / "tiny-llama" / "bundle-int4", lambda m: None)
    for age, path in enumerate((plain, new, old)):
        os.utime(path / "manifest.json", ns=(10**18 - age, 10**18 - age))
    (work / "tiny-llama" / "torn").mkdir()
    (work / "tiny-llama" / "torn" / "manifest.json").write_text("{")
    for reference in ("tiny-llama", made):
        found = find_bundle(reference, work)
        assert found.directory == new and found.note == f"using {new} (int4, with a draft on tap 1)"
    assert find_bundle(str(old), work).note == ""
    with pytest.raises(BundleError, match=r"no bundle at 'else', and .*work holds none"):
        find_bundle("else", work)
    done = run("generate", "tiny-llama", PROMPT, "--max-tokens", 2, "--work", work, "--json")
    assert done.code == 0 and done.err == f"using {new} (int4, with a draft on tap 1)\n"


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_names_the_default_budgets_in_use() -> None:
    text = options.DraftNodes.__metadata__[0].help  # type: ignore[attr-defined]
    for precision, nodes in DEFAULT_DRAFT_NODES.items():
        assert f"{nodes} at {precision}" in text


@pytest.mark.parametrize("verb", ["generate", "chat", "bench", "export", "inspect", "demo"])
def test_help_shows_units_and_defaults(run: Run, verb: str) -> None:
    shown = run(verb, "--help").out
    assert "Usage: elsi-edge" in shown
    if verb in ("generate", "chat", "bench"):
        assert "N + 1 rows" in shown.replace("\n", " ") or "rows" in shown
        assert "default: 128" in shown if verb == "bench" else "default: 256" in shown


# --- demo ------------------------------------------------------------------------------------------------------------


def test_demo_without_a_packaged_draft(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from elsi_edge import packaged

    monkeypatch.setattr(packaged, "packaged_draft", lambda: None)
    one_line(run("demo"), 1, "no packaged draft", "elsi-edge calibrate")
    one_line(run("demo", "--precision", "fp16"), 2, "'fp16'", "int4, int8, fp32")


def test_demo_in_80_columns(
    run: Run, tiny_model: TinyModel, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from elsi_edge import cache, packaged
    from elsi_edge.cli import demo
    from elsi_edge.draft.checkpoint import load_config

    bundle, exported = tiny_bundle("int4"), []

    def export(out: Path, precision: str, draft: Path) -> None:
        exported.append((precision, draft))
        shutil.copytree(bundle, out)

    monkeypatch.setattr(packaged, "packaged_draft", lambda: tiny_model.draft)
    monkeypatch.setattr(packaged, "packaged_config", lambda: load_config(tiny_model.draft))
    monkeypatch.setattr(demo, "PROMPT_IDS", ("qa-1", "math-2"))
    monkeypatch.setattr(demo, "_export", export)
    monkeypatch.setattr(common, "out", Console(width=80, markup=False, highlight=False, emoji=False))
    done = run("demo", "--max-tokens", 4, "--precision", "int4")
    assert done.code == 0 and exported == [("int4", tiny_model.draft)]
    for part in ("tap 1", "nats", "target weights", "identical: yes", "peak memory", "speculative:", "tokens/s"):
        assert part in " ".join(done.out.split())  # lines break where the model's path ends
    assert not [line for line in done.out.splitlines() if cell_len(line) > 80]
    again = run("demo", "--max-tokens", 4, "--precision", "int4", "--json")
    assert len(exported) == 1 and again.json["identical"] and again.json["selection"]["taps"] == [1]
    assert again.json["bundles"]["int4"]["bench"]["answers"] == 2
    assert [entry.name.startswith("demo-int4-") for entry in cache.entries()] == [True]


def test_bench_writes_files_and_compares_them(run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    one, other, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "page.html"
    arguments = ("bench", tiny_bundle("fp32"), "--limit", 2, "--max-tokens", 5)
    done = run(*arguments, "--threads", "1,2", "--out", one, "--json")
    assert done.code == 0 and [short["threads"] for short in done.json["by_threads"]] == [1, 2]
    assert json.loads(one.read_text()) == done.json and done.json["format"] == "elsi-edge-bench"
    assert run(*arguments, "--out", other, "--report", page, "--seconds", "0.2").code == 0
    report = json.loads(other.read_text())
    assert report["sustained"] and report["memory"]["components"] and report["roofline"]["verify"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    done = run("bench", "--compare", one, other)
    assert done.code == 0 and "tokens/s, speculative" in done.out and "noise: differences" in done.out
    assert run("bench", "--compare", one, other, "--json").json["shared"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a bundle to measure"),
        (("B", "--threads", "1,x"), "--threads '1,x' must be a whole number from 0 up"),
        (("B", "--memory-limit", "much"), "--memory-limit 'much' is not a size such as 500MB"),
        (("B", "--against", "other"), "--against 'other' is no runtime known here; there are llama.cpp"),
        (
            ("B", "--peer-model", "llama.cpp=x"),
            "--peer-model 'llama.cpp=x' must be NAME=PATH",
        ),
        (("B", "--seconds", "-1"), "--seconds is -1, it must be 0"),
        (("B", "--compare", "a.json", "b.json"), "--compare reads two reports and measures nothing, but 'B' was"),
    ],
)
def test_bench_refuses_what_makes_no_sense(run: Run, arguments: tuple[str, ...], said: str) -> None:
    done = run("bench", *arguments)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1


def test_bench_against_a_runtime_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "xllamacpp" else find(name, *a))
    done = run("bench", "B", "--against", "llama.cpp")
    assert done.code == 1 and "pip install" in done.err and "[peers]" in done.err


def test_a_comparison_needs_reports(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    done = run("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert done.code == 1 and "a.json holds no bench report; write one with" in done.err
