"""The draft's native graph: both stock graphs in one, the same predictions, and its likeliest ids."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from elsi_edge.bundle import Bundle
from elsi_edge.export.native_draft import MOST_LIKELY, write_native_draft
from elsi_edge.runtime import draft as draft_module
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.draft import DraftStep, OrtDraft, likeliest
from elsi_edge.runtime.engines import open_draft
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.tree import ROOT

MakeBundle = Callable[..., Path]
SETTINGS = SessionSettings(threads=1)
REPORT = native_ops.report()
needs_library = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)


def pair(path: Path) -> tuple[OrtDraft, OrtDraft]:
    """The stock draft and the native one."""
    bundle = Bundle.load(path)
    config = bundle.manifest.draft
    assert config is not None
    stock, native = (open_draft(bundle, config, replace(SETTINGS, native=on)) for on in (False, True))
    assert isinstance(stock, OrtDraft) and isinstance(native, OrtDraft)
    return stock, native


def same(one: DraftStep, other: DraftStep) -> None:
    """Equal but for how activations are rounded."""
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=0.03)
    np.testing.assert_allclose(one.states, other.states, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp32"])
def test_one_graph_over_the_stock_ones_weights(tiny_bundle: MakeBundle, precision: str) -> None:
    bundle = Bundle.load(tiny_bundle(precision))
    model = onnx.load(bundle.graph("draft-native"), load_external_data=False)
    kinds = {node.op_type for node in model.graph.node}
    assert {"MatMulBlocks", "NormGatedBlocks", "LogSoftmax", "TopK"} <= kinds and not {
        "MatMulNBits",
        "Sigmoid",
        "GroupQueryAttention",
    } & kinds
    assert {"taps", "state"} <= {value.name for value in model.graph.input}
    assert {"log_probs", "likeliest"} <= {value.name for value in model.graph.output}
    files = {entry.value for one in model.graph.initializer for entry in one.external_data if entry.key == "location"}
    assert files == {"draft.weights", "projection.weights", "target.weights"}
    assert bundle.graph("draft-native").stat().st_size < 100_000


@needs_library
@pytest.mark.parametrize("precision", ["int4", "int8", "fp32"])
def test_it_predicts_what_the_stock_graphs_do(
    tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    stock, native = pair(tiny_bundle(precision))
    monkeypatch.setattr(draft_module, "ENTRY_ROWS", 5)
    draw = np.random.default_rng(0)
    width = stock.config.m * stock.config.embedding_width
    taps = draw.standard_normal((13, width)).astype(np.float32)
    tokens = draw.integers(0, 200, 13).tolist()
    for count in (12, 1):  # several blocks, then the entry of a round
        one, other = (draft.extend(tokens[:count], taps[:count]) for draft in (stock, native))
        same(one, other)
    one, other = (draft.expand([3, 9, 4], one.states[[0, 0, 0]], 1, [ROOT] * 3) for draft in (stock, native))
    same(one, other)
    below = [*[ROOT] * 3, 0, 2]
    one, other = (draft.expand([3, 9], one.states[[0, 2]], 2, below) for draft in (stock, native))
    same(one, other)
    one, other = (draft.extend(tokens[:1], taps[:1]) for draft in (stock, native))  # nothing of the tree is left
    same(one, other)
    assert stock.length == native.length == 14


@needs_library
def test_the_likeliest_come_from_the_graph(tiny_bundle: MakeBundle) -> None:
    _, native = pair(tiny_bundle("int4"))
    width = native.config.m * native.config.embedding_width
    step = native.extend([5], np.random.default_rng(0).standard_normal((1, width)).astype(np.float32))
    assert step.top is not None and [len(row) for row in step.top] == [MOST_LIKELY]
    for count in (1, 3, MOST_LIKELY, MOST_LIKELY + 4):
        assert step.likeliest(0, count) == likeliest(step.log_probs[0], count)
    before = step.log_probs.copy()
    native.expand([6], np.zeros((1, native.config.width), np.float32), 1, [ROOT])
    np.testing.assert_array_equal(step.log_probs, before)  # an entry's step outlives the levels below it


def test_a_draft_without_quantised_products_has_none(tiny_bundle: MakeBundle, tmp_path: Path) -> None:
    bundle = Bundle.load(tiny_bundle("int4"))
    for name in ("draft", "projection"):
        model = onnx.load(bundle.graph("draft" if name == "draft" else "projection"), load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                attribute.i = 2 if attribute.name == "bits" else attribute.i
        onnx.save(model, tmp_path / f"{name}.onnx")
    assert not write_native_draft(tmp_path, tmp_path / "draft-native.onnx")
    assert not (tmp_path / "draft-native.onnx").exists()


@needs_library
def test_the_tokens_are_plain_decodings_with_either_draft(tiny_bundle: MakeBundle) -> None:
    prompt, options = "Marn keeps a small ferry.", GenerateOptions(max_tokens=32, proposals=("draft",), draft_nodes=6)
    session = Session.open(tiny_bundle("int4"), SETTINGS)
    plain = session.generate(prompt, GenerateOptions(max_tokens=32, plain=True))
    drafted = session.generate(prompt, options)
    assert drafted.token_ids == plain.token_ids and drafted.drafted > 0
