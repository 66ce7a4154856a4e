"""`plan --measure`: what is odd is said and kept, time is kept, advice works."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elsi_edge.bundle import Bundle
from elsi_edge.runtime import measure_device as md
from elsi_edge.runtime.bench.noise import Ticks, falls
from elsi_edge.runtime.device import load_device
from elsi_edge.runtime.measure_device import DeviceSettings, measure_device
from elsi_edge.runtime.options import SessionSettings
from tests.cli_run import Run, one_line

TINY = DeviceSettings(seconds=0.2, rows=(1, 2, 4), matrix_bytes=1 << 18)
ALONE = SessionSettings(threads=1, tuning=False)


def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if other processes had taken every core."""
    first = Ticks.now()
    seen = iter((replace(first, busy=0.0, steal=0.0, own=0.0, at=0.0), replace(first, busy=9e9, steal=0.0, own=0.0)))
    monkeypatch.setattr(Ticks, "now", staticmethod(lambda: next(seen)))


def test_a_busy_machine_is_noted_in_the_file_and_said(
    run: Run, tmp_path: Path, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(monkeypatch)
    monkeypatch.setattr(md, "DeviceSettings", lambda seconds: TINY)
    file = tmp_path / "machine.json"
    done = run("plan", tiny_bundle("int4"), "--measure", file, "--threads", "1")
    assert done.code == 0, done.err
    assert "warning: other processes used" in done.err
    assert any("other processes used" in note for note in load_device(str(file)).notes)
    again = run("plan", tiny_bundle("int4"), "--device", file)
    assert "note: other processes used" in again.err


def test_fewer_rows_that_take_longer_are_noted(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(md, "product_times", lambda *_, **__: {1: 9.0, 2: 3.0, 4: 10.0})
    device = measure_device(Bundle.load(tiny_bundle("int4")), ALONE, TINY)
    assert device.curves["fp32"]["stock"] == {"1": 3.0, "2": 3.0, "4": 10.0}
    assert any("fp32 products" in note and "1 row took 3.00 times as long as 2" in note for note in device.notes)
    assert falls({1: 1.0, 2: 1.1, 4: 1.05}) == "" == falls({1: 1.0})


def test_operators_that_took_less_than_nothing_are_noted(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(md, "product_times", lambda *_, **__: {1: 1e9, 2: 1e9, 4: 1e9})
    device = measure_device(Bundle.load(tiny_bundle("int4")), ALONE, TINY)
    assert set(device.node_us.values()) == {0.0}
    assert any("operators are taken to cost nothing, measure again" in note for note in device.notes)


def test_the_share_that_is_done_rises_to_one(tiny_bundle: Callable[..., Path]) -> None:
    shares: list[float] = []
    measure_device(Bundle.load(tiny_bundle("int4")), ALONE, TINY, done=shares.append)
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == 1.0 and len(shares) > 4


def test_a_part_that_begins_late_ends_in_time() -> None:
    said: list[str] = []
    schedule = md._Schedule(10.0, said.append, lambda _: None)
    start = time.perf_counter()
    first, second = schedule.part("one", 0.25), schedule.part("two", 0.5)
    assert first == pytest.approx(start + 2.5, abs=0.1) and second == pytest.approx(start + 7.5, abs=0.1)
    assert said == ["one", "two"]


def test_measuring_needs_a_bundle_and_advises_what_works(run: Run, tmp_path: Path) -> None:
    done = run("plan", "qwen3-4b-instruct-2507", "--measure", tmp_path / "device.json")
    one_line(done, 1, "qwen3-4b-instruct-2507", "a bundle's directory", "elsi-edge export smollm2-135m-instruct")
    assert "export qwen3" not in done.err
