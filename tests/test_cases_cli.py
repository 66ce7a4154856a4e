"""The command line under bad luck: signals, closed and full streams, places that cannot be written, quiet runtimes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.cli.signals import orderly_end
from elsi_edge.errors import ModelError
from elsi_edge.export.pipeline import ExportSettings, export_bundle
from elsi_edge.models import resolve
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel, _tame
from tests.tiny_text import CONFIG, build_tokenizer, llama_weights, write_file, write_text_files


def model_dir(directory: Path, **changes: Any) -> Path:
    """A tiny Llama of another shape, that exports."""
    config = {**CONFIG, **changes}
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_text_files(directory, build_tokenizer(), tokenizer_config=settings)
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: _tame(name, w) for name, w in llama_weights(config, seed=5).items()}
    weights["model.embed_tokens.weight"] = (weights["model.embed_tokens.weight"] * 0.3).astype(np.float32)
    write_file(directory / "model.safetensors", weights)
    return directory


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_from_a_terminal() -> Iterator[None]:
    """Signals as a process has them that no `nohup` or background shell started."""
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)
    }
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_end_runs_the_finally_blocks(number: signal.Signals) -> None:
    cleaned = False
    with pytest.raises(SystemExit) as caught, orderly_end():
        try:
            signal.raise_signal(number)
            time.sleep(5)
        finally:
            cleaned = True
    assert cleaned and caught.value.code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_handler_of_somebody_else_stays() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with orderly_end():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_an_interrupt_that_a_finaliser_swallows_comes_again() -> None:
    class Pressed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), orderly_end() as interrupts:
        pressed = Pressed()
        del pressed
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(interrupts) == 2


def test_an_interrupt_that_an_import_turns_into_its_own_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from elsi_edge.cli import doctor as module

    def pressed() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr(module, "doctor", pressed)
    done = run("doctor")
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


# --- streams ---------------------------------------------------------------------------------------------------------


def shell(line: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `elsi-edge ...` as a shell user would; $E is the command."""
    env = {**os.environ, "E": f"{sys.executable} -m elsi_edge", **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env, timeout=60)


def test_streams_that_are_closed_full_or_left(tiny_bundle: Callable[..., Path]) -> None:
    place = tiny_bundle("fp32")
    closed = shell(f"$E inspect '{place}' >&- 2>&-")
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")
    full = shell(f"$E inspect '{place}' >/dev/full")
    assert full.returncode == 1 and full.stderr.count("\n") == 1 and "No space left on device" in full.stderr
    left = shell(f"$E generate '{place}' 'Marn keeps' --max-tokens 200 | head -c 1")
    assert len(left.stdout) == 1 and "Traceback" not in left.stderr and "Exception" not in left.stderr


def test_onnx_runtime_leaves_no_usage_database(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    done = shell(f"$E generate '{tiny_bundle('fp32')}' Marn --max-tokens 2", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.rglob("*") if "Microsoft" in path.parts] == []


# --- before any long work --------------------------------------------------------------------------------------------


def test_what_cannot_be_written_or_exported_is_said_before_calibrating(
    run: Run, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elsi_edge import calibration

    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("calibrated"))
    one_line(run("calibrate", tiny_model.model, "--out", tmp_path), 1, str(tmp_path), "Is a directory")
    (tmp_path / "file").touch()
    one_line(run("calibrate", tiny_model.model, "--work", tmp_path / "file"), 1, "a part of this path is a file")
    one_line(run("export", tiny_model.model, "--context", 8), 2, "--context is 8", "at most the model's 256")
    narrow = model_dir(tmp_path / "narrow", head_dim=8)
    one_line(run("export", narrow), 1, "heads are 8 wide", "multiples of 16")
    other = model_dir(tmp_path / "other", model_type="gemma")
    one_line(run("export", other), 1, "'gemma' are not exported")


def test_widths_that_blocks_do_not_divide(tmp_path: Path) -> None:
    """48 and 80 leave half a block of 32 at the end of every row, and 300 tokens are a multiple of nothing."""
    shape = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 80}
    source = resolve(str(model_dir(tmp_path / "m", **shape)))
    manifest = export_bundle(source, tmp_path / "b", ExportSettings(precision="int8"), draft=None)
    assert manifest.parity["top1_agreement"] > 0.9


def test_biases_that_a_draft_does_not_take_over_are_said(tmp_path: Path) -> None:
    import torch

    from elsi_edge.draft.network import DraftNetwork
    from elsi_edge.draft.source import draft_config, initialise, read_source
    from tests import draft_toy as toy

    directory = toy.write_model(tmp_path, attention_bias=True)
    source = read_source(directory, toy.SHAPE)
    assert source.biases == ("q", "k", "v", "o")
    config = draft_config(toy.SHAPE, selection=toy.selection(), draft_vocab_size=8)
    refusals = initialise(DraftNetwork(config, source.embeddings), source, torch.arange(8), 0)
    assert refusals == ["biases of q, k, v, o: the target's last block adds them, the draft has none"]


def test_a_model_whose_files_are_another_models_is_refused_by_every_stage(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_dir(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    prompts = tmp_path / "p.txt"
    prompts.write_text("Marn keeps a small ferry\n" * 1)
    done = run("calibrate", directory, "--prompts", prompts)
    one_line(done, 1, "9 weights are missing", "belong to different models")
    with pytest.raises(ModelError, match=r"9 weights are missing|cannot export"):
        export_bundle(resolve(str(directory)), tmp_path / "b", ExportSettings(precision="fp32"), draft=None)
    assert not (tmp_path / "b").exists()
