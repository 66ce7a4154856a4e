"""Finding and loading the native library, and graphs that name its operators."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from elsi_edge.bundle import Bundle
from elsi_edge.errors import ModelError, ProviderError
from elsi_edge.export import native_blocks, native_graph, surgery
from elsi_edge.runtime import engines, native_ops
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree
from tests.test_export import MakeBundle

ROOT = Path(__file__).parents[1]
REPORT = native_ops.report()
needs_library = pytest.mark.skipif(not REPORT.available, reason=REPORT.why_not)


def test_a_missing_library_is_said_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "LIBRARY", "nowhere.so")
    found = native_ops.report()
    assert not found.available and found.path == ""
    assert "needs a C++ compiler" in found.note() and "exact in chains alone" in found.note()
    with pytest.raises(ProviderError, match="is not there"):
        native_ops.register(ort.SessionOptions())


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not an ELF file")
    monkeypatch.setattr(native_ops, "LIBRARY", str(tmp_path / "broken.so"))
    assert "cannot be loaded" in native_ops.report().why_not


@needs_library
def test_another_format_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(native_ops.library_path().read_bytes())
    monkeypatch.setattr(native_ops, "LIBRARY", str(copy))
    real = native_ops.FORMAT
    monkeypatch.setattr(native_ops, "FORMAT", 99)
    assert f"has format {real}, this version needs 99" in native_ops.report().why_not


@needs_library
def test_report() -> None:
    assert REPORT.paths[-1] == "portable" and REPORT.path == REPORT.paths[0]
    with native_ops.forced_path("portable"):
        assert native_ops.report().path == "portable"
    assert native_ops.report().path == REPORT.path


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["", "/nowhere/c++"])
def test_a_build_with_and_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    """Both end well; only the first leaves a library."""
    if not compiler and shutil.which("g++") is None:
        pytest.skip("no g++")
    places = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    environment = os.environ | ({"CC": compiler, "CXX": compiler} if compiler else {})
    command = [sys.executable, "setup.py", "-q", "build_ext", *places]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lib/elsi_edge/runtime" / native_ops.LIBRARY).is_file() == (not compiler)


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_the_native_graph_of_a_bundle(tiny_bundle: MakeBundle, precision: str) -> None:
    bundle = Bundle.load(tiny_bundle(precision))
    graph = onnx.load(bundle.graph("target-native"), load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    assert {"DecoderBlock", "LikeliestBlocks"} <= kinds
    assert not {"MatMulNBits", "GroupQueryAttention", "Sigmoid", "TreeAttention", "NormGatedBlocks"} & kinds
    names = {value.name for value in graph.input}
    assert {"cached", "parents"} <= names
    assert not {"seqlens_k", "total_sequence_length", "position_ids", "attention_bias"} & names
    tensors = {tensor.name: tensor.external_data for tensor in graph.initializer if tensor.external_data}
    assert tensors and all(data[0].value == "target.weights" for data in tensors.values())


def test_a_graph_without_quantised_products(tiny_bundle: MakeBundle) -> None:
    bundle = Bundle.load(tiny_bundle("fp32"))
    assert "target-native" not in bundle.manifest.graphs
    with pytest.raises(ModelError, match="none of the graph's 0 quantised products"):
        native_graph.use_native_products(surgery.load_graph(bundle.graph("target-tree")))


def opened(bundle: Bundle) -> OrtTarget:
    session = native_ops.open_native(bundle.graph("target-native"), SessionSettings(threads=2))
    return OrtTarget(session, shape=bundle.manifest.shape, tap_width=bundle.manifest.tap_width)


@needs_library
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_has_the_bits_of_one_token_a_step(tiny_bundle: MakeBundle, precision: str, seed: int) -> None:
    """Logits and taps of every row of a tree, against decoding its path token by token, and after a commit."""
    bundle = Bundle.load(tiny_bundle(precision))
    target, draw = opened(bundle), np.random.default_rng(seed)
    vocabulary = bundle.manifest.shape.vocab_size
    prompt = draw.integers(0, vocabulary, 20).tolist()
    nodes = (7, 15, 30, 30)[seed]
    parents = [int(draw.integers(-1, node)) for node in range(nodes)]
    tree = Tree(tokens=tuple(draw.integers(0, vocabulary, nodes).tolist()), parents=tuple(parents))
    target.prefill(prompt)
    step = target.verify(3, tree)
    logits, taps = step.logits.copy(), step.taps.copy()
    for row in range(nodes + 1):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0] - 1] + 1)
        for place in path:
            alone = target.verify(3 if place == 0 else tree.tokens[place - 1], Tree.empty())
            target.commit([0])
        assert np.array_equal(alone.logits[0], logits[row])
        assert np.array_equal(alone.taps[0], taps[row])
        follow = target.verify(5, Tree.empty()).logits.copy()
        target.keep(len(prompt))
        target.verify(3, tree)
        target.commit(path)
        assert np.array_equal(target.verify(5, Tree.empty()).logits, follow)
        target.keep(len(prompt))


@needs_library
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_sessions_use_it_and_trees_are_exact(tiny_bundle: MakeBundle, precision: str) -> None:
    session = Session.open(tiny_bundle(precision))
    assert session.exact_trees
    plain = session.generate("a tale of two", GenerateOptions(plain=True, max_tokens=40))
    for nodes in (4, 8, 30):
        drafted = session.generate("a tale of two", GenerateOptions(draft_nodes=nodes, max_tokens=40))
        assert drafted.mode == "tree" and drafted.exact
        assert drafted.token_ids == plain.token_ids


def test_without_the_library_the_stock_graph_runs(tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_ops, "LIBRARY", "nowhere.so")
    bundle = Bundle.load(tiny_bundle("int4"))
    assert not engines.BundleEngines(bundle, SessionSettings()).native
    session = Session.open(bundle.directory)
    assert not session.exact_trees
    assert [text for text in session.warnings if text.startswith("native operators: none (")]
    assert Session.open(bundle.directory, SessionSettings(native=False)).warnings == ()  # asked for
    assert Session.open(tiny_bundle("fp32")).warnings == ()  # has none anyway
    assert session.generate("a tale", GenerateOptions(draft_nodes=3, max_tokens=4)).mode == "chain"


def test_a_library_older_than_its_sources_is_not_used(tmp_path: Path) -> None:
    """After a pull into an editable install the graphs may name operators that an old library lacks."""
    library, source = tmp_path / native_ops.LIBRARY, tmp_path / "native" / "op.cpp"
    source.parent.mkdir()
    source.touch()
    library.touch()
    os.utime(source, (1, 1))
    with pytest.raises(ProviderError, match="cannot be loaded"):
        native_ops._load.__wrapped__(library)
    os.utime(library, (0, 0))
    with pytest.raises(ProviderError, match=r"older than its sources; build it again: pip install -e \."):
        native_ops._load.__wrapped__(library)


def test_blocks_of_a_bundle_become_one_node_each(tiny_bundle: MakeBundle) -> None:
    model = surgery.load_graph(Bundle.load(tiny_bundle("int4")).graph("target-tree"))
    native_graph.use_native_products(model)
    native_graph.use_native_attention(model)
    before = [value.name for value in model.graph.outputs]
    assert native_blocks.fold_blocks(model, native_ops.DOMAIN) == 2
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("DecoderBlock") == 2 and "TreeAttention" not in kinds
    assert [value.name for value in model.graph.outputs] == before


def test_a_block_of_another_kind_leaves_all_as_they_are(tiny_bundle: MakeBundle) -> None:
    """A product between attention and stream that is not the only reader: as in a family with something more there."""
    model = surgery.load_graph(Bundle.load(tiny_bundle("int4")).graph("target-tree"))
    native_graph.use_native_products(model)
    native_graph.use_native_attention(model)
    attended = next(node for node in model.graph if node.op_type == "TreeAttention").outputs[0]
    model.graph.outputs.append(attended)
    down = [node for node in model.graph if node.op_type == "MatMulBlocks"][-2]
    down.attributes["bits"] = down.attributes["bits"].__class__("bits", down.attributes["bits"].type, 8)
    before = [node.op_type for node in model.graph]
    assert native_blocks.fold_blocks(model, native_ops.DOMAIN) == 0
    assert [node.op_type for node in model.graph] == before
