"""Files under bad luck: killed writers, full disks, altered manifests, weights that do not fit their configuration."""

import errno
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsi_edge import fsio
from elsi_edge.artifacts import LayerSelection
from elsi_edge.bundle import Bundle
from elsi_edge.draft.distill import distill
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.shards import ShardManifest
from elsi_edge.errors import BundleError, ConfigError, DataError, ModelError, StorageError
from elsi_edge.torch_model import load_causal_lm
from tests import draft_toy as toy
from tests.cli_run import Run
from tests.test_cli_verbs import edited
from tests.tiny_text import CONFIG, llama_weights, write_model_dir

KILLED = """
import os, sys
from pathlib import Path
from elsi_edge import fsio
kind, place = sys.argv[1], Path(sys.argv[2])
if kind == "file":
    os.fsync = lambda _: os.kill(os.getpid(), 9)
    fsio.write_bytes(place / "f", b"new")
with fsio.new_directory(place / "d", replace=True) as temporary:
    (temporary / "half").write_text("x")
    if kind == "swap":
        rename = Path.rename
        def second(self, to):
            if self == temporary: os.kill(os.getpid(), 9)
            return rename(self, to)
        Path.rename = second
    else:
        os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsio, "_SETTLED_S", 0.0)


def killed(kind: str, place: Path) -> list[str]:
    """Names in `place` after a writer was killed there."""
    done = subprocess.run([sys.executable, "-c", KILLED, kind, str(place)], timeout=60, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    return sorted(path.name for path in place.iterdir())


def test_what_a_killed_writer_leaves_goes_with_the_next_write(tmp_path: Path) -> None:
    assert killed("file", tmp_path)[0].startswith(".elsi-tmp-f-")
    assert killed("directory", tmp_path)[0].startswith(".elsi-tmp-d-")
    (tmp_path / ".elsi-tmp-d-other-abc").mkdir()  # of "d-other"
    fsio.write_bytes(tmp_path / "f", b"whole")
    with fsio.new_directory(tmp_path / "d") as temporary:
        (temporary / "whole").write_text("x")
        fsio.write_bytes(temporary / "d", b"inside a temporary, which is locked")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".elsi-tmp-d-other-abc", "d", "f"]
    fsio.sweep_directory(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "f"]


def test_a_replacement_killed_between_its_two_renames_brings_the_old_one_back(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_text("kept")
    assert all(name.startswith(".elsi-tmp-d-") for name in killed("swap", tmp_path))
    fsio.sweep_directory(tmp_path)  # does not know whose it is, so it stays
    with pytest.raises(RuntimeError), fsio.new_directory(tmp_path / "d", replace=True):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert (tmp_path / "d" / "old").read_text() == "kept"


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    with fsio.new_directory(tmp_path / "d") as first:
        with pytest.raises(StorageError, match="by another process meanwhile"), fsio.new_directory(tmp_path / "d") as b:
            assert first.is_dir()
            (tmp_path / "d").mkdir()
            (b / "x").touch()
        (tmp_path / "d").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_temporary_that_was_just_born_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsio, "_SETTLED_S", 30.0)
    (tmp_path / ".elsi-tmp-d-abc").mkdir()
    fsio.sweep(tmp_path / "d")
    assert (tmp_path / ".elsi-tmp-d-abc").is_dir()


def test_a_place_that_cannot_be_written_is_said_early(tmp_path: Path) -> None:
    fsio.require_writable(tmp_path / "new" / "deeper" / "file")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="Is a directory"):
        fsio.require_writable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="a part of this path is a file"):
        fsio.require_writable(tmp_path / "file" / "below")


def test_a_full_disk_keeps_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsio.write_text(tmp_path / "f", "earlier")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"no space left while writing .*: [0-9]+ MB free there"):
        fsio.write_text(tmp_path / "f", "later")
    assert [path.name for path in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_text() == "earlier"


# --- values of the wrong kind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("taps", 1), ("taps", ["1"]), ("entropy", [1.0, None]), ("method", "best"), ("keep", float("nan")),
        ("settings", []), ("blocks", True), ("model", None),
    ],
)  # fmt: skip
def test_a_selection_with_a_value_of_the_wrong_kind(key: str, value: Any) -> None:
    good = LayerSelection(taps=(1,), method="elsi", entropy=(1.0, 2.0), blocks=1, width=8).to_json()
    assert LayerSelection.from_json(good, "s").taps == (1,)
    with pytest.raises(ConfigError, match=rf"^s: the key '{key}' cannot be"):
        LayerSelection.from_json({**good, key: value}, "s")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["graphs"].update(draft=None), "the key 'graphs' cannot be"),
        (lambda m: m.update(selection="x"), "'x' where an object is expected"),
        (lambda m: m.update(draft=[]), "where a draft's configuration is expected"),
        (lambda m: m["files"].update({"draft.onnx": None}), "None where an object is expected"),
        (lambda m: m["files"]["draft.onnx"].update(sha256=7), "the key 'sha256' cannot be 7"),
        (lambda m: m.update(context=10**9), "the context is 1000000000 tokens, the model's own limit 256"),
        (lambda m: m.update(draft=None), "it has a selection alone"),
        (lambda m: m.update(selection=None), "it has a draft alone"),
        (lambda m: m["selection"].update(taps=[2]), "the selection is tap 2, the draft sees tap 1"),
        (lambda m: m.update(format_version="1"), "format version '1'"),
    ],
)
def test_a_manifest_that_was_altered_is_one_line(
    tiny_bundle: Callable[..., Path], tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    bad = edited(tiny_bundle("fp32"), tmp_path / "b", change)
    with pytest.raises(BundleError) as caught:
        Bundle.load(bad)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def set_shape(name: str, value: int, manifest: Any) -> None:
    manifest["shape"][name] = value


def test_a_manifest_that_disagrees_with_its_graphs_is_one_line(
    run: Run, tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    for name, value in (("kv_heads", 1), ("head_width", 8), ("vocab_size", 299), ("width", 32)):
        bad = edited(tiny_bundle("fp32"), tmp_path / name, functools.partial(set_shape, name, value))
        done = run("generate", bad, "hello")
        assert done.code == 1 and done.out in ("", "\n"), done.err
        assert done.err.count("\n") == 1 and "export the bundle again" in done.err


def test_a_directory_without_a_manifest_says_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    done = run("generate", tmp_path / "b", "hello")
    assert done.code == 1 and "is no bundle (manifest.json is missing)" in done.err


# --- weights and configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3}, "9 weights are missing from its files, the first is model.layers.2."),
        ({"num_hidden_layers": 1}, "9 weights have no place in the model"),
        ({"vocab_size": 400}, "have another shape than its configuration says, the first is model.embed_tokens"),
        ({"hidden_act": "wave"}, "names 'wave'"),
    ],
)
def test_weights_are_never_drawn_at_random(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    directory = write_model_dir(tmp_path / "m", weights=llama_weights())
    load_causal_lm(directory, feature="a test")
    (directory / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ModelError, match=said) as caught:
        load_causal_lm(directory, feature="a test")
    assert "\n" not in str(caught.value)


def test_a_run_killed_at_once_lends_its_answers_to_no_other_model(tmp_path: Path) -> None:
    settings = DistillSettings(max_tokens=20, temperatures=(0.0,))

    def distilled(out: Path, runner: toy.ToyRunner) -> ShardManifest:
        return distill(runner, toy.ToyCodec(), toy.prompts(4), toy.selection(), settings, out)

    runner = toy.ToyRunner()
    runner.states = lambda *_: pytest.fail("stop")  # type: ignore[method-assign]
    with pytest.raises(pytest.fail.Exception):
        distilled(tmp_path / "a", runner)
    assert ShardManifest.load(tmp_path / "a").rows == 0  # says whose the first answer is
    with pytest.raises(DataError, match="target fingerprint toy"):
        distilled(tmp_path / "a", toy.ToyRunner("other"))
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"answers\.jsonl but no manifest\.json"):
        distilled(tmp_path / "a", toy.ToyRunner("other"))


def test_a_first_row_that_fails_leaves_nothing(tmp_path: Path) -> None:
    runner = toy.ToyRunner()
    runner.answer = lambda *_, **__: [10_000]  # type: ignore[method-assign]
    with pytest.raises(DataError, match="token id 10000"):
        distill(runner, toy.ToyCodec(), toy.prompts(2), toy.selection(), DistillSettings(), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
