"""Each family that export accepts, as a tiny random model: export's own parity check compares every graph with torch.

That check covers logits, taps, a tree with branches against its paths, several rows with a past, and for int4 and int8
that the chain form gives one row and several the same bits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elsi_edge.artifacts import Precision
from elsi_edge.errors import ModelError
from elsi_edge.export.pipeline import ExportSettings, export_bundle
from elsi_edge.model_shape import SUPPORTED_FAMILIES
from elsi_edge.models import resolve
from elsi_edge.runtime import native_ops
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
THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
GEMMA: dict[str, Any] = {
    "hidden_size": 96,  # its square root, the scale of embeddings, has many decimals
    "num_hidden_layers": 6,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETAS["full_attention"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": THETAS["sliding_attention"]},
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA,
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
            torch.nn.init.normal_(weight, mean=0.0 if family == "gemma3_text" else 1.0, std=0.1)
    if family == "gemma3_text":  # else its scaled embeddings, tied, say the last token again and again
        model.get_input_embeddings().weight.data.mul_(0.15)
        model.base_model.norm.weight.data.add_(4.0)
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


def _compare_every_tap(model: Path, bundle: Path, ids: Sequence[int] = (5, 7, 120, 44, 201, 9, 88) * 9) -> None:
    """Taps 0..L and the state after the final norm against forward hooks: heads may have norms of their own."""
    import numpy as np

    from elsi_edge.artifacts import FINAL_NORM, LayerSelection
    from elsi_edge.export.reference import Reference
    from elsi_edge.runtime.target_runner import open_target_runner

    reference, runner = Reference(model), open_target_runner(bundle, 1)
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
        got = runner.states(ids, [tap]).states[0]
        np.testing.assert_allclose(got, want, atol=2e-5 * float(np.abs(want).max()), err_msg=f"tap {tap}")
    want = reference.run(ids, None)[0]
    np.testing.assert_allclose(runner.states(ids, [0]).logits, want, atol=5e-5 * float(np.abs(want).max()))


SHORT = [1.0 + 0.05 * i for i in range(24)]  # of 24 pairs of rotated coordinates
VARIANTS: dict[str, tuple[str, dict[str, Any], int | None]] = {  # family, changes, context
    "phi3, half of a head": ("phi3", {"head_dim": 32, "partial_rotary_factor": 0.5}, None),
    "phi3, a quarter of a head": ("phi3", {"head_dim": 64, "partial_rotary_factor": 0.25}, None),
    "phi3, longrope": (
        "phi3",
        {
            "hidden_size": 256,  # heads of 64
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "sliding_window": 1000,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": [4.0] * 24},
        },
        128,
    ),
    "phi3, a window": ("phi3", {"sliding_window": 16}, None),
    "mistral, a window": ("mistral", {"sliding_window": 24}, None),
    "mistral, a window as long as the context": ("mistral", {"sliding_window": 100}, 100),
    "qwen2, some blocks": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, None),
    "gemma3, the angles unscaled": (
        "gemma3_text",
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": t} for kind, t in THETAS.items()}},
        None,
    ),
}


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_variant(variant: str, precision: Precision, tmp_path: Path) -> None:
    family, changes, context = VARIANTS[variant]
    source = resolve(str(family_model(tmp_path / "model", family, **changes)))
    settings = ExportSettings(precision=precision, context=context)
    manifest = export_bundle(source, tmp_path / "bundle", settings, draft=None)
    if precision == "fp32":
        assert manifest.parity["top1_agreement"] == 1.0
        assert manifest.parity["tree_divergence_nats"] < 1e-5
        assert manifest.parity.get("window_divergence_nats", 0.0) < 1e-5
        _compare_every_tap(source.directory, tmp_path / "bundle")
    else:
        assert manifest.parity["chain_bit_identical"] is True
        assert native_ops.report().available <= manifest.parity.get("native_bit_identical", False)


@pytest.mark.parametrize(
    ("family", "changes", "context", "said"),
    [
        ("phi3", {"head_dim": 32, "partial_rotary_factor": 0.25}, None, r"only 0\.25 of each head .* 8 of 32 coord"),
        ("qwen2", {"head_dim": 32, "partial_rotary_factor": 0.5}, None, r"only 0\.5 of each head is rotated"),
        ("phi3", VARIANTS["phi3, longrope"][1], 129, r"beyond 128 tokens \(longrope\).* --context 128 or less"),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            None,
            r"scaled by the rule 'yarn'",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None, r"by the rule 'linear'"),
        ("gemma3_text", {"final_logit_softcapping": 3.0}, None, r"final_logit_softcapping is 3\.0; capped logits"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, None, r"attn_logit_softcapping is 5\.0; capped scores"),
        ("gemma3_text", {"use_bidirectional_attention": True}, None, r"attention to later tokens is not exported"),
    ],
)
def test_attention_that_would_be_wrong_is_refused_at_once(
    family: str,
    changes: dict[str, Any],
    context: int | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elsi_edge.export.builder.build_base_graph", lambda *_, **__: pytest.fail("work was begun"))
    source = resolve(str(family_model(tmp_path / "model", family, **changes)))
    with pytest.raises(ModelError, match=said):
        export_bundle(source, tmp_path / "bundle", ExportSettings(precision="fp32", context=context), draft=None)


def test_a_model_of_text_and_images_is_refused_at_once(tmp_path: Path) -> None:
    from elsi_edge.export.builder import require_plain_attention

    shape = resolve(str(family_model(tmp_path / "model", "gemma3_text"))).shape
    with pytest.raises(ModelError, match=r"more than text \(gemma3, .*language model \(gemma3_text\) alone"):
        require_plain_attention({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, shape, 256)


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
