"""The export: what it refuses, what it checks, and that it leaves the same files wherever and however often it runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from elsi_edge.artifacts import BITS, LayerSelection, Precision
from elsi_edge.bundle import Bundle
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.errors import DraftError, ElsiError, ModelError, ParityError, StorageError, UsageError
from elsi_edge.export import parity, surgery, target
from elsi_edge.export.pipeline import ExportSettings, export_bundle, same_selection_or_explain
from elsi_edge.models import resolve
from tests.conftest import TinyModel
from tests.test_export_families import family_model

MakeBundle = Callable[..., Path]


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_bundle_holds_what_its_precision_needs(tiny_bundle: MakeBundle, precision: str) -> None:
    manifest = Bundle.load(tiny_bundle(precision)).manifest
    exact = set() if precision == "fp32" else {"target-chain", "target-native"}
    assert set(manifest.graphs) == {"target-tree", "draft", "draft-native", "projection"} | exact
    assert manifest.selection is not None and manifest.draft is not None
    assert manifest.parity["tree_divergence_nats"] <= 4 * parity.MAX_DIVERGENCE[manifest.precision]
    assert manifest.quantisation["target"].get("block") == (None if precision == "fp32" else 32)
    assert manifest.quantisation["draft"]["bits"] == (4 if precision == "int4" else 8)
    assert "work" not in {name.split("/")[0] for name in manifest.files}


@pytest.mark.parametrize(("asked", "bits"), [(None, 4), ("fp32", 32)])
def test_a_draft_trained_for_int4_stays_int4_in_a_finer_bundle(
    tiny_model: TinyModel, tmp_path: Path, asked: Precision | None, bits: int
) -> None:
    draft = load_draft(tiny_model.draft)
    aware = replace(draft, config=replace(draft.config, training={"settings": {"qat": "int4"}}))
    settings = ExportSettings(precision="int8", draft_precision=asked)
    manifest = export_bundle(resolve(str(tiny_model.model)), tmp_path / "bundle", settings, draft=aware)
    assert manifest.quantisation["draft"]["bits"] == bits and BITS[manifest.draft_precision] == bits
    assert manifest.quantisation["target"]["bits"] == 8


def test_fp32_equals_torch(tiny_model: TinyModel, tmp_path: Path) -> None:
    export_tiny(tiny_model, tmp_path / "bundle", draft_precision="fp32")
    measured = Bundle.load(tmp_path / "bundle").manifest.parity
    assert measured["top1_agreement"] == 1.0
    assert measured["logits_relative_error"] < 1e-4
    assert measured["taps_relative_error"] < 1e-5
    assert measured["draft_entry_relative_error"] < 1e-4
    assert measured["draft_node_relative_error"] < 1e-4


def test_weights_are_stored_once(tiny_bundle: MakeBundle) -> None:
    """The draft's lookup names the target's embedding; its own file holds its own weights alone."""
    bundle = tiny_bundle("fp32")
    model = onnx.load(bundle / "draft.onnx", load_external_data=False)
    places = {
        {entry.key: entry.value for entry in tensor.external_data}["location"]
        for tensor in model.graph.initializer
        if tensor.external_data
    }
    assert places == {"target.weights", "draft.weights"}


def test_taps_are_block_inputs_and_one_off_is_caught(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commonest fault of such exports costs half of the acceptance and raises no error elsewhere."""
    monkeypatch.setattr(target, "_tapped", lambda model, selection: [surgery.residuals(model)[selection.taps[0] + 1]])
    with pytest.raises(ParityError, match="taps"):
        export_tiny(tiny_model, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def export_tiny(tiny: TinyModel, out: Path, **settings: object) -> None:
    source = resolve(str(tiny.model))
    made = ExportSettings(**{"precision": "fp32", **settings})  # type: ignore[arg-type]
    export_bundle(source, out, made, draft=load_draft(tiny.draft))


def test_same_files_twice_and_nothing_in_the_current_directory(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    out = Path("..") / "out" / "bundle"
    export_tiny(tiny_model, out)
    first = Bundle.load(out).manifest.files
    with pytest.raises(StorageError, match="exists already"):
        export_tiny(tiny_model, out)
    export_tiny(tiny_model, out, replace=True)
    again = Bundle.load(out).manifest.files
    assert {n: f.bytes for n, f in first.items()} == {n: f.bytes for n, f in again.items()}
    assert first["target.weights"] == again["target.weights"]
    assert list(here.iterdir()) == [] and list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "bundle"]


@pytest.mark.parametrize("context", [15, 100_000])
def test_context_out_of_range(tiny_model: TinyModel, tmp_path: Path, context: int) -> None:
    with pytest.raises(UsageError, match=str(context)):
        export_tiny(tiny_model, tmp_path / "bundle", context=context)
    assert list(tmp_path.iterdir()) == []


def test_draft_of_another_target(tiny_model: TinyModel, tmp_path: Path) -> None:
    other = resolve(str(family_model(tmp_path / "other", "llama")))
    with pytest.raises(DraftError, match=r"number of blocks is 2, .* has 4"):
        export_bundle(other, tmp_path / "bundle", ExportSettings(precision="fp32"), draft=load_draft(tiny_model.draft))


def test_selection_that_the_draft_was_not_trained_on(tiny_model: TinyModel) -> None:
    draft = load_draft(tiny_model.draft)
    ways: Any = {"draft_path": tiny_model.draft, "asked": "--layers 2 names", "train": "elsi-edge distill m"}
    same_selection_or_explain(tiny_model.selection, draft, **ways)
    wanted = replace(tiny_model.selection, taps=(2,))
    with pytest.raises(DraftError) as caught:
        same_selection_or_explain(wanted, draft, **ways)
    for part in ("--layers 2 names tap 2", "tap 1", "2.000", "3.000", "--layers 1", "elsi-edge distill m"):
        assert part in str(caught.value)


def test_family_that_was_never_checked_is_refused_at_once(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from tests.tiny_text import build_tokenizer, write_text_files

    config = GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=300
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    write_text_files(tmp_path / "model", build_tokenizer())
    with pytest.raises(ModelError, match=r"gpt_neox.*llama, mistral"):
        export_bundle(resolve(str(tmp_path / "model")), tmp_path / "bundle", ExportSettings(), draft=None)
    assert not (tmp_path / "bundle").exists()


def test_a_full_disk_is_said_before_the_work(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ElsiError, match=r"needs .* MB"):
        export_tiny(tiny_model, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_selection_of_the_state_after_the_final_norm(tiny_model: TinyModel, tmp_path: Path) -> None:
    """EAGLE-2's rule has a state of its own; its draft is exported and compared like any other."""
    from elsi_edge.draft.checkpoint import load_config
    from tests.conftest import write_random_draft

    selection = LayerSelection(
        taps=(2,), method="eagle2", state="final-norm", blocks=2, width=64, model=str(tiny_model.model)
    )
    write_random_draft(tmp_path / "draft", replace(load_config(tiny_model.draft), selection=selection))
    source = resolve(str(tiny_model.model))
    draft = load_draft(tmp_path / "draft")
    manifest = export_bundle(source, tmp_path / "bundle", ExportSettings(precision="fp32"), draft=draft)
    assert manifest.parity["taps_relative_error"] < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 2},
        {"heads": 2, "kv_heads": 1, "head_width": 48, "mlp_width": 32},
        {"depth": 2, "width": 32, "target_width": 64, "heads": 3, "kv_heads": 3},
    ],
    ids=["two blocks", "own heads", "narrow"],
)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_drafts_of_other_shapes(tiny_model: TinyModel, tmp_path: Path, changes: dict[str, int], precision: str) -> None:
    """Two blocks, heads of its own and another width than the target's are exported, compared, and run."""
    from elsi_edge.draft.checkpoint import load_config
    from elsi_edge.runtime.options import GenerateOptions
    from elsi_edge.runtime.session import Session
    from tests.conftest import write_random_draft

    write_random_draft(tmp_path / "draft", replace(load_config(tiny_model.draft), **changes))  # type: ignore[arg-type]
    source, draft = resolve(str(tiny_model.model)), load_draft(tmp_path / "draft")
    settings = ExportSettings(precision=precision, draft_precision=precision)  # type: ignore[arg-type]
    manifest = export_bundle(source, tmp_path / "bundle", settings, draft=draft)
    if precision == "fp32":
        assert manifest.parity["draft_entry_relative_error"] < 1e-4
        assert manifest.parity["draft_node_relative_error"] < 1e-4
    session, options = Session.open(tmp_path / "bundle"), GenerateOptions(max_tokens=12, draft_nodes=6)
    drafted, plain = (session.generate("a b", o) for o in (options, replace(options, draft_nodes=0)))
    assert drafted.token_ids == plain.token_ids and drafted.draft_nodes > 0
