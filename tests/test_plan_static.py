"""`plan` for NPUs: static bundles, as `export --for npu` writes them and no others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.artifacts import Precision
from elsi_edge.bundle import components, read_manifest
from elsi_edge.cli.plan_model import find_model
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.errors import UsageError
from elsi_edge.export import static_export, static_models
from elsi_edge.models import resolve
from elsi_edge.runtime import plan_static
from elsi_edge.runtime.device import load_device, shipped_devices
from elsi_edge.runtime.plan_static import default_form, static_draftings
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel
from tests.test_plan import LLAMA, SMOLLM2

QWEN = "qwen3-4b-instruct-2507"
NPUS = tuple(name for name in shipped_devices() if name.endswith("-npu"))
NPU = "snapdragon-8-elite-npu"


@pytest.fixture(scope="module")
def static_bundle(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model at int8, 128 slots, 6 rows verified."""
    out = tmp_path_factory.mktemp("static") / "int8"
    settings = static_export.StaticSettings(context=128, prefill_rows=16, verify_rows=6)
    static_export.export_static(resolve(str(tiny_model.model)), out, settings, draft=load_draft(tiny_model.draft))
    return out


def shapes(value: dict[str, Any]) -> list[str]:
    return [round_["shape"] for round_ in value["rounds"]]


