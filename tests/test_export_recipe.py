"""Recipes: what they say, what they refuse, and that the graph does what they say; the three roundings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from elsi_edge.artifacts import BLOCK
from elsi_edge.bundle import Bundle
from elsi_edge.errors import DataError, UsageError
from elsi_edge.export import ticker
from elsi_edge.export.pipeline import ExportSettings, export_bundle
from elsi_edge.export.recipe import Recipe, make_recipe, matrix_name
from elsi_edge.export.rounding import quantise
from elsi_edge.models import resolve
from tests.cli_run import Run
from tests.conftest import TinyModel
from tests.test_export_families import family_model


def dequantised(weight: np.ndarray[Any, Any], bits: int, rounding: str, hessian: Any = None) -> np.ndarray[Any, Any]:
    packed, scales = quantise(weight, bits, rounding, hessian)  # type: ignore[arg-type]
    levels = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], BLOCK) if bits == 4 else packed
    values = (levels.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    return values.reshape(len(weight), -1)[:, : weight.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [64, 80])
def test_roundings_stay_near_and_least_squares_is_nearest_in_sum(bits: int, width: int) -> None:
    weight = np.random.default_rng(0).normal(size=(48, width)).astype(np.float32)
    weight[5] = 0
    stock, fitted = (dequantised(weight, bits, name) for name in ("nearest", "least-squares"))
    errors = [float(np.square(found - weight).mean()) for found in (stock, fitted)]
    assert errors[0] < (0.1 if bits == 4 else 0.01) ** 1.5
    assert errors[1] < errors[0]
    assert not fitted[5].any() and not stock[5].any()


def test_compensated_rounding_keeps_the_products_with_correlated_inputs() -> None:
    draw = np.random.default_rng(1)
    weight = draw.normal(size=(40, 80)).astype(np.float32)
    inputs = draw.normal(size=(500, 20)) @ draw.normal(size=(20, 80)) + 0.1 * draw.normal(size=(500, 80))
    hessian = inputs.T @ inputs / len(inputs)

    def error(found: np.ndarray[Any, Any]) -> float:
        return float(np.square(inputs @ (found - weight).T).mean())

    fitted = dequantised(weight, 4, "least-squares")
    compensated = dequantised(weight, 4, "compensated", hessian)
    assert error(compensated) < 0.5 * error(fitted)
    with pytest.raises(ValueError, match="Hessian"):
        quantise(weight, 4, "compensated", hessian[:3])


def test_exact_levels_are_found_again() -> None:
    """Weights that are on a grid already come back as they were, whichever sign its longer side has."""
    draw = np.random.default_rng(2)
    levels = draw.integers(-7, 8, (16, 2, BLOCK)).astype(np.float32)
    levels[:, 0, 0], levels[:, 1, 3] = -8, -8
    scales = np.array([0.03, -0.05], np.float32)[None, :, None]
    weight = (levels * scales).reshape(16, -1)
    for rounding in ("nearest", "least-squares"):
        np.testing.assert_allclose(dequantised(weight, 4, rounding), weight, atol=1e-6)


def test_the_last_pattern_holds_and_the_heads_bits_hold_over_it() -> None:
    recipe = Recipe(bits=4, lm_head_bits=8, matrices={"*.mlp.*": 8, "layers.1.mlp.down_proj": 32, "lm_*": 4})
    assert recipe.bits_of("layers.0.attn.o_proj") == 4
    assert recipe.bits_of("layers.0.mlp.up_proj") == 8
    assert recipe.bits_of("layers.1.mlp.down_proj") == 32
    assert recipe.bits_of("lm_head") == 8
    assert matrix_name("/model/layers.3/mlp/down_proj/MatMul") == "layers.3.mlp.down_proj"
    assert matrix_name("/lm_head/MatMul") == "lm_head" and matrix_name("/model/x/Add") is None


@pytest.mark.parametrize("text", ['{"matrices": {"*.down_proj": 8}, "lm_head_bits": 8}', None])
def test_a_file_in_json_and_toml(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / ("recipe.toml" if text is None else "recipe.json")
    file.write_text(text or 'lm_head_bits = 8\n[matrices]\n"*.down_proj" = 8\n')
    assert make_recipe("int4", file) == Recipe(bits=4, lm_head_bits=8, matrices={"*.down_proj": 8})
    assert make_recipe("int4", None, 8).lm_head_bits == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bits = 8", "bits is 8, --precision int4 has 4"),
        ("bits = 5", "bits is 5, it must be one of 4, 8, 32"),
        ("bits = true", "bits is True"),
        ('rounding = "best"', "rounding is 'best', it must be one of nearest"),
        ("lm_head_bit = 8", "unknown key 'lm_head_bit'.*did you mean 'lm_head_bits'"),
        ("matrices = 8", "matrices must be a table"),
        ('[matrices]\n"*" = "8"', "must be one of 4, 8, 32"),
        ("embedding_bits = 4", "embedding_bits is 4, the lm_head has 8 bits; .* where lm_head_bits is 4 too"),
        ("embedding_bits = 16\nlm_head_bits = 4", "embedding_bits is 16, the lm_head has 4 bits"),
    ],
)
def test_a_recipe_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        make_recipe("int4", tmp_path / "r.toml")


@pytest.mark.parametrize(
    ("file", "head"), [(None, 4), (None, 8), ("lm_head_bits = 8", None), ('[matrices]\n"*.o" = 8', None)]
)
def test_float32_leaves_every_matrix(tmp_path: Path, file: str | None, head: int | None) -> None:
    if file is not None:
        (tmp_path / "r.toml").write_text(file)
    with pytest.raises(
        UsageError, match=r"--precision fp32 leaves every matrix in floats, but '.*' is to have fewer bits"
    ):
        make_recipe("fp32", None if file is None else tmp_path / "r.toml", head)
    assert make_recipe("fp32", None, 32).bits_of("lm_head") == 32


def test_option_against_file_and_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("lm_head_bits = 4")
    with pytest.raises(UsageError, match=r"--lm-head-bits is 8, .* says lm_head_bits 4"):
        make_recipe("int4", tmp_path / "r.toml", 8)
    with pytest.raises(DataError, match="cannot be read"):
        make_recipe("int4", tmp_path / "none.toml")
    (tmp_path / "half.toml").write_text("bits = ")
    with pytest.raises(DataError, match="not valid TOML"):
        make_recipe("int4", tmp_path / "half.toml")
    with pytest.raises(UsageError, match="--lm-head-bits is 16, it must be one of 4, 8, 32"):
        make_recipe("int4", None, 16)
    (tmp_path / "r.toml").write_text("embedding_bits = 4")  # which goes with the option, not with the default
    assert make_recipe("int4", tmp_path / "r.toml", 4) == Recipe(lm_head_bits=4, embedding_bits=4)


def test_a_pattern_that_names_nothing() -> None:
    with pytest.raises(UsageError, match=r"'\*\.dwn_proj' names none of the model's 2 matrices.*layers\.0\.mlp\.down"):
        Recipe(matrices={"*.dwn_proj": 8}).require_matches(["layers.0.mlp.down_proj", "lm_head"])


def test_mixed_bits_reach_the_graph_and_the_manifest(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = Recipe(
        bits=4, rounding="compensated", offsets=False, lm_head_bits=8, matrices={"layers.0.*": 8, "*.o_proj": 32}
    )
    export_bundle(
        resolve(str(tiny_model.model)), tmp_path / "bundle", ExportSettings(precision="int4", recipe=recipe), draft=None
    )
    bundle = Bundle.load(tmp_path / "bundle")
    target = bundle.manifest.quantisation["target"]
    assert target["rounding"] == "compensated" and target["lm_head_bits"] == 8
    assert target["matrices"] == {"layers.0.*": 8, "*.o_proj": 32}
    graph = onnx.load(bundle.graph("target-chain"), load_external_data=False).graph
    bits: dict[str, int] = {}
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            attributes = {a.name: a.i for a in node.attribute}
            assert (attributes["block_size"], attributes["accuracy_level"], len(node.input)) == (32, 4, 3)
            bits[node.name] = attributes["bits"]
    assert bits["/lm_head/MatMul_Q8"] == 8 and bits["/model/layers.0/mlp/down_proj/MatMul_Q8"] == 8
    assert bits["/model/layers.1/mlp/down_proj/MatMul_Q4"] == 4
    assert not any("o_proj" in name for name in bits)
    assert target["matrices_by_bits"] == {"4": 4, "8": len(bits) - 4, "32": 2}
    assert bundle.manifest.parity["chain_bit_identical"] is True


def test_what_is_compensated_unless_said() -> None:
    light = Recipe(lm_head_bits=4)
    assert (light.rounding_of("lm_head"), Recipe().rounding_of("lm_head")) == ("compensated", "nearest")
    assert Recipe(offsets=False).rounding_of("layers.0.mlp.up_proj") == "compensated"
    assert Recipe(lm_head_bits=4, rounding="nearest").rounding_of("lm_head") == "nearest"
    assert light.compensates and not Recipe(bits=8).compensates and not Recipe(rounding="nearest").compensates
    assert (Recipe(bits=8, rounding="compensated").compensates, Recipe(bits=8, lm_head_bits=4).compensates) == (
        True,
    ) * 2
    told = light.to_json({4: 3}, roundings={"nearest": 2, "compensated": 1}, with_offsets=3, table_bits=8)
    assert (told["rounding"], told["matrices_by_rounding"]) == ("nearest", {"compensated": 1, "nearest": 2})
    assert (told["lm_head_bits"], told["embedding_bits"]) == (4, 8)
    told = Recipe(offsets=False).to_json({4: 2, 8: 1}, roundings={"nearest": 1, "compensated": 2})
    assert (told["rounding"], told["lm_head_bits"], told["symmetric"]) == ("compensated", 8, True)


def test_bits_of_the_table() -> None:
    """A tied one shares the lm_head's, except beside 4 bits; one of its own has 8, or float32 where all else has."""
    assert [Recipe(bits=bits).table_bits(tied=tied) for bits in (32, 8) for tied in (True, False)] == [32, 32, 8, 8]
    assert Recipe().table_bits(tied=True) == 8 and Recipe(lm_head_bits=4).table_bits(tied=True) == 8
    assert Recipe(lm_head_bits=4, embedding_bits=4).table_bits(tied=True) == 4


