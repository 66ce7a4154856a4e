"""Memory by component, from children."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elsi_edge.bundle import read_manifest
from elsi_edge.errors import BundleError
from elsi_edge.runtime.bench import memory
from elsi_edge.runtime.bench.memory import measure_memory, one_tap
from elsi_edge.runtime.options import SessionSettings

SETTINGS = SessionSettings(threads=1)


def test_memory_by_component(tiny_bundle: Callable[..., Path]) -> None:
    report = measure_memory(tiny_bundle("int4"), SETTINGS, processes=1)
    assert report is not None and report.processes == 1
    assert list(report.components) == ["interpreter", "tokenizer", "target", "draft", "activations"]
    assert report.components["interpreter"].anonymous > 10_000_000
    assert report.peak.pss >= report.steady.pss >= sum(one.pss for one in report.components.values())
    assert report.peak.anonymous >= report.steady.anonymous > 0
    assert report.steady_tokens > 0


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "child_command", lambda job: [sys.executable, "-c", "raise SystemExit('no graph')"])
    with pytest.raises(BundleError, match="measuring memory failed, exit code 1: no graph"):
        measure_memory(Path("bundle"), SETTINGS)


def test_what_one_tap_saves(tiny_bundle: Callable[..., Path]) -> None:
    manifest = read_manifest(tiny_bundle("fp32"))
    found = one_tap(manifest)
    assert found is not None and manifest.draft is not None
    # The packed projection of the draft, int8 beside an fp32 target: a byte and a scale of four for 32 weights.
    assert found.projection_bytes == round(manifest.draft.width * manifest.draft.embedding_width * 1.125)
    assert found.saved_bytes == found.three_taps_bytes - found.projection_bytes == 2 * found.projection_bytes
    assert "1 tap instead of three saves" in found.words
