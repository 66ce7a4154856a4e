"""How little memory a bundle can live with, from children under real limits."""

import json
import mmap
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from elsi_edge import cache
from elsi_edge.artifacts import to_plain
from elsi_edge.bundle import read_manifest
from elsi_edge.errors import ConfigError, StorageError
from elsi_edge.runtime.bench import limits
from elsi_edge.runtime.bench.limits import Kind, find_smallest, limiter, require_limit
from elsi_edge.runtime.bench.pages import mapped_files
from elsi_edge.runtime.options import SessionSettings
from tests.test_bench_figures import validate_part

SETTINGS = SessionSettings(threads=1)
TAKES = 60 << 20  # bytes that the stand-in for a child takes beside the interpreter
FILE = 48 << 20  # bytes of a file that it maps beside a bundle's own


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


def reader(job: Mapping[str, Any]) -> list[str]:
    """Stands in for a session that maps a large file of the bundle and needs all of it at every token."""
    code = f"""
import json, mmap, pathlib
with open(pathlib.Path({job["bundle"]!r}) / "large", "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
total = sum(mapped[at] for _ in range(3) for at in range(0, len(mapped), mmap.PAGESIZE))
print(json.dumps({{"tokens_per_s": 2.0, "peak_resident": {TAKES}}}))
"""
    return [sys.executable, "-c", code]


def kinds() -> list[Kind]:
    """Those that may be set here; RLIMIT_DATA always."""
    found = []
    for kind in get_args(Kind):
        try:
            limiter(kind)
        except StorageError:
            continue
        found.append(kind)
    return found


GROUPS = [kind for kind in kinds() if kind != "rlimit-data"]
needs_groups = pytest.mark.skipif(not GROUPS, reason="no control group can be made here")


@pytest.fixture
def large(tiny_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle with a large file beside the others, which lies in the page cache."""
    bundle = Path(shutil.copytree(tiny_bundle("int4"), tmp_path / "bundle"))
    (bundle / "large").write_bytes(bytes(FILE))
    return bundle


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("enough", [True, False])
def test_the_smallest_limit_is_found_from_above_and_below(
    kind: Kind, enough: bool, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "child_command", child)
    monkeypatch.setattr(limits, "_LEAST_SECONDS", 2.0)
    asked = 2 * TAKES if enough else TAKES // 2
    report = find_smallest(tiny_bundle("int4"), SETTINGS, asked, kind=kind)
    assert (report.kind, report.works, report.asked_bytes) == (kind, enough, asked)
    assert TAKES <= report.smallest_bytes <= TAKES + (40 << 20)  # the interpreter beside it
    failed = [trial for trial in report.trials if not trial.works]
    assert failed and all(
        trial.limit_bytes is not None and trial.limit_bytes < report.smallest_bytes for trial in failed
    )
    wanted = "exit code 1: MemoryError" if kind == "rlimit-data" else "killed by the limit"
    assert wanted in {trial.why for trial in failed}
    assert report.smallest_tokens_per_s == 1.0 and report.note is None
    validate_part(to_plain(report), "#/properties/memory_limit")


@pytest.mark.parametrize("kind", kinds())
def test_a_control_group_says_what_it_was_charged_for(
    kind: Kind, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "child_command", child)
    report = find_smallest(tiny_bundle("int4"), SETTINGS, 2 * TAKES, kind=kind)
    for trial in (report.without, *report.trials):
        if kind == "rlimit-data":
            assert trial.charged_bytes is None and trial.held_bytes is None
            continue
        # A group of its own for each: the most of one child is not that of those before it.
        assert trial.charged_bytes is not None and trial.held_bytes == 0
        if trial.limit_bytes is None:
            assert TAKES < trial.charged_bytes < 2 * TAKES
        else:
            assert trial.charged_bytes <= trial.limit_bytes


@needs_groups
def test_pages_that_were_in_memory_before_are_charged_to_the_child(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "child_command", reader)
    monkeypatch.setattr(limits, "_SLOW", 100.0)  # reading again is slow, but here the charge is what counts
    (large / "large").read_bytes()
    report = find_smallest(large, SETTINGS, 4 * FILE, kind=GROUPS[0])
    assert report.without.charged_bytes is not None and report.without.charged_bytes > FILE
    assert report.trials[0].charged_bytes is not None and report.trials[0].charged_bytes > FILE
    assert report.note is None


@needs_groups
def test_pages_that_another_process_holds_are_said(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "child_command", reader)
    with (large / "large").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE].any()  # as an open session does
        report = find_smallest(large, SETTINGS, 2 * FILE, kind=GROUPS[0])
    assert report.without.charged_bytes is not None and report.without.charged_bytes < FILE
    assert all(trial.held_bytes == FILE for trial in report.trials)
    assert report.note is not None and "other processes hold 50 MB of the bundle's pages" in report.note
    validate_part(to_plain(report), "#/properties/memory_limit")


def test_what_cannot_be_known_is_said_and_little_is_not(tiny_bundle: Callable[..., Path]) -> None:
    bundle = tiny_bundle("int4")
    assert "is not told here" in (limits._note(None, bundle) or "")
    assert limits._note(0, bundle) is None


def test_packed_weights_of_the_bundle_are_evicted_too(
    tiny_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundle("int4")
    monkeypatch.setenv(cache.HOME_VARIABLE, str(tmp_path))
    manifest = read_manifest(bundle)
    own = next(manifest.files[name].sha256 for name in manifest.graphs.values())
    for name, text in (
        ("own", json.dumps({"key": {"graph_sha256": own}})),
        ("other", json.dumps({"key": {"graph_sha256": "0"}})),
        ("damaged", "{"),
    ):
        place = cache.packed_dir() / name
        place.mkdir(parents=True)
        (place / "entry.json").write_text(text)
        (place / "packed.weights").write_bytes(b"x")
    found = set(mapped_files(bundle))
    assert {path.name for path in found if path.parent == bundle} >= {"manifest.json", "target.weights"}
    assert {path for path in found if path.parent != bundle} == set((cache.packed_dir() / "own").iterdir())


@needs_groups
def test_groups_are_gone_afterwards() -> None:
    with limiter(GROUPS[0]).group(100 << 20) as group:
        assert group is not None and group.path.is_dir()
    assert not group.path.exists()


def test_a_bundle_that_never_runs(tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "child_command", lambda job: [sys.executable, "-c", "raise SystemExit('no luck')"])
    with pytest.raises(StorageError, match="does not run without a limit either: exit code 1: no luck"):
        find_smallest(tiny_bundle("int4"), SETTINGS, 100 << 20, kind="rlimit-data")


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (300, r"^--memory-limit is 300 bytes, it must be 8388608 \(8 MiB\) to .* \(1 TiB\); .* e\.g\. 300MB$"),
        (2, r"--memory-limit is 2 bytes, .* e\.g\. 2GB$"),
        (1, "--memory-limit is 1 byte, "),
        (8_000_000, r"--memory-limit is 8000000 bytes, .* e\.g\. 300MB$"),
        (2 << 40, "must be 8388608"),
    ],
)
def test_a_limit_out_of_range_is_refused_before_anything_is_read(limit: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        require_limit(limit)
    with pytest.raises(ConfigError, match=said):
        find_smallest(Path("absent"), SETTINGS, limit)
    require_limit(300_000_000)
