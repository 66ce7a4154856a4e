"""Bundles that are not what their manifest says: one line each, naming the file and what disagrees."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.bundle import MANIFEST, NATIVE_FORMAT, Bundle, new_bundle
from elsi_edge.errors import BundleError, StorageError

MakeBundle = Callable[..., Path]


@pytest.fixture
def bundle(tiny_bundle: MakeBundle, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_bundle("int4"), tmp_path / "моя папка" / "b 1"))


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / MANIFEST
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


def refused(bundle: Path, *words: str) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.load(bundle)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_sound_bundle_loads_from_any_place(bundle: Path) -> None:
    loaded = Bundle.load(bundle)
    assert loaded.manifest.precision == "int4"
    assert loaded.graph("target-chain").is_file()
    assert all("\\" not in name for name in loaded.manifest.files)


def test_missing_file(bundle: Path) -> None:
    (bundle / "target.weights").unlink()
    refused(bundle, "target.weights", "missing")


def test_truncated_file(bundle: Path) -> None:
    path = bundle / "target.weights"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    refused(bundle, "target.weights", str(size), str(size - 100))


def test_altered_file(bundle: Path) -> None:
    path = bundle / "target.weights"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(bundle, "target.weights", "altered")


def test_unknown_format_version(bundle: Path) -> None:
    edit(bundle, lambda value: value.update(format_version=99))
    refused(bundle, "99", "reads 1")


def test_native_graphs_of_a_later_version_are_left_out(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Bundle.load(bundle).manifest.native_format == NATIVE_FORMAT
    edit(bundle, lambda value: value.update(native_format=NATIVE_FORMAT + 1))
    graphs = Bundle.load(bundle).manifest.graphs
    assert {"target-chain", "target-tree", "draft"} <= set(graphs) and not any("native" in role for role in graphs)
    assert f"format {NATIVE_FORMAT + 1}" in caplog.text and "stock graphs" in caplog.text
    edit(bundle, lambda value: value.pop("native_format"))  # as before it was written down
    assert "target-native" in Bundle.load(bundle).manifest.graphs


@pytest.mark.parametrize("name", ["../outside.onnx", "/etc/passwd", "graphs\\target.onnx", "a/../../b", "C:/x"])
def test_path_that_leaves_the_bundle(bundle: Path, name: str) -> None:
    edit(bundle, lambda value: value["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    refused(bundle, repr(name))


def test_link_that_leaves_the_bundle(bundle: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(bundle / "tokenizer.json", outside)
    (bundle / "tokenizer.json").symlink_to(outside)
    refused(bundle, "tokenizer.json", "outside")


def test_graph_that_is_not_listed(bundle: Path) -> None:
    edit(bundle, lambda value: value["graphs"].update({"draft": "other.onnx"}))
    refused(bundle, "other.onnx")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}'])
def test_manifest_that_is_none(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    refused(bundle, MANIFEST)


def test_key_that_is_missing_or_unknown(bundle: Path) -> None:
    edit(bundle, lambda value: value.pop("context"))
    refused(bundle, "context")
    edit(bundle, lambda value: value.update(context=256, surprise=1))
    refused(bundle, "surprise")


def test_no_bundle_at_all(tmp_path: Path) -> None:
    refused(tmp_path, "not a bundle", "elsi-edge export")


def test_role_that_is_not_there(tiny_bundle: MakeBundle) -> None:
    with pytest.raises(BundleError, match="no draft graph"):
        Bundle.load(tiny_bundle("fp32", plain=True)).graph("draft")


def test_nothing_is_left_of_a_bundle_that_fails(tmp_path: Path) -> None:
    final = tmp_path / "bundle"
    with pytest.raises(RuntimeError), new_bundle(final) as writer:
        (writer.directory / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_bundle_stays_unless_replaced(tmp_path: Path) -> None:
    final = tmp_path / "bundle"
    final.mkdir()
    (final / "mine").write_text("x")
    with pytest.raises(StorageError, match="exists already"), new_bundle(final):
        pass
    with pytest.raises(RuntimeError), new_bundle(final, replace=True):
        raise RuntimeError
    assert [path.name for path in final.iterdir()] == ["mine"]
