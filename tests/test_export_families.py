"""Each family that export accepts, as a tiny random model: export's own parity check compares every graph with torch.

That check covers logits, taps, a tree with branches against its paths, several rows with a past, and for int4 and int8
that the chain form gives one row and several the same bits.
"""

from pathlib import Path
from typing import Any

import pytest

from elsi_edge.artifacts import Precision
from elsi_edge.errors import ModelError
from elsi_edge.export.pipeline import ExportSettings, export_bundle
from elsi_edge.model_shape import SUPPORTED_FAMILIES
from elsi_edge.models import resolve
from tests.tiny_text import build_tokenizer, write_text_files

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False, "sliding_window": None},
}


def family_model(directory: Path, family: str, **changes: Any) -> Path:
    """A seeded random model of a family, saved by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # gains of about one, so that errors show
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
        elif weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=1.0, std=0.1)
    model.save_pretrained(directory)
    text = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_text_files(directory, build_tokenizer(), tokenizer_config=text)
    return directory


def test_every_accepted_family_is_here() -> None:
    assert set(FAMILIES) == set(SUPPORTED_FAMILIES)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family(family: str, precision: Precision, tmp_path: Path) -> None:
    source = resolve(str(family_model(tmp_path / family, family)))
    manifest = export_bundle(source, tmp_path / "bundle", ExportSettings(precision=precision), draft=None)
    if precision == "fp32":
        assert manifest.parity["top1_agreement"] == 1.0
        assert manifest.parity["divergence_nats"] < 1e-6
        _compare_every_tap(source.directory, tmp_path / "bundle")
    else:
        assert manifest.parity["chain_bit_identical"] is True


def _compare_every_tap(model: Path, bundle: Path) -> None:
    """Taps 0..L and the state after the final norm against forward hooks: heads may have norms of their own."""
    import numpy as np

    from elsi_edge.artifacts import FINAL_NORM, LayerSelection
    from elsi_edge.export.reference import Reference
    from elsi_edge.runtime.target_runner import open_target_runner

    ids, reference, runner = [5, 7, 120, 44, 201, 9, 88], Reference(model), open_target_runner(bundle, 1)
    shape = runner.shape
    for tap in [*range(shape.blocks + 1), FINAL_NORM]:
        selection = LayerSelection(
            taps=(shape.blocks if tap == FINAL_NORM else tap,),
            method="explicit",
            state="final-norm" if tap == FINAL_NORM else "residual",
            blocks=shape.blocks,
            width=shape.width,
        )
        want = reference.run(ids, selection)[1]
        np.testing.assert_allclose(runner.states(ids, [tap]).states[0], want, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mistral", {"sliding_window": 16}, r"last 16 tokens only .* the context would be 256; .*--context 16"),
        ("phi3", {"sliding_window": 64}, r"last 64 tokens only"),
        ("phi3", {"head_dim": 32, "partial_rotary_factor": 0.75}, r"only 0\.75 of each head is rotated"),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            r"scaled by the rule 'yarn'",
        ),
    ],
)
def test_attention_that_would_be_wrong_is_refused_at_once(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elsi_edge.export.builder.build_base_graph", lambda *_, **__: pytest.fail("work was begun"))
    source = resolve(str(family_model(tmp_path / "model", family, **changes)))
    with pytest.raises(ModelError, match=said):
        export_bundle(source, tmp_path / "bundle", ExportSettings(precision="fp32"), draft=None)


def test_an_embedding_of_its_own_is_stored_in_a_quarter(tmp_path: Path) -> None:
    import onnx_ir as ir

    source = resolve(str(family_model(tmp_path / "m", "llama", tie_word_embeddings=False, vocab_size=4096)))
    sizes = {}
    for precision in ("fp32", "int8"):
        bundle = tmp_path / precision
        manifest = export_bundle(source, bundle, ExportSettings(precision=precision), draft=None)
        sizes[precision] = sum(e.bytes for name, e in manifest.files.items() if name.startswith("target.weights"))
    nodes = {node.op_type: node for node in ir.load(bundle / "target-tree.onnx").graph}
    table = nodes["GatherBlockQuantized"].inputs[0]
    assert "Gather" not in {
        node.op_type for node in ir.load(bundle / "target-chain.onnx").graph if "embed" in node.name
    }
    assert table is not None and table.shape is not None and list(table.shape) == [4096, 64]
    # Table and lm_head are nearly all of this model: a byte and an eighth for four.
    assert sizes["int8"] < 0.3 * sizes["fp32"]
    assert manifest.parity["divergence_nats"] < 0.05


def test_tables_of_angles_end_with_the_context(tmp_path: Path) -> None:
    import onnx

    source = resolve(str(family_model(tmp_path / "m", "llama", max_position_embeddings=4096)))
    manifest = export_bundle(source, tmp_path / "b", ExportSettings(precision="int4", context=100), draft=None)
    assert manifest.parity["chain_bit_identical"] is True
    for name in manifest.graphs.values():
        graph = onnx.load(tmp_path / "b" / name, load_external_data=False).graph
        tables = {t.name: list(t.dims) for t in graph.initializer if t.name.startswith(("cos_cache", "sin_cache"))}
        assert set(map(tuple, tables.values())) == {(164, 8)}, name
