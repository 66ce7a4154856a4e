"""Static graphs of each family, held to torch by export's own check: biases, norms of heads, unrotated blocks."""

from pathlib import Path

import numpy as np
import pytest

from elsi_edge.bundle import Bundle
from elsi_edge.errors import ModelError
from elsi_edge.export.static_export import StaticSettings, check_static_request, export_static
from elsi_edge.export.static_graph import FloatMatrices, GraphWriter, WeightFile, rms_norm
from elsi_edge.export.static_models import STATIC_FAMILIES
from elsi_edge.export.static_quantise import levels, packed, scales_of
from elsi_edge.models import resolve
from tests.test_export_families import FAMILIES, family_model


def test_families_are_of_those_that_export_knows() -> None:
    assert set(STATIC_FAMILIES) < set(FAMILIES)


@pytest.mark.parametrize("family", sorted(STATIC_FAMILIES))
def test_family(family: str, tmp_path: Path) -> None:
    source = resolve(str(family_model(tmp_path / family, family)))
    settings = StaticSettings(precision="fp32", context=96, prefill_rows=32)
    manifest = export_static(source, tmp_path / "bundle", settings, draft=None)
    assert manifest.parity["top1_agreement"] == 1.0 and manifest.parity["divergence_nats"] < 1e-6
    assert manifest.parity["tree_divergence_nats"] < 1e-6
    graphs = Bundle.load(tmp_path / "bundle").manifest.graphs
    assert set(graphs) == {"static-prefill", "static-verify"}


def test_llama3_rotary_scaling_is_in_the_tables(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    source = resolve(str(family_model(tmp_path / "m", "llama", rope_scaling=scaling)))
    manifest = export_static(
        source, tmp_path / "b", StaticSettings(precision="int8", context=96, prefill_rows=32), draft=None
    )
    assert manifest.parity["divergence_nats"] < 0.1 and manifest.parity["chain_bit_identical"] is True


def test_a_family_without_a_static_form_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(str(family_model(tmp_path / "m", "phi3")))
    monkeypatch.setattr("elsi_edge.export.static_models.load_causal_lm", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(ModelError, match=r"'phi3' have no static form; .*--for cpu"):
        export_static(source, tmp_path / "b", StaticSettings(precision="fp32"), draft=None)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mistral", {"sliding_window": 48}, r"last 48 tokens only .* the context would be 96; .*--context 48"),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"'yarn'.*no static form"),
    ],
)
def test_attention_without_a_static_form_is_refused_at_once(
    family: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    source = resolve(str(family_model(tmp_path / "m", family, **changes)))
    with pytest.raises(ModelError, match=said):
        check_static_request(source, StaticSettings(precision="fp32", context=96, prefill_rows=32))


def test_int8_weights_and_levels() -> None:
    weight = np.array([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]], np.float32)
    assert packed(weight).tolist() == [[64, -127, 32], [0, 0, 0]]
    np.testing.assert_allclose(packed(weight) * scales_of(weight)[:, None], weight, atol=0.5 / 127)
    scale, zero = levels((-1.0, 3.0), np.uint8)
    assert zero == round(1.0 / scale) and abs((255 - zero) * scale - 3.0) < scale
    assert levels((2.0, 5.0), np.uint16)[1] == 0  # zero is a level, also where none was seen
    assert levels((0.0, 0.0), np.uint8)[0] > 0


def test_massive_activations_are_scaled_by_a_power_of_two_before_they_are_squared(tmp_path: Path) -> None:
    def scaled(largest: float) -> list[float]:
        read = lambda _: np.ones(4, np.float32)  # noqa: E731
        graph = GraphWriter("g", WeightFile(tmp_path / "w"), read, FloatMatrices(), {"x": (-largest, 1.0)})
        rms_norm(graph, "x", "w", 1e-5, "y")
        return [n for n in graph.model().graph.node if n.op_type == "Mul" and n.output[0] == "y.scaled"] and [
            float(t.float_data[0]) if t.float_data else float(np.frombuffer(t.raw_data, np.float32)[0])
            for t in graph.model().graph.initializer
            if "float32" in t.name and not t.name.endswith("e-05.0")
        ][:1]

    assert scaled(100.0) == []
    assert scaled(24_900.0) == [2.0**-8]
