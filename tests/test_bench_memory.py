"""Memory by component and under real limits, from children."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from elsi_edge.artifacts import to_plain
from elsi_edge.bundle import read_manifest
from elsi_edge.errors import BundleError, ConfigError, StorageError
from elsi_edge.runtime.bench import limits, memory
from elsi_edge.runtime.bench.limits import Kind, find_smallest, limiter
from elsi_edge.runtime.bench.memory import measure_memory, one_tap
from elsi_edge.runtime.options import SessionSettings
from tests.test_bench_figures import validate_part

SETTINGS = SessionSettings(threads=1)
TAKES = 60 << 20  # bytes that the stand-in for a child takes beside the interpreter


def child(job: Mapping[str, Any]) -> list[str]:
    """Stands in for a session: takes memory, says so, and counts its tokens."""
    code = f"""
import json, resource
job = json.loads({json.dumps(json.dumps(job))})
if job.get("data_limit"):
    resource.setrlimit(resource.RLIMIT_DATA, (job["data_limit"], job["data_limit"]))
held = bytearray({TAKES})
print(json.dumps({{"tokens_per_s": 1.0, "peak_resident": len(held) + (10 << 20)}}))
"""
    return [sys.executable, "-c", code]


def kinds() -> list[Kind]:
    """Those that may be set here; RLIMIT_DATA always."""
    found = []
    for kind in get_args(Kind):
        try:
            with limiter(kind):
                found.append(kind)
        except StorageError:
            continue
    return found


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("enough", [True, False])
def test_the_smallest_limit_is_found_from_above_and_below(
    kind: Kind, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "child_command", child)
    asked = 2 * TAKES if enough else TAKES // 2
    report = find_smallest(Path("bundle"), SETTINGS, asked, kind=kind)
    assert (report.kind, report.works, report.asked_bytes) == (kind, enough, asked)
    assert TAKES <= report.smallest_bytes <= TAKES + (40 << 20)  # the interpreter beside it
    failed = [trial for trial in report.trials if not trial.works]
    assert failed and all(
        trial.limit_bytes is not None and trial.limit_bytes < report.smallest_bytes for trial in failed
    )
    wanted = "exit code 1: MemoryError" if kind == "rlimit-data" else "killed by the limit"
    assert wanted in {trial.why for trial in failed}
    validate_part(to_plain(report), "#/properties/memory_limit")


def test_groups_are_gone_afterwards() -> None:
    with limiter() as used:
        group = used.group
        assert group is None or group.is_dir()
    assert group is None or not group.exists()


def test_a_limit_out_of_range_and_a_bundle_that_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--memory-limit is 5 bytes, it must be 8388608"):
        find_smallest(Path("bundle"), SETTINGS, 5)
    monkeypatch.setattr(limits, "child_command", lambda job: [sys.executable, "-c", "raise SystemExit('no luck')"])
    with pytest.raises(StorageError, match="does not run without a limit either: exit code 1: no luck"):
        find_smallest(Path("bundle"), SETTINGS, 100 << 20, kind="rlimit-data")


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