def test_the_defaults_are_export_s() -> None:
    settings = static_export.StaticSettings()
    form = default_form(settings.precision)
    assert (form.prefill_rows, form.verify_rows) == (settings.prefill_rows, settings.verify_rows)
    assert form.activation_bits == settings.activation_bits
    assert form.level_rows == min(static_export._WIDEST_LEVEL, settings.verify_rows // 2)
    assert static_export.DEFAULT_CONTEXT == plan_static.DEFAULT_SLOTS
    assert set(static_export._PRECISIONS) == set(plan_static.STATIC_PRECISIONS)
    assert static_models.STATIC_FAMILIES == plan_static.STATIC_FAMILIES


@pytest.mark.parametrize("name", NPUS)
def test_an_npu_runs_the_static_form(run: Run, name: str) -> None:
    assert load_device(name).static_only
    done = run("plan", QWEN, "--device", name, "--json")
    value = done.json
    assert (value["precision"], value["context"], value["past"]) == ("int8", 1024, 1024)
    assert value["static"] == {"prefill_rows": 64, "verify_rows": 8, "level_rows": 4, "activation_bits": 16}
    assert shapes(value) == ["chain-1", "chain-2", "chain-3", "chain-4", "chain-7"]
    assert "target weights, packed" not in value["memory_bytes"]
    assert value["memory_bytes"]["keys and values"] == 1024 * 36 * 2 * 8 * 128 * 4
    (call,) = value["calls"]
    assert call["rows"] == 8 == value["free_rows"]
    assert all(round_["verify_ms"] == call["ms"] for round_ in value["rounds"])  # n rows cost what one does
    assert value["plain_tokens_per_s"] == pytest.approx(1e3 / call["ms"])
    assert "elsi-edge export MODEL --for npu" in done.err and "docs/npu.md" in done.err
    assert not any("fewer threads" in line for line in value["advice"])


def test_a_small_model_s_operators_are_no_matter_of_threads(run: Run) -> None:
    value = run("plan", SMOLLM2, "--device", NPU, "--json").json
    assert value["calls"][0]["bound"] == "operators"
    said = next(line for line in value["advice"] if "operators between" in line)
    assert "threads" not in said and "assumed" in said
    on_cpu = run("plan", SMOLLM2, "--device", "snapdragon-8-elite-cpu", "--json").json
    assert on_cpu["static"] is None


@pytest.mark.parametrize("name", [QWEN, SMOLLM2])
def test_int4_is_refused_for_an_npu(run: Run, name: str) -> None:
    one_line(run("plan", name, "--device", NPU, "--precision", "int4"), 2, "export MODEL --for npu", "int8 and fp32")


def test_a_family_without_static_form_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gemma3_text"}))
    one_line(run("plan", tmp_path, "--device", NPU), 2, "'gemma3_text'", "llama, mistral")


def test_a_dynamic_bundle_is_planned_as_its_static_form(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    done = run("plan", tiny_bundle("int4"), "--device", NPU, "--json")
    assert done.json["precision"] == "int8" and "dynamic, which NPUs do not run" in done.err


def test_a_model_s_cache_is_as_wide_as_asked(run: Run) -> None:
    done = run("plan", QWEN, "--device", NPU, "--context", "4096", "--json")
    assert done.json["context"] == 4096 and "--for npu --context 4096" in done.err
    wide, narrow = (run("plan", QWEN, "--device", NPU, *o, "--json").json for o in (["--context", "4096"], []))
    assert wide["calls"][0]["attention_ms"] == pytest.approx(4 * narrow["calls"][0]["attention_ms"])


@pytest.mark.parametrize(
    ("precision", "target", "draft", "together"),
    [("int8", 107_573_248 + 28_311_808 + 196_736 + 524_416, 12_322_713, 151_757_231)],
)
def test_sizes_of_a_real_static_export(run: Run, precision: Precision, target: int, draft: int, together: int) -> None:
    """Within 1 %: what `export smollm2-135m-instruct --for npu` wrote."""
    value = run("plan", SMOLLM2, "--device", NPU, "--precision", precision, "--draft-vocab", "12288", "--json").json
    sizes = value["bundle_bytes"]
    parts = ("block matrices", "lm_head", "embedding table", "norms", "rotary tables")
    assert sum(sizes[part] for part in parts) == pytest.approx(target, rel=0.01)
    assert value["drafts"]["1"]["together"] == pytest.approx(draft, rel=0.01)
    assert sizes["together"] == pytest.approx(together, rel=0.01)


def test_fp32_has_a_tree_and_quantised_bundles_have_none() -> None:
    names = [drafting.name for drafting in static_draftings(default_form("fp32"), "fp32")]
    assert names[-1] == "tree-7" and names[-2] == "chain-7"
    with pytest.raises(UsageError, match="int8 and fp32"):
        default_form("int4")


def test_a_static_bundle_is_planned_as_it_is(run: Run, static_bundle: Path) -> None:
    done = run("plan", static_bundle, "--device", NPU, "--context", "200", "--json")
    value, manifest = done.json, read_manifest(static_bundle)
    assert (value["precision"], value["context"], value["static"]["verify_rows"]) == ("int8", 128, 6)
    assert shapes(value) == ["chain-1", "chain-2", "chain-3", "chain-4", "chain-5"]
    assert "has 128 slots" in done.err and "--for npu --context 200" in done.err
    parts = ("block matrices", "lm_head", "embedding table", "norms", "rotary tables")
    target = sum(value["bundle_bytes"][part] for part in parts)
    # Each matrix begins at a page of its own: much of so small a file, 0.4 % of SmolLM2's.
    pages = 4096 * (7 * manifest.shape.blocks + 1)
    assert 0 <= components(manifest.files)["target weights"] - target <= pages
    assert run("plan", static_bundle, "--device", NPU).code == 0


def test_a_static_bundle_on_a_cpu_computes_in_float32(run: Run, static_bundle: Path) -> None:
    done = run("plan", static_bundle, "--json")
    assert done.json["static"] is not None and "computes in float32" in done.err
    weights = (
        2 * 4 * sum(matrix.weights for matrix in plan_static.static_matrices(find_model(str(static_bundle)).shape))
    )
    assert done.json["memory_bytes"]["target weights"] > weights
    one_line(run("plan", static_bundle, "--precision", "int4"), 2, "--precision is int4")
    measured = run("plan", static_bundle, "--device", "epyc-zen4-2-threads")
    assert measured.code == 0, measured.err


def test_static_graphs_cannot_be_timed_by_rows(run: Run, static_bundle: Path, tmp_path: Path) -> None:
    done = run("plan", static_bundle, "--measure", tmp_path / "device.json")
    assert done.code == 2 and "graphs of fixed size" in done.err
