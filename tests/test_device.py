"""Device files: strict reading, curves, and a tiny measurement."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.artifacts import PRECISIONS
from elsi_edge.bundle import Bundle
from elsi_edge.errors import DataError, UsageError
from elsi_edge.runtime import measure_device as md
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.device import Device, at, load_device, shipped_devices
from elsi_edge.runtime.measure_device import DeviceSettings, measure_device
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.plan import CostModel
from tests.cli_run import Run, one_line

CURVE = {"1": 10.0, "2": 12.0, "8": 30.0}
TINY = DeviceSettings(seconds=0.2, rows=(1, 2, 4), matrix_bytes=1 << 18)


def measured(**changes: Any) -> dict[str, Any]:
    """A device file's content."""
    value: dict[str, Any] = {
        "format": "elsi-edge-device",
        "name": "a machine",
        "kind": "measured",
        "threads": 2,
        "provider": "CPUExecutionProvider",
        "memory_bytes": 8_000_000_000,
        "copy_gb_per_s": 20.0,
        "read_gb_per_s": 15.0,
        "node_us": {"stock": 3.0, "native": 2.0},
        "curves": {"int4": {"stock": dict(CURVE), "native": dict(CURVE)}},
        "attention": {"stock": dict(CURVE), "native": dict(CURVE)},
        "format_version": 1,
    }
    return {**value, **changes}


