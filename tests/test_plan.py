"""`plan`: sizes against what export writes, the arithmetic of calls and rounds, configurations good and bad."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.artifacts import DRAFT_PRECISION, PRECISIONS, DraftConfig, LayerSelection, ModelShape, Precision
from elsi_edge.bundle import components, read_manifest
from elsi_edge.cli.plan_model import draft_of, find_model, shipped_models
from elsi_edge.draft.shapes import tensor_shapes
from elsi_edge.errors import ElsiError, UsageError
from elsi_edge.model_shape import SUPPORTED_FAMILIES, read_plain_shape
from elsi_edge.runtime.device import load_device
from elsi_edge.runtime.plan import CostModel
from elsi_edge.runtime.plan_advice import advice
from elsi_edge.runtime.plan_result import PlanResult, Request, make_plan
from elsi_edge.runtime.plan_sizes import (
    DraftSizes,
    Matrix,
    block_matrices,
    draft_sizes,
    head_matrix,
    memory_needed,
    target_bytes,
)
from elsi_edge.runtime.plan_tau import DRAFTINGS, Drafting, Tau, parse_taus
from tests.cli_run import Run, one_line
from tests.test_boundaries import python
from tests.test_cases_cli import model_dir

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
SMOLLM2 = "smollm2-135m-instruct"
PI = "raspberry-pi-5"


def shape_of(**changes: Any) -> ModelShape:
    return read_plain_shape(Path("config.json"), {**LLAMA, **changes}).shape


def draft_for(shape: ModelShape, m: int = 1, precision: Precision = "int4") -> DraftSizes:
    config = draft_of(shape, m, 8192)
    return draft_sizes(config, tensor_shapes(config), DRAFT_PRECISION[precision], config.context)


def planned(name: str, *, device: str = PI, context: int = 4096, taus: str = "2.0", **changes: Any) -> PlanResult:
    shape = find_model(name).shape
    drafts = {m: draft_for(shape, m) for m in (1, 2, 3)}
    values: dict[str, Any] = {"shape": shape, "precision": "int4", "context": context, "device": load_device(device)}
    return make_plan(Request(**{**values, "drafts": drafts, "m": 1, "taus": parse_taus(taus), **changes}))


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "target", "draft", "together"),
    [
        ("int4", 106_692_608, 9_405_482, 118_712_872),
        ("int8", 153_550_848, 9_405_484, 165_063_854),
        ("fp32", 544_014_336, 9_405_122, 555_146_996),
    ],
)
def test_the_built_in_model_is_planned_as_export_writes_it(
    run: Run, precision: Precision, target: int, draft: int, together: int
) -> None:
    """From numbers alone, within 1 %: bytes of exports of the built-in model with a draft of 12,288 tokens, for the
    model's whole context."""
    value = run("plan", SMOLLM2, "--precision", precision, "--draft-vocab", "12288", "--json").json
    sizes = value["bundle_bytes"]
    parts = ("block matrices", "lm_head", "embedding table", "norms", "rotary tables")
    assert sum(sizes[part] for part in parts) == pytest.approx(target, rel=0.01)
    assert value["drafts"]["1"]["together"] == pytest.approx(draft, rel=0.01)
    assert sizes["together"] == pytest.approx(together, rel=0.01)
    assert (value["context"], value["exported_for"]) == (4096, 8192)


def test_a_shorter_context_shrinks_the_tables_of_an_export_to_be(run: Run) -> None:
    sizes = [run("plan", SMOLLM2, *options, "--json").json["bundle_bytes"] for options in ([], ["--context", "4096"])]
    assert sizes[0]["rotary tables"] == 8192 * 64 * 4 and sizes[1]["rotary tables"] == (4096 + 64) * 64 * 4


