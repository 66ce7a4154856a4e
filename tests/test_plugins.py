"""Execution providers that come as packages beside a stock ONNX Runtime."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from elsi_edge.errors import ProviderError
from elsi_edge.runtime import plugins
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_session, resolve_provider

OPENVINO = "OpenVINOExecutionProvider"


def one(kind: str, provider: str = OPENVINO) -> Any:
    return SimpleNamespace(ep_name=provider, device=SimpleNamespace(type=SimpleNamespace(name=kind)))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A plugin of OpenVINO's provider that finds the devices put into this list."""
    found: list[Any] = [one("CPU", "CPUExecutionProvider")]
    module = SimpleNamespace(
        get_library_path=lambda: "/plugin.so", __name__="onnxruntime_ep_openvino", __spec__=object()
    )
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", module)
    monkeypatch.setattr(ort, "register_execution_provider_library", lambda *_: None)
    monkeypatch.setattr(ort, "get_ep_devices", lambda: found)
    plugins.device.cache_clear()
    return found


def test_a_plugin_is_taken_where_the_build_lacks_the_provider(plugin: list[Any]) -> None:
    plugin += [one("CPU"), one("NPU"), one("GPU")]
    assert resolve_provider("openvino") == OPENVINO
    assert plugins.device(OPENVINO).device.type.name == "NPU"


def test_a_plugin_without_a_device_is_no_silent_fall_back(plugin: list[Any]) -> None:
    assert len(plugin) == 1
    with pytest.raises(ProviderError, match=r"onnxruntime_ep_openvino is installed and finds no device"):
        resolve_provider("openvino")


def test_a_plugin_that_cannot_be_loaded(plugin: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise RuntimeError("wrong\nversion")

    monkeypatch.setattr(ort, "register_execution_provider_library", refuse)
    with pytest.raises(ProviderError, match="cannot be loaded: wrong version; install the version that fits"):
        resolve_provider("openvino")


def test_a_session_runs_on_the_plugins_device(
    plugin: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin.append(one("NPU"))
    used: list[Any] = []

    class Options(ort.SessionOptions):  # type: ignore[misc]
        def add_provider_for_devices(self, devices: Any, settings: Any) -> None:
            used.append((devices[0].device.type.name, settings))

    monkeypatch.setattr(ort, "SessionOptions", Options)
    session = SimpleNamespace(get_providers=lambda: [OPENVINO])
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: session)
    assert open_session(tmp_path / "x.onnx", SessionSettings(threads=1, provider="openvino")) is session
    assert used == [("NPU", {})]
    session.get_providers = lambda: ["CPUExecutionProvider"]
    with pytest.raises(ProviderError, match="refused"):
        open_session(tmp_path / "x.onnx", SessionSettings(threads=1, provider="openvino"))


@pytest.mark.skipif("CPUExecutionProvider" not in ort.get_available_providers(), reason="a build without the CPU")
def test_without_a_plugin_the_package_is_named() -> None:
    plugins.device.cache_clear()
    if not plugins.is_installed("QNNExecutionProvider") and "QNNExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(ProviderError, match="pip install onnxruntime-qnn"):
            resolve_provider("qnn")