def write(directory: Path, value: dict[str, Any]) -> Path:
    path = directory / "device.json"
    path.write_text(json.dumps(value))
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_device(str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    device = load_device(str(write(tmp_path, measured())))
    device.save(tmp_path / "again.json")
    assert load_device(str(tmp_path / "again.json")) == device
    assert device.best_kernels("int4") == "native"


@pytest.mark.parametrize("name", shipped_devices())
def test_shipped_devices_are_projections_with_sources(name: str) -> None:
    device = load_device(name)
    assert device.kind in ("projection", "measured")
    if device.kind == "projection":
        assert any(source["link"].startswith("https://") for source in device.sources)
        assert all(source["link"] or "assumed" in source["value"] for source in device.sources)
        for precision in PRECISIONS:
            curve = [device.weight_ps(precision, "stock", rows) for rows in (1, 2, 8, 64)]
            assert curve == sorted(curve) and curve[0] > 0
        assert device.weight_ps("int4", "stock", 1) < device.weight_ps("fp32", "stock", 1)


def test_the_devices_that_the_help_names_are_there() -> None:
    assert {"raspberry-pi-5", "snapdragon-8-elite-cpu", "snapdragon-8-elite-npu"} <= set(shipped_devices())
    assert {"snapdragon-x-elite-npu", "lunar-lake-npu", "epyc-zen4-2-threads"} <= set(shipped_devices())


def test_curves_are_linear_between_rows_and_go_on_beyond() -> None:
    assert [at(CURVE, rows) for rows in (1, 2, 5, 8, 10)] == [10.0, 12.0, 21.0, 30.0, 36.0]
    assert at({"1": 7.0}, 5) == 7.0
    assert at({"1": 5.0, "2": 4.0}, 6) == 4.0  # never falling beyond its end


REQUIRED = (
    *("name", "kind", "threads", "provider", "memory_bytes", "copy_gb_per_s", "read_gb_per_s", "node_us"),
    *("format", "format_version"),
)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    value = measured()
    del value[field]
    refused(write(tmp_path, value), field.replace("_", ".") if field.startswith("format") else field)


@pytest.mark.parametrize("field", ["threads", "memory_bytes", "copy_gb_per_s", "read_gb_per_s"])
@pytest.mark.parametrize("value", [-1, 0, math.nan, math.inf, "9", None, True])
def test_a_number_that_is_none(tmp_path: Path, field: str, value: object) -> None:
    refused(write(tmp_path, measured(**{field: value})), field)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "elsi-edge-tuning"}, "format 'elsi-edge-tuning'"),
        ({"format_version": 2}, "format version 2"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"kind": "guessed"}, "'kind' cannot be"),
        ({"curves": {}}, "needs curves"),
        ({"curves": {"int2": {"stock": CURVE}}}, "curves names 'int2'"),
        ({"curves": {"int4": {"fast": CURVE}}}, "curves.int4 names 'fast'"),
        ({"curves": {"int4": {"stock": {"2": 1.0}}}}, "with 1 among them"),
        ({"curves": {"int4": {"stock": {"1": 1.0, "two": 2.0}}}}, "whole numbers"),
        ({"curves": {"int4": {"stock": {"1": -3.0}}}}, "curves.int4.stock.1 is -3.0"),
        ({"curves": {"int4": {"stock": {"1": math.nan}}}}, "'curves' cannot be"),
        ({"curves": {"int4": {"stock": [1.0]}}}, "'curves' cannot be"),
        ({"attention": {"stock": CURVE}}, "native kernels, node_us and attention"),
        ({"attention": {"stock": {"1": 0.0}, "native": CURVE}}, "attention.stock.1 is 0.0"),
        ({"node_us": {"stock": -1.0, "native": 1.0}}, "node_us.stock is -1.0"),
        ({"node_us": {}}, "node_us names nothing"),
        ({"node_us": {"stock": math.nan}}, "'node_us' cannot be"),
        ({"bandwidth_efficiency": 1.5}, "bandwidth_efficiency is 1.5"),
        ({"compute_efficiency": 0.0}, "compute_efficiency is 0.0"),
        ({"peak_gop_per_s": {"int4": -5.0}}, "peak_gop_per_s.int4 is -5.0"),
        ({"sources": [{"what": "bandwidth"}]}, "a source has the keys what"),
        ({"kind": "projection"}, "a projection needs peak_gop_per_s"),
        ({"kind": "projection", "curves": {}, "attention": {}}, "a projection needs peak_gop_per_s"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(write(tmp_path, measured(**changes)), message)


def test_what_is_no_device_file(tmp_path: Path, run: Run) -> None:
    (tmp_path / "text.json").write_text("speed: fast")
    refused(tmp_path / "text.json", "not valid JSON")
    one_line(run("plan", "smollm2-135m-instruct", "--device", "abacus"), 1, "no device 'abacus'", "raspberry-pi-5")
    file = write(tmp_path, measured())
    one_line(run("plan", "smollm2-135m-instruct", "--device", file, "--precision", "int8"), 2, "not measured at int8")
    assert run("plan", "smollm2-135m-instruct", "--device", file).code == 0


# --- measuring, on matrices so small that it says nothing ------------------------------------------------------------


def test_this_machine_is_measured(tiny_bundle: Callable[..., Path]) -> None:
    said: list[str] = []
    bundle = Bundle.load(tiny_bundle("int4"))
    device = measure_device(bundle, SessionSettings(threads=1, tuning=False), TINY, said.append)
    native = native_ops.report().available
    kernels = {"stock", "native"} if native else {"stock"}
    assert set(device.curves) == set(PRECISIONS) and set(device.curves["int4"]) == kernels == set(device.node_us)
    assert set(device.curves["fp32"]) == {"stock"} and device.threads == 1
    for by_kernels in device.curves.values():
        for curve in by_kernels.values():
            assert set(curve) == {"1", "2", "4"} and curve["1"] <= curve["2"] <= curve["4"]
    assert device.read_gb_per_s > 0 and device.memory_bytes > 1e8
    assert len(said) == 1 + len(kernels) * 2 + 1 + len(kernels)  # bandwidth, products, fp32's, graphs
    assert Device(**device.__dict__) == device  # fit to be written
    model = CostModel(bundle.manifest.shape, device, "int4", device.best_kernels("int4"))
    assert model.call(1, 64).ms > 0


def test_a_bundle_without_native_graph_leaves_native_kernels_out(tiny_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(tiny_bundle("fp32"))
    device = measure_device(bundle, SessionSettings(threads=1, tuning=False), TINY)
    assert all(set(by_kernels) == {"stock"} for by_kernels in device.curves.values())
    assert bool(device.notes) >= native_ops.report().available


def test_measuring_needs_some_context(tiny_bundle: Callable[..., Path]) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    many = DeviceSettings(seconds=0.1, rows=(1, 200), matrix_bytes=1 << 18)
    with pytest.raises(UsageError, match="context is 256"):
        measure_device(bundle, SessionSettings(threads=1, tuning=False), many)


def test_plan_measures_and_plans(
    run: Run, tmp_path: Path, tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(md, "DeviceSettings", lambda seconds: TINY)
    file = tmp_path / "machine.json"
    done = run("plan", tiny_bundle("int4"), "--measure", file, "--threads", "1", "--json")
    assert done.code == 0, done.err
    value = done.json
    assert value["device_file"] == str(file) and value["device"]["kind"] == "measured"
    assert load_device(str(file)).threads == 1 and "measuring" in done.err
    again = run("plan", tiny_bundle("int4"), "--device", file, "--json").json
    assert again["plain_tokens_per_s"] == value["plain_tokens_per_s"]
    one_line(run("plan", "qwen3-4b-instruct-2507", "--measure", file), 1, "qwen3-4b-instruct-2507")
