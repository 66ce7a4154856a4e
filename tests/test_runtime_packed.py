"""Packed weights in the cache: the same bits, written once, never taken when anything they depend on has changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from elsi_edge import cache
from elsi_edge.bundle import Bundle
from elsi_edge.errors import BundleError
from elsi_edge.runtime import packed
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_graph, open_session
from elsi_edge.runtime.target import OrtTarget

MakeBundle = Callable[..., Path]
SETTINGS = SessionSettings(threads=1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSI_EDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed, "_WORTH", 0)  # the tiny model's weights count too


def logits(bundle: Bundle, session: ort.InferenceSession) -> bytes:
    manifest = bundle.manifest
    target = OrtTarget(session, shape=manifest.shape, tap_width=manifest.tap_width)
    return target.prefill([7, 120, 44, 201, 9]).logits.tobytes()


def entries() -> list[Path]:
    return sorted(path for path in cache.packed_dir().glob("*") if path.is_dir())


@pytest.mark.parametrize(("precision", "role"), [("int4", "target-chain"), ("int8", "target-tree"), ("fp32", None)])
def test_mapped_weights_give_the_same_bits(tiny_bundle: MakeBundle, precision: str, role: str | None) -> None:
    bundle = Bundle.load(tiny_bundle(precision))
    graph = role or "target-tree"
    plain = logits(bundle, open_session(bundle.graph(graph), SETTINGS))  # type: ignore[arg-type]
    for _ in range(3):  # written, mapped, mapped
        assert logits(bundle, packed.open_packed(bundle, graph, SETTINGS)) == plain  # type: ignore[arg-type]
    assert len(entries()) == 1
    assert not any(path.name.startswith(".") for path in cache.packed_dir().iterdir())


def test_the_second_session_maps_what_the_first_wrote(tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    before = {path: path.stat().st_mtime_ns for path in bundle.directory.iterdir()}
    packed.open_packed(bundle, "target-chain", SETTINGS)
    opened: list[Path] = []

    def noted(path: Path, *rest: Any) -> ort.InferenceSession:
        opened.append(path)
        return open_graph(path, *rest)

    monkeypatch.setattr(packed, "open_graph", noted)
    packed.open_packed(bundle, "target-chain", SETTINGS)
    assert [path.parent.parent for path in opened] == [cache.packed_dir()]
    assert {path: path.stat().st_mtime_ns for path in bundle.directory.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "entry", "graph", "missing"])
def test_a_damaged_entry_is_written_again(tiny_bundle: MakeBundle, damage: str) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    whole = logits(bundle, packed.open_packed(bundle, "target-chain", SETTINGS))
    (place,) = entries()
    weights, entry = place / "packed.weights", place / "entry.json"
    size = weights.stat().st_size
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif damage == "entry":
        entry.write_text("[]")
    elif damage == "graph":
        (place / "graph.onnx").write_bytes(b"\0" * (place / "graph.onnx").stat().st_size)
    else:
        weights.unlink()
    assert logits(bundle, packed.open_packed(bundle, "target-chain", SETTINGS)) == whole
    assert weights.stat().st_size == size and json.loads(entry.read_text())["key"]


@pytest.mark.parametrize("changed", ["cpu_name", "cpu_features", "version"])
def test_another_cpu_or_version_packs_anew_and_the_old_entry_goes(
    tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    packed.open_packed(bundle, "target-chain", SETTINGS)
    packed.open_packed(bundle, "target-tree", SETTINGS)  # another graph: stays
    first = set(entries())
    if changed == "version":
        monkeypatch.setattr(ort, "__version__", "0.0.1")
    else:
        monkeypatch.setattr(packed, changed, lambda: "other" if changed == "cpu_name" else ["other"])
    packed.open_packed(bundle, "target-chain", SETTINGS)
    now = set(entries())
    assert len(now) == 2 and len(now & first) == 1


def test_without_a_cache_that_can_be_written_the_bundle_runs_all_the_same(
    tiny_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ELSI_EDGE_HOME", str(tmp_path / "file"))
    bundle = Bundle.load(tiny_bundle("int4"))
    assert np.frombuffer(logits(bundle, packed.open_packed(bundle, "target-chain", SETTINGS)), np.float32).size
    monkeypatch.setenv("ELSI_EDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed, "_GROWTH", 1e12)  # no disk has this much room
    packed.open_packed(bundle, "target-chain", SETTINGS)
    assert entries() == []


def test_a_graph_that_is_broken_is_named_as_such(tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    monkeypatch.setattr(Bundle, "graph", lambda self, role: self.directory / "text.json")
    with pytest.raises(BundleError, match=r"text\.json"):
        packed.open_packed(bundle, "target-chain", SETTINGS)
    assert entries() == []


def test_small_models_are_not_packed(tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_WORTH", 16 << 20)
    packed.open_packed(Bundle.load(tiny_bundle("int4")), "target-chain", SETTINGS)
    assert not cache.packed_dir().exists()


def test_packed_weights_are_listed_and_pruned(tiny_bundle: MakeBundle) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    packed.open_packed(bundle, "target-chain", SETTINGS)
    (entry,) = cache.entries()
    assert entry.name.startswith("packed/") and entry.size > 0
    assert cache.prune([entry.name]) == [entry] and cache.entries() == []
    packed.open_packed(bundle, "target-chain", SETTINGS)
    assert len(cache.prune()) == 1 and list(cache.packed_dir().iterdir()) == []