@pytest.mark.parametrize(("shared", "bits"), [(False, 8), (True, 4)])
def test_the_table_beside_a_light_lm_head(tmp_path: Path, shared: bool, bits: int) -> None:
    source = resolve(str(family_model(tmp_path / "m", "llama", vocab_size=1024)))
    recipe = Recipe(lm_head_bits=4, embedding_bits=4 if shared else None)
    manifest = export_bundle(source, tmp_path / "b", ExportSettings(precision="int4", recipe=recipe), draft=None)
    for name in ("target-tree.onnx", "target-chain.onnx", "target-native.onnx"):
        graph = onnx.load(tmp_path / "b" / name, load_external_data=False).graph
        lookup = next(node for node in graph.node if node.op_type == "GatherBlockQuantized")
        head = next(node for node in graph.node if node.name.startswith("/lm_head/MatMul"))
        assert {a.name: a.i for a in lookup.attribute}["bits"] == bits
        assert {a.name: a.i for a in head.attribute}["bits"] == 4
        assert (lookup.input[0] in (f"{name}_rows" for name in head.input)) is shared
    assert manifest.parity["chain_bit_identical"] is True
    assert manifest.quantisation["target"]["embedding_bits"] == bits


def test_bits_of_a_table_that_is_not_tied(tmp_path: Path) -> None:
    source = resolve(str(family_model(tmp_path / "m", "llama", tie_word_embeddings=False)))
    settings = ExportSettings(precision="int4", recipe=Recipe(lm_head_bits=4, embedding_bits=4))
    with pytest.raises(UsageError, match="embedding_bits is 4, but this model's table is not tied"):
        export_bundle(source, tmp_path / "b", settings, draft=None)
    assert not (tmp_path / "b").exists()


def test_the_command_line_refuses_before_any_work(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"bits": 8}))
    done = run("export", tiny_model.model, "--plain-only", "--recipe", tmp_path / "r.json", "--out", tmp_path / "b")
    assert done.code == 2 and "--precision int4 has 4" in done.err and not (tmp_path / "b").exists()
    (tmp_path / "r.json").write_text(json.dumps({"matrices": {"layers.9.*": 8}}))
    done = run("export", tiny_model.model, "--plain-only", "--recipe", tmp_path / "r.json", "--out", tmp_path / "b")
    assert done.code == 2 and "'layers.9.*' names none" in done.err and not (tmp_path / "b").exists()


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of the first step on, not more often than every few seconds, and not at the end."""
    clock, said = [0.0], list[str]()
    monkeypatch.setattr("elsi_edge.export.ticker.time.monotonic", lambda: clock[0])
    work = ticker.Ticker(said.append, "GPTQ", total=10)
    for at in (100.0, 101.0, 102.0, 106.0, 110.0, 111.0, 112.0, 130.0, 140.0, 150.0):
        clock[0] = at
        work.step()
    left = ("20%, 8", "40%, 12", "60%, 9", "80%, 9", "90%, 5")
    assert said == [f"GPTQ, {each} s left" for each in left]
