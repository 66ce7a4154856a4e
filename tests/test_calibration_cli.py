"""`elsi-edge calibrate` and `calibrate` on a tiny random model: files, figures, refusals, the same file twice."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import elsi_edge.cli
from elsi_edge.artifacts import LayerSelection, Method, PromptRow
from elsi_edge.calibration import CalibrationSettings, calibrate
from elsi_edge.calibration.sums import Sums
from elsi_edge.errors import ConfigError, DataError, SelectionError
from elsi_edge.models import SourceModel, resolve
from elsi_edge.prompts import builtin_calibration_prompts
from tests.tiny_text import CONFIG, PAGE, build_tokenizer, llama_weights, write_file, write_model_dir, write_text_files

pytest.importorskip("torch")

BLOCKS, WIDTH = 8, 32
SMALL: dict[str, Any] = {
    **CONFIG,
    "num_hidden_layers": BLOCKS,
    "hidden_size": WIDTH,
    "head_dim": 8,
    "intermediate_size": 48,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tame = {
        name: (np.ones_like(w) if w.ndim == 1 else w / np.sqrt(w.shape[1])).astype(np.float32)
        for name, w in llama_weights(SMALL, seed=4).items()
    }
    return write_model_dir(tmp_path_factory.mktemp("calibrate") / "tiny", config=SMALL, weights=tame)


@pytest.fixture
def model(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceModel:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELSI_EDGE_WORK", str(tmp_path / "work"))
    rows = [{"id": row.id, "turns": list(row.turns)} for row in ROWS]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve(str(model_dir))


ROWS = [PromptRow(id=f"p{i}", turns=(PAGE[17 * i : 17 * i + 90 + 5 * i],)) for i in range(12)]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(model: SourceModel, capfd: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            elsi_edge.cli.main(["calibrate", str(model.directory), "--threads", "1", *arguments])
        done = capfd.readouterr()
        return int(stop.value.code or 0), done.out, done.err

    return run


def test_calibrate_measures_every_tap_and_takes_the_highest(model: SourceModel) -> None:
    found = calibrate(model, ROWS, threads=1)
    assert len(found.entropy) == BLOCKS + 1 and min(found.entropy) > 0.0
    assert found.taps == (int(np.argmax(found.entropy[1:])) + 1,)
    assert found.joint_entropy == max(found.entropy[1:])
    assert (found.method, found.keep, found.prompts, found.blocks, found.width) == ("elsi", 0.30, 12, BLOCKS, WIDTH)
    assert found.target_fingerprint == model.fingerprint and found.model == model.reference
    assert found.settings["rendering"] == "chat" and found.settings["normalisation"] == "unit"
    assert 1 < found.settings["template_prefix"] < 12  # the template's own first tokens are not measured
    assert len(found.settings["warnings"]) == (found.tokens < 8 * WIDTH)
    everything = calibrate(model, ROWS, CalibrationSettings(keep=1.0), threads=1)
    assert everything.tokens > 3 * found.tokens
    assert LayerSelection.from_json(json.loads(json.dumps(found.to_json())), "file").entropy == found.entropy


def test_batching_changes_rounding_alone(model: SourceModel) -> None:
    one, many = (calibrate(model, ROWS, CalibrationSettings(batch_tokens=n, m=2), threads=1) for n in (1, 4096))
    np.testing.assert_allclose(one.entropy, many.entropy, atol=1e-5)
    assert (one.taps, one.tokens) == (many.taps, many.tokens)


def test_rules_share_the_measurement(model: SourceModel) -> None:
    rules: tuple[tuple[Method, int | None], ...] = (
        ("elsi", 2),
        ("elsi-c", 2),
        ("eagle3", None),
        ("eagle2", None),
        ("low-entropy", 2),
    )
    found = {method: calibrate(model, ROWS, CalibrationSettings(method=method, m=m), threads=1) for method, m in rules}
    assert len({f.entropy for f in found.values()}) == 1
    entropy = np.array(found["elsi"].entropy)
    assert found["eagle3"].taps == (2, 4, 5) and found["eagle3"].joint_entropy is not None
    assert (found["eagle2"].taps, found["eagle2"].state) == ((BLOCKS,), "final-norm")
    assert found["eagle2"].joint_entropy == found["eagle2"].settings["final_norm_entropy"]
    assert set(found["low-entropy"].taps) == set(np.argsort(entropy[1:])[:2] + 1)
    assert 0 not in found["elsi"].taps and found["elsi"].m == 2
    assert (found["elsi"].joint_entropy or 0) >= (found["low-entropy"].joint_entropy or 0)
    assert found["elsi-c"].cka_weight > 0 and 0 < found["elsi-c"].settings["mean_cka"] <= 1
    assert found["elsi"].cka_weight == 0
    explicit = calibrate(model, ROWS, CalibrationSettings(method="explicit", taps=(0, 3)), threads=1)
    assert explicit.taps == (0, 3) and explicit.method == "explicit"


def test_model_without_template_is_measured_on_raw_text(model_dir: Path, tmp_path: Path) -> None:
    plain = tmp_path / "base"
    write_text_files(plain, build_tokenizer(bos=True), template=None)
    for file in ("config.json", "model.safetensors"):
        (plain / file).write_bytes((model_dir / file).read_bytes())
    found = calibrate(resolve(str(plain)), ROWS, threads=1)
    assert found.settings["rendering"] == "raw" and found.settings["template_prefix"] == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one prompt, there are none"),
        ([PromptRow(id="long", turns=(PAGE * 3,))], r"prompt 'long': the prompt has \d+ tokens, 256 fit"),
    ],
)
def test_prompts_that_cannot_be_measured(model: SourceModel, rows: list[PromptRow], message: str) -> None:
    with pytest.raises(DataError, match=message):
        calibrate(model, rows, threads=1)


def test_nothing_left_after_the_filter(model: SourceModel) -> None:
    rows = [PromptRow(id="a", turns=("a",)), PromptRow(id="b", turns=("bb",))]
    with pytest.raises(DataError, match=r"the longest prompt has \d+ tokens, the first 64 are skipped"):
        calibrate(model, rows, CalibrationSettings(skip=64), threads=1)


def test_a_single_position_is_refused_and_one_prompt_is_warned_of(model: SourceModel) -> None:
    few = r"at least 4 kept positions are needed, these prompts leave 1: 1% of the 14 that count.*larger --keep$"
    with pytest.raises(SelectionError, match=few):
        calibrate(model, [PromptRow(id="a", turns=("a",))], CalibrationSettings(keep=0.01), threads=1)
    found = calibrate(model, ROWS[:1], threads=1)
    warning = found.settings["warnings"][0]
    assert str(found.tokens) in warning and f"width {WIDTH}" in warning
    assert "--keep" not in warning  # even all positions are too few
    settings, rows = CalibrationSettings(keep=0.1), [*ROWS, *ROWS]
    found = calibrate(model, [dataclasses.replace(r, id=f"{i}") for i, r in enumerate(rows)], settings, threads=1)
    assert found.settings["eligible_positions"] >= 8 * WIDTH > found.tokens
    assert found.settings["warnings"][0].endswith("give more prompts or a larger --keep")


def test_too_few_positions_are_refused_before_the_model_is_loaded(call: Command) -> None:
    Path("one.txt").write_text("a\n")
    code, out, err = call("--prompts", "one.txt", "--keep", "0.2")
    assert (code, out) == (1, "") and "these prompts leave 3: 20% of the 14 that count" in err
    assert len(err.splitlines()) == 1  # no pass was started


def test_broken_weights_name_the_tap(model_dir: Path, tmp_path: Path) -> None:
    broken = write_model_dir(tmp_path / "broken", config=SMALL)
    weights = {name: np.ones_like(w) * 0.1 for name, w in llama_weights(SMALL).items()}
    weights["model.layers.3.mlp.down_proj.weight"][:] = np.nan
    weights["model.embed_tokens.weight"] = llama_weights(SMALL)["model.embed_tokens.weight"]
    write_file(broken / "model.safetensors", weights)
    with pytest.raises(SelectionError, match=r"^tap 4 has NaN or infinite states"):
        calibrate(resolve(str(broken)), ROWS, threads=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"m": 0}, "m is 0, it must be at least 1"),
        ({"keep": 0.0}, "keep is 0.0"),
        ({"keep": 1.5}, "keep is 1.5"),
        ({"keep": float("nan")}, "keep is nan"),
        ({"skip": -1}, "skip is -1"),
        ({"method": "elsi-d"}, "method is 'elsi-d'"),
        ({"normalisation": "l2"}, "normalisation is 'l2'"),
        ({"cka_weight": -1.0}, "CKA weight is -1"),
        ({"reservoir": 3}, "reservoir is 3"),
        ({"method": "eagle3", "m": 1}, "m is 1, but eagle3 takes 3 taps"),
        ({"method": "eagle2", "m": 2}, "m is 2, but eagle2 takes 1 tap;"),
        ({"method": "explicit"}, "taps go with the method 'explicit'"),
        ({"taps": (1,)}, "taps go with the method 'explicit'"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrationSettings(**settings)


def test_command_writes_a_selection_and_says_what_comes_next(call: Command, tmp_path: Path) -> None:
    code, out, err = call("--prompts", "prompts.jsonl", "--plot", "wave.png")
    assert code == 0
    file = tmp_path / "work" / "tiny" / "selection.json"
    found = LayerSelection.from_json(json.loads(file.read_text()), str(file))
    assert f"tap {found.taps[0]}" in out and f"{found.joint_entropy:.3f} nats" in out
    words = " ".join(out.split())
    counted = f"{found.settings['tokens_read']:,} tokens read; the first {found.settings['template_prefix']} of each"
    assert counted in words and f"which leaves {found.settings['eligible_positions']:,}; the least sure 30%" in words
    assert "^" in out and "12 prompts" in out and str(file) in out.replace("\n", "")
    page = tmp_path / "work" / "tiny" / "calibration" / "report.html"
    assert str(page) in out.replace("\n", "") and f"tap {found.taps[0]}" in page.read_text()
    assert not list(page.parent.glob("*partial*"))
    assert max(map(len, out.splitlines()[:10])) <= 80
    started = [line.split(":")[0] for line in err.splitlines()[:-2]]
    assert started == ["calibrate", "compare taps", "measure pairs of taps", "probe"]  # a line each, no more
    assert "learns from the target as it will be deployed" in err.splitlines()[-2]
    assert err.splitlines()[-1] == f"Next: elsi-edge export {found.model} --plain-only"
    assert Path("wave.png").read_bytes().startswith(b"\x89PNG")


def test_few_positions_are_warned_of_on_stderr(call: Command) -> None:
    code, out, err = call("--prompts", "prompts.jsonl", "--keep", "0.1", "--work", "w")
    assert code == 0 and "10%" in out
    assert "warning: " in err and f"few for states of width {WIDTH}" in err
    assert err.splitlines()[-1].endswith("--work w")


def test_a_selection_that_is_replaced_is_kept_and_named(call: Command, tmp_path: Path) -> None:
    place = tmp_path / "work" / "tiny"
    asked = ("--prompts", "prompts.jsonl", "--no-probe")
    assert "replaces" not in call(*asked)[2]
    first = (place / "selection.json").read_bytes()
    assert "replaces" not in call(*asked)[2]  # the same again
    old = json.loads(first)["taps"]
    _, out, err = call(*asked, "--taps", "1,3")
    assert f"selection.json replaces the selection of tap {old[0]} (elsi, m = 1, 12 prompts) made before" in err
    assert (place / "selection.previous.json").read_bytes() == first
    assert "Pick (given with --taps, m = 2): taps 1, 3" in out and "explicit" not in out + err
    assert "explicit" not in (place / "calibration" / "report.html").read_text()
    (place / "selection.json").write_text("{")
    assert "replaces a file that is no selection" in call(*asked)[2]


def test_the_next_command_names_what_the_default_places_do_not_hold(call: Command, model: SourceModel) -> None:
    name = str(model.directory)
    asked = ("--prompts", "prompts.jsonl", "--no-probe", "--answers", "0", "--work", "w w", "--taps", "1,3")
    assert call(*asked)[2].endswith(f"Next: elsi-edge export {name} --plain-only --work 'w w'\n")
    plain = Path("w w/tiny/plain-int8")
    plain.mkdir(parents=True)
    (plain / "manifest.json").touch()
    line = f"Next: elsi-edge distill {name} --taps 1,3 --bundle 'w w/tiny/plain-int8' --work 'w w'\n"
    assert call(*asked, "--out", "mine.json")[2].endswith(line)
    code, _, err = call("--prompts", "prompts.jsonl", "--answers", "8", "--work", "x x")
    assert code == 1 and err.endswith(f"elsi-edge export {name} --plain-only --work 'x x'\n")


def test_taps_that_the_packaged_draft_does_not_read_want_a_draft_of_their_own(
    call: Command, model: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elsi_edge import packaged

    asked = ("--prompts", "prompts.jsonl", "--no-probe")
    assert call(*asked, "--taps", "3")[0] == 0
    own = LayerSelection.from_json(json.loads(Path("work/tiny/selection.json").read_text()), "file")
    monkeypatch.setattr(packaged, "packaged_config", lambda: SimpleNamespace(
        target_fingerprint=model.fingerprint, selection=own))  # fmt: skip
    assert "--layers auto --m 1" in call(*asked, "--taps", "3")[2].splitlines()[-1]
    err = call(*asked, "--taps", "1,3")[2]
    assert "The packaged draft reads tap 3; one for taps 1, 3 has to be trained" in err
    assert "--plain-only" in err.splitlines()[-1]


def test_the_estimate_is_of_what_an_interrupted_run_left(
    call: Command, model: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elsi_edge.calibration import cost, pipeline

    event = threading.Event()
    add = Sums.add

    def stopping(sums: Sums, *given: Any) -> None:
        add(sums, *given)
        event.set()

    monkeypatch.setattr(Sums, "add", stopping)
    file, notes = Path("work/tiny/calibration/partial.safetensors"), list[str]()
    with pytest.raises(KeyboardInterrupt):
        pipeline.analyse(model, ROWS, threads=1, checkpoint=file, stop=event, note=notes.append)
    done = notes[0].removeprefix("saved up to ").split(" ")[0]
    monkeypatch.setattr(cost, "_LARGE_S", -1.0)
    assert f"tokens of which {done} are done, the rest in about" in call("--prompts", "prompts.jsonl")[2]
    assert "are done" not in call("--prompts", "prompts.jsonl", "--fresh")[2]


def test_a_probe_that_was_not_scored_says_why(call: Command, tmp_path: Path) -> None:
    Path("two.txt").write_text(f"{PAGE[:60]}\n{PAGE[90:160]}\n".replace("\n\n", " "))
    code, out, _ = call("--prompts", "two.txt")
    assert code == 0 and "Probe: not scored: " in out and "50 needed" in " ".join(out.split())
    page = (tmp_path / "work" / "tiny" / "calibration" / "report.html").read_text()
    assert "Probe: not scored: " in page and "The probe is not part of this run" not in page


def test_prompts_that_all_end_alike_are_measured(call: Command) -> None:
    """Where the same token is kept of every prompt the embeddings are constant, and nobody asked for them."""
    Path("three.txt").write_text("a\nb\nc\n")
    code, out, err = call("--prompts", "three.txt", "--json")
    value = json.loads(out.splitlines()[-1])
    assert code == 0 and value["prompts"] == 3 and 0 not in value["taps"]
    assert "few for states" in err and value["stability"]["stable"] is False


def test_the_same_inputs_give_the_same_file(call: Command) -> None:
    for name in ("a.json", "b.json"):
        assert call("--prompts", "prompts.jsonl", "--m", "2", "--method", "elsi-c", "--out", name)[0] == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    found = json.loads(Path("a.json").read_text())
    assert found["m"] == 2 and found["taps"] in [each["taps"] for each in found["stability"]["sets"]]


def test_json_is_the_last_line(call: Command) -> None:
    code, out, _ = call("--prompts", "prompts.jsonl", "--method", "eagle3", "--json")
    value = json.loads(out.splitlines()[-1])
    assert code == 0 and len(out.splitlines()) == 1
    assert (value["taps"], value["m"], value["method"]) == ([2, 4, 5], 3, "eagle3")
    assert len(value["entropy"]) == BLOCKS + 1 and Path(value["file"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--m", "0"), 2, "m is 0, it must be at least 1"),
        (("--m", "9"), 2, f"m is 9, but the model has {BLOCKS} blocks"),
        (("--m", "2", "--method", "eagle3"), 2, "m is 2, but eagle3 takes 3 taps"),
        (("--method", "eagle9"), 2, "eagle9"),
        (("--keep", "0"), 2, "keep is 0.0, it must lie in (0, 1]"),
        (("--layers", "auto"), 2, "--method chooses by a rule"),
        (("--taps", "1,x"), 2, "--taps '1,x' is no list of numbers"),
        (("--taps", "1,99"), 2, f"taps [1, 99] must lie in 0..{BLOCKS}"),
        (("--taps", "1", "--method", "elsi"), 2, "exclude each other"),
        (("--plot", "wave.bmp"), 2, "a picture is written as .png or .svg"),
        (("--prompts", "none.jsonl"), 1, "none.jsonl cannot be read"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    call: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = call("--prompts", "prompts.jsonl", *arguments)
    assert (found, out) == (code, "") and message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
@pytest.mark.model
def test_pick_on_the_built_in_model() -> None:
    found = calibrate(resolve("smollm2-135m-instruct"), builtin_calibration_prompts())
    assert found.taps == (27,) and found.tokens == 6883 and not found.settings["warnings"]
    assert found.settings["template_prefix"] == 24  # its default system message
    assert found.entropy[27] == pytest.approx(5.482, abs=0.002)