def test_the_packaged_draft_is_the_built_in_model_s(run: Run, tmp_path: Path) -> None:
    from elsi_edge.packaged import packaged_config

    packaged = packaged_config()
    assert packaged is not None and find_model(SMOLLM2).draft == packaged
    own, few = (run("plan", SMOLLM2, *o, "--json").json["drafts"]["1"] for o in ([], ["--draft-vocab", "8192"]))
    assert own["draft head"] - few["draft head"] == (packaged.draft_vocab_size - 8192) * (576 * 5 // 8 + 8)
    value = run("plan", SMOLLM2, "--json").json
    replayed = packaged.training["evaluation"]["tau"]["chain-4"]
    assert value["tau"] == [f"chain-4={replayed:.4g}"] and "packaged draft by replay" in value["tau_note"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    other = run("plan", tmp_path, "--json").json
    assert "assumption" in other["tau_note"] and other["tau"] == value["tau"]


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_sizes_of_a_tiny_bundle(tiny_bundle: Callable[..., Path], precision: Precision) -> None:
    manifest = read_manifest(tiny_bundle(precision))
    target = target_bytes(manifest.shape, precision, manifest.context)
    real = components(manifest.files)["target weights"]
    assert abs(sum(target.values()) - real) <= 4096 + target["norms"]  # its norms, all ones, are stored once
    assert manifest.draft is not None
    config = manifest.draft
    sizes = draft_sizes(config, tensor_shapes(config), DRAFT_PRECISION[precision], manifest.context)
    stored = sum(manifest.files[name].bytes for name in ("draft.weights", "projection.weights"))
    norms = sizes.bytes["draft norms"]
    assert 0 <= sizes.total - 8 * config.draft_vocab_size - stored <= norms


def test_padding_of_the_last_block_is_counted(tmp_path: Path) -> None:
    """Widths of 48 and 80 take blocks of 64 and 96 (R33), in what export writes and in what plan says."""
    from elsi_edge.export.pipeline import ExportSettings, export_bundle
    from elsi_edge.models import resolve

    numbers = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    source = resolve(str(model_dir(tmp_path / "m", **numbers, intermediate_size=80)))
    manifest = export_bundle(source, tmp_path / "b", ExportSettings(precision="int4"), draft=None)
    target = target_bytes(source.shape, "int4", source.shape.context)
    assert sum(target.values()) == pytest.approx(manifest.files["target.weights"].bytes, rel=0.01)
    assert target["embedding table"] == 4 * 300 * 48  # its rows are no whole blocks: the lookup keeps its own
    down = Matrix(name="down", inputs=80, outputs=48)
    assert (down.padded("int4"), down.padded("fp32"), down.bytes("int4")) == (96 * 48, 80 * 48, 96 * 48 * 5 // 8)


def test_an_untied_table_takes_eight_bits() -> None:
    tied, untied = (target_bytes(shape_of(tie_word_embeddings=tie), "int4", 128) for tie in (True, False))
    assert (tied["embedding table"], untied["embedding table"]) == (0, 300 * 64 * 9 // 8)
    assert tied["rotary tables"] == (128 + 64) * 16 * 4  # cosines and sines of half a head each
    assert tied["lm_head"] == untied["lm_head"] == 300 * 64 * 9 // 8  # also at int4


def test_heads_wider_than_the_width_divided_count_in_cache_and_matrices() -> None:
    """R25: head_dim as config.json says, not width / heads."""
    wide = shape_of(hidden_size=48, head_dim=32)
    assert wide.kv_bytes_per_token() == 4 * 2 * 2 * 32 * 4
    qkv, o = block_matrices(wide)[:2]
    assert (qkv.outputs, o.inputs) == ((4 + 2 * 2) * 32, 4 * 32)
    draft = draft_for(wide)
    assert draft.kv_bytes_per_token == 2 * 2 * 32 * 4


def test_published_parameter_counts() -> None:
    """The two targets of the paper, from their numbers: 4.02 and 8.03 billion weights."""
    counts = {"qwen3-4b-instruct-2507": 4.02e9, "llama-3.1-8b-instruct": 8.03e9, SMOLLM2: 134.5e6}
    assert set(shipped_models()) == set(counts)
    for name, count in counts.items():
        shape = find_model(name).shape
        tables = 1 if shape.tied_embeddings else 2
        weights = sum(m.weights for m in block_matrices(shape)) + tables * head_matrix(shape).weights
        assert weights == pytest.approx(count, rel=0.002)


def test_each_tap_costs_one_square_of_the_width() -> None:
    shape = find_model("qwen3-4b-instruct-2507").shape
    one, two, three = (draft_for(shape, m).total for m in (1, 2, 3))
    assert two - one == three - two == 2560 * 2560 * 5 // 8


@pytest.mark.parametrize(
    ("precision", "native", "measured"),
    [
        ("int4", False, 313e6),
        ("int4", True, 351e6),
        ("int8", False, 357e6),
        ("int8", True, 472e6),
        ("fp32", False, 975e6),
    ],
)
def test_peak_memory_is_near_what_sessions_took(precision: Precision, native: bool, measured: float) -> None:
    shape = find_model(SMOLLM2).shape
    weights = sum(target_bytes(shape, precision, shape.context).values())
    draft = draft_for(shape, 1, precision)
    memory = memory_needed(shape, precision, draft, context=128, native=native, weights=weights)
    assert memory.peak == pytest.approx(measured, rel=0.1)


# --- calls and rounds ------------------------------------------------------------------------------------------------


def model_on(device: str = PI, name: str = "qwen3-4b-instruct-2507", precision: Precision = "int4") -> CostModel:
    shape, machine = find_model(name).shape, load_device(device)
    return CostModel(shape, machine, precision, machine.best_kernels(precision), draft_for(shape, 1, precision))


def test_one_token_is_the_bytes_over_the_bandwidth() -> None:
    model, device = model_on(), load_device(PI)
    call = model.call(1, 0)
    weights = sum(m.bytes("int4") for m in block_matrices(find_model("qwen3-4b-instruct-2507").shape))
    weights += head_matrix(find_model("qwen3-4b-instruct-2507").shape).bytes("int4")
    assert call.read_bytes == weights
    assert call.matrices_ms == pytest.approx(1e3 * weights / (17.1e9 * device.bandwidth_efficiency), rel=1e-6)
    assert call.bound == "memory" and call.attention_ms == 0.0
    assert call.operations == pytest.approx(2 * 4.02e9, rel=0.01)


def test_many_rows_are_the_operations_over_the_peak() -> None:
    model = model_on()
    call = model.call(64, 0)
    assert call.bound == "compute"
    assert call.matrices_ms == pytest.approx(1e3 * call.operations / (614.4e9 * 0.25), rel=0.01)
    costs = [model.call(rows, 512).ms for rows in range(1, 65)]
    assert costs == sorted(costs)
    free = model.free_rows(512)
    assert costs[free - 1] <= 1.1 * costs[0] < costs[free]


def test_attention_grows_with_the_cache() -> None:
    model = model_on()
    short, long = model.call(1, 1000), model.call(1, 4000)
    assert long.attention_ms == pytest.approx(4 * short.attention_ms)
    shape = find_model("qwen3-4b-instruct-2507").shape
    assert long.read_bytes - short.read_bytes == 3000 * shape.kv_bytes_per_token()
    assert model.attended_bytes(1) == 4 * shape.kv_bytes_per_token()  # four query heads share a key head


def test_drafting_breaks_even_where_a_round_brings_its_time() -> None:
    model = model_on()
    plain = model.call(1, 256).ms
    for drafting in DRAFTINGS:
        least = model.round(drafting, 256, [Tau(tau=1.5)]).break_even_tau
        if least <= drafting.most:
            speed = model.round(drafting, 256, [Tau(tau=least, drafting=drafting)]).speeds[0]
            assert speed is not None and speed.speedup == pytest.approx(1.0, abs=0.05)
            assert speed.tokens_per_s == pytest.approx(1e3 / plain, rel=0.05)
    chain, tree = (model.round(Drafting.parse(name), 256, []) for name in ("chain-8", "tree-8"))
    assert chain.verify_ms == tree.verify_ms and chain.draft_ms > tree.draft_ms  # eight calls against four


def test_a_shape_brings_no_more_tokens_than_it_has_levels_and_one() -> None:
    assert Tau(tau=2.5).of(Drafting.parse("chain-1")) is None
    assert Tau(tau=2.0).of(Drafting.parse("chain-1")) == 2.0
    result = planned(SMOLLM2, taus="3.0")
    assert [round_.speeds[0] is None for round_ in result.rounds[:3]] == [True, False, False]


def test_tau_of_other_shapes_follows_the_packaged_draft() -> None:
    """The rule of thumb against the three figures that it was fitted to."""
    tau = Tau(tau=1.805, drafting=Drafting.parse("chain-4"))
    assert tau.of(Drafting.parse("tree-8")) == pytest.approx(2.08, rel=0.05)
    assert tau.of(Drafting.parse("tree-30")) == pytest.approx(2.7, rel=0.06)
    back = Tau(tau=tau.of(Drafting.parse("tree-30")) or 0, drafting=Drafting.parse("tree-30"))
    assert back.of(Drafting.parse("chain-4")) == pytest.approx(1.805, abs=1e-6)
    chains = [tau.of(Drafting(kind="chain", nodes=nodes)) or 0.0 for nodes in (1, 2, 3, 4, 8, 100)]
    assert chains == sorted(chains) and math.isclose(chains[-1], 1 / (1 - (chains[0] - 1)), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a number"),
        ("much", "neither a number"),
        ("0.9", "at least 1 token"),
        ("nan", "tau is nan"),
        ("inf", "tau is inf"),
        ("chain-1=5", "a chain of 1 gives at most 2 tokens a verification, tau is 5"),
        ("tree-60=9", "a tree of 60 nodes on 7 levels gives at most 8 tokens"),
        ("tree-128=3", "1 to 127 drafted nodes"),
        ("chain-2=3.5", "from 1 to 3"),
        ("bush-2=1.5", "no shape"),
        ("chain-0=1", "no shape"),
        ("tree-=1.5", "no shape"),
        ("chain-4=", "neither a number"),
        ("2,,3", "neither a number"),
    ],
)
def test_taus_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_taus(text)
    assert "\n" not in str(caught.value)


def test_what_limits_a_device_is_said() -> None:
    lines = advice(planned("llama-3.1-8b-instruct"))
    assert any(line.startswith("it does not fit") for line in lines)
    assert any("embedding table is stored by itself" in line for line in lines)
    assert any("little" in line for line in lines)
    fits = planned("qwen3-4b-instruct-2507")
    assert fits.fits and any(line.startswith("it fits") for line in advice(fits))
    long = planned("qwen3-4b-instruct-2507", context=262_144)
    assert any("tables of angles for 262,144 positions" in line for line in advice(long))
    small = planned("qwen3-4b-instruct-2507", context=200_000)
    assert not small.fits and any("with --context" in line for line in advice(small))


def test_nothing_pays_where_every_row_costs_its_full_price() -> None:
    slow = replace(load_device(PI), peak_gop_per_s=dict.fromkeys(PRECISIONS, 20.0))
    result = planned("qwen3-4b-instruct-2507", taus="1.5")
    result = make_plan(replace(result.request, device=slow))
    assert result.free_rows == 1 and result.calls[0].bound == "compute"
    said = next(line for line in advice(result) if line.startswith("drafting does not pay here"))
    assert "with 2,048 tokens cached and no n-grams" in said and "`tune` counts n-grams" in said


def step(plan: PlanResult) -> str:
    return next(line for line in advice(plan) if line.startswith("one token takes"))


def test_the_parts_of_a_step_are_said_in_milliseconds() -> None:
    plan = planned("qwen3-4b-instruct-2507")
    call = plan.calls[0]
    text = step(plan)
    for name, ms in (
        ("products", call.matrices_ms),
        ("attention", call.attention_ms),
        ("operators", call.operators_ms),
    ):
        assert f"{name} {ms:.1f}" in text
    assert "GB/s" not in text and f"({call.matrices_ms / call.ms:.0%}) is the products, held up by reading" in text
    assert f"{(call.read_bytes - 2048 * 294_912) / 1e9:.1f} GB of weights" in text
    far = step(planned("qwen3-4b-instruct-2507", context=32_768))
    assert "is attention over the cache" in far


def test_fewer_bits_are_offered_only_where_they_help() -> None:
    device = replace(load_device("epyc-zen4-2-threads"), read_gb_per_s=20.0)
    int8 = planned("qwen3-4b-instruct-2507", device="epyc-zen4-2-threads", precision="int8", context=512)
    assert int8.calls[0].matrices_ms > 0.5 * int8.calls[0].ms
    curves = {
        **device.curves,
        "int4": {name: {k: 4 * v for k, v in c.items()} for name, c in device.curves["int4"].items()},
    }
    slower = make_plan(replace(int8.request, device=replace(device, curves=curves)))
    faster = make_plan(replace(int8.request, device=device))
    alone = make_plan(replace(int8.request, device=replace(device, curves={"int8": device.curves["int8"]})))
    int4 = make_plan(replace(faster.request, precision="int4")).calls[0].ms
    assert f"fewer bits a weight (int4: {int4:.1f} ms) or" in step(faster)
    assert "bits" not in step(slower) and "bits" not in step(alone)


def test_every_guess_right_is_called_an_assumption(run: Run) -> None:
    done = run("plan", SMOLLM2, "--tau", "2", "--device", "epyc-zen4-2-threads")
    best = next(line for line in done.out.splitlines() if "chain-1 at tau 2.00" in line)
    assert "takes every guess for right" in best and "a chain of 1 gives at most 2 tokens" in best
    assert not any("every guess" in line for line in advice(planned(SMOLLM2, taus="1.5")))


# --- configurations --------------------------------------------------------------------------------------------------

FOUR_SPELLINGS: list[dict[str, Any]] = [
    {"rope_theta": 5000.0},
    {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
    {"rope_parameters": {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 10.0}}},
    {"rope_scaling": {"rope_theta": 5000.0}, "dtype": "bfloat16"},
]


def test_spellings_of_the_rotary_base_give_one_shape() -> None:
    """R24."""
    bare = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    shapes = {read_plain_shape(Path("c"), {**bare, **spelling}).shape for spelling in FOUR_SPELLINGS}
    assert len(shapes) == 1 and shapes.pop().rope_theta == 5000.0
    read = read_plain_shape(Path("c"), bare)
    assert read.notes == ("config.json gives no rope_theta; nothing that is planned depends on it",)


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_every_family_that_exports_is_read(family: str) -> None:
    shape = read_plain_shape(Path("c"), {**LLAMA, "model_type": family}).shape
    assert (shape.family, shape.blocks) == (family, 4)
    assert shape.head_width == {"gemma3_text": 256, "qwen3": 128}.get(family, 16)


def test_a_plain_shape_is_the_full_one(tmp_path: Path) -> None:
    from elsi_edge.models import resolve

    directory = model_dir(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    assert read_plain_shape(directory / "config.json", config).shape == resolve(str(directory)).shape


NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", NEEDED)
@pytest.mark.parametrize("value", [None, -1, 0, "12", 1.5, True])
def test_a_bad_field_is_one_line_that_names_it(tmp_path: Path, run: Run, field: str, value: object) -> None:
    config = {**LLAMA, field: value}
    if value is None:
        del config[field]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    one_line(run("plan", file), 1, str(file), field)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "gpt2"}, ["'gpt2'", "not exported"]),
        ({"model_type": None}, ["no model_type"]),
        ({"model_type": 3}, ["no model_type"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "num_attention_heads, 4"]),
        ({"num_key_value_heads": -2}, ["num_key_value_heads is -2"]),
        ({"head_dim": -8}, ["head_dim is -8"]),
        ({"head_dim": "wide"}, ["head_dim is 'wide'"]),
        ({"hidden_size": 66}, ["head_dim", "66"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps is -1.0"]),
    ],
)
def test_a_bad_configuration_is_one_line(tmp_path: Path, run: Run, changes: dict[str, Any], parts: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    one_line(run("plan", tmp_path), 1, *parts)


@pytest.mark.parametrize(("text", "part"), [("{", "not valid JSON"), ("[1]", "no JSON object"), ("", "not valid JSON")])
def test_a_file_that_is_no_configuration(tmp_path: Path, run: Run, text: str, part: str) -> None:
    (tmp_path / "config.json").write_text(text)
    one_line(run("plan", tmp_path / "config.json"), 1, "config.json", part)


def test_a_directory_without_anything(tmp_path: Path, run: Run) -> None:
    one_line(run("plan", tmp_path), 1, "neither a manifest.json nor a config.json")
    one_line(run("plan", "no-such-model"), 1, "'no-such-model'", "qwen3-4b-instruct-2507")
    one_line(run("plan", ""), 1, "no model ''")


def test_missing_kv_heads_are_the_class_s_own() -> None:
    bare = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert read_plain_shape(Path("c"), bare).shape.kv_heads == 4
    with pytest.raises(ElsiError, match="num_key_value_heads is 8"):
        read_plain_shape(Path("c"), {**bare, "model_type": "mistral"})


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_paper_s_targets_by_name(run: Run) -> None:
    done = run("plan", "qwen3-4b-instruct-2507", "--json")
    assert done.code == 0, done.err
    value = done.json
    assert (value["precision"], value["context"], value["tau"]) == ("int4", 4096, ["tree-60=4.29"])
    assert value["device"]["kind"] == "projection" and all(s["value"] for s in value["device"]["sources"])
    tables = 2 * (262_144 - 4_160) * 128 * 4  # of angles: without --context, export's are for the model's own limit
    assert value["bundle_bytes"]["together"] == pytest.approx(2.957e9 + tables, rel=0.01)
    short = run("plan", "qwen3-4b-instruct-2507", "--context", "4096", "--json").json
    assert short["bundle_bytes"]["together"] == pytest.approx(2.957e9, rel=0.01)
    assert value["kv_bytes_per_1000_tokens"] == 36 * 2 * 8 * 128 * 4 * 1000
    assert [round_["shape"] for round_ in value["rounds"]] == [drafting.name for drafting in DRAFTINGS]
    assert value["rounds"][-1]["speeds"][0]["tau"] == 4.29
    done = run("plan", "meta-llama/Llama-3.1-8B-Instruct", "--device", "snapdragon-8-elite-npu")
    assert "assumption" in done.out and "projection from public figures" in done.out
    assert "embedding table is stored by itself" in done.out and "no bundle has run on a real NPU" in done.err


def test_a_plan_for_people(run: Run) -> None:
    done = run("plan", SMOLLM2, "--precision", "fp32", "--tau", "1.5,tree-8=2.2")
    assert done.code == 0, done.err
    for part in ("m = 3", "peak, about", "limited by", "break-even tau", "tau (tree-8=2.2)", "tau: given", "it fits"):
        assert part in done.out, part


def test_a_bundle_is_planned_as_it_is(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    bundle = tiny_bundle("int8")
    value = run("plan", bundle, "--json").json
    manifest = read_manifest(bundle)
    assert (value["precision"], value["context"]) == ("int8", 256)
    assert value["bundle_bytes"]["tokenizer"] == (bundle / "tokenizer.json").stat().st_size
    assert manifest.draft is not None
    expected = draft_sizes(manifest.draft, tensor_shapes(manifest.draft), "int8", manifest.context)
    assert value["drafts"]["1"]["together"] == expected.total
    short = run("plan", bundle, "--context", "64", "--json").json
    assert short["context"] == 64 and short["bundle_bytes"] == value["bundle_bytes"]  # its tables are what they are
    assert value["exported_for"] == manifest.context
    less = run("plan", bundle, "--draft-vocab", "64", "--json").json
    assert less["drafts"]["1"]["draft head"] == 64 * (64 * 9 // 8 + 8)


def test_a_bundle_without_a_draft_says_so(run: Run, tiny_bundle: Callable[..., Path]) -> None:
    done = run("plan", tiny_bundle("int4", plain=True), "--json")
    assert "has no draft" in done.err and "has no draft" in done.json["notes"][0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--context", "8"], "--context is 8"),
        (["--context", "9000"], "the model's 8192"),
        (["--m", "0"], "--m is 0"),
        (["--draft-vocab", "0"], "--draft-vocab is 0"),
        (["--draft-vocab", "999999999"], "the model's 49152 tokens"),
        (["--device", PI, "--measure", "device.json"], "drop one of them"),
        (["--tau", "0.5"], "tau is 0.5"),
        (["--seconds", "1"], "--seconds is 1"),
        (["--precision", "int2"], "int2"),
    ],
)
def test_options_out_of_range(run: Run, options: list[str], part: str) -> None:
    one_line(run("plan", SMOLLM2, *options), 2, part)


def test_more_taps_than_blocks_are_only_sizes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    assert run("plan", tmp_path, "--m", "3", "--json").json["shape"]["blocks"] == 1


def test_the_base_install_plans_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = python(f"from elsi_edge.cli import main\nmain(['plan', {str(tmp_path)!r}, '--json'])")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["shape"]["width"] == 64


def test_the_draft_that_is_sized_is_the_one_that_train_makes() -> None:
    from elsi_edge.draft.settings import TrainSettings
    from elsi_edge.draft.source import draft_config

    shape = find_model(SMOLLM2).shape
    taps = LayerSelection(taps=(0,), method="explicit", blocks=30, width=576)
    made: DraftConfig = draft_config(
        shape, selection=taps, draft_vocab_size=TrainSettings(steps=1).draft_vocab, vocab_coverage=0.0
    )
    assert draft_of(shape, 1, 8192) == made


def test_shipped_data_is_in_the_package() -> None:
    """Named in pyproject's package-data, or a wheel would lack it."""
    import tomllib

    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    globs = settings["tool"]["setuptools"]["package-data"]["elsi_edge.data"]
    assert {"configs/*.json", "devices/*.json"} <= set(globs)
    assert subprocess.run([sys.executable, "-c", "import elsi_edge.data"], check=False).returncode == 0
