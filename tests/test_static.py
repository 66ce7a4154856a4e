"""Static bundles of the tiny model: the same tokens as the dynamic ones, fixed shapes, operators that NPUs list."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from elsi_edge.artifacts import Precision
from elsi_edge.bundle import Bundle, read_manifest
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.errors import BundleError, ModelError, PromptError, UsageError
from elsi_edge.export.static_export import StaticSettings, export_static, operator_tables, save_checked
from elsi_edge.models import resolve
from elsi_edge.runtime.engines import BundleEngines
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.static_target import StaticTarget
from elsi_edge.runtime.tree import Tree
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel

SETTINGS = SessionSettings(threads=1)
PROMPTS = ("Marn keeps a small ferry", "The river freezes", "Never trust blue ice, she tells them, and waits")
MakeBundle = Callable[..., Path]


@pytest.fixture(scope="module")
def static_bundle(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    """`static_bundle("int8", 16)`: each made once, prompts in blocks of 16 rows, 8 rows verified, 128 slots."""
    made: dict[tuple[str, int], Path] = {}
    place = tmp_path_factory.mktemp("static")

    def make(precision: Precision, bits: Any = 16) -> Path:
        if (precision, bits) not in made:
            out = place / f"{precision}-{bits}"
            settings = StaticSettings(precision=precision, activation_bits=bits, prefill_rows=16, context=128)
            export_static(resolve(str(tiny_model.model)), out, settings, draft=load_draft(tiny_model.draft))
            made[precision, bits] = out
        return made[precision, bits]

    return make


def answers(bundle: Path, **options: Any) -> list[tuple[int, ...]]:
    session = Session.open(bundle, SETTINGS)
    return [session.generate(p, GenerateOptions(max_tokens=40, raw=True, **options)).token_ids for p in PROMPTS]


@pytest.mark.usefixtures("stock_operators")
def test_fp32_says_what_the_dynamic_bundle_says(static_bundle: MakeBundle, tiny_bundle: MakeBundle) -> None:
    bundle, plain = static_bundle("fp32"), answers(tiny_bundle("fp32"), plain=True)
    assert len({token for answer in plain for token in answer}) > 10  # no loop of one token
    assert answers(bundle, plain=True) == plain
    for shape, nodes in (("tree", 7), ("tree", 3), ("chain", 7), ("auto", None)):
        assert answers(bundle, shape=shape, draft_nodes=nodes) == plain, (shape, nodes)


@pytest.mark.parametrize("bits", [16, 8])
def test_quantised_chains_are_bit_identical_to_plain_decoding(static_bundle: MakeBundle, bits: int) -> None:
    bundle = static_bundle("int8", bits)
    parity = read_manifest(bundle).parity
    assert parity["chain_bit_identical"] is True and parity["top1_agreement"] > (0.95 if bits == 16 else 0.8)
    assert parity["draft_node_relative_error"] < 0.02
    plain = answers(bundle, plain=True)
    assert answers(bundle, shape="chain", draft_nodes=7) == plain == answers(bundle)


def test_16_bits_lie_nearer_to_the_model_than_8(static_bundle: MakeBundle) -> None:
    wide, narrow = (read_manifest(static_bundle("int8", bits)).parity for bits in (16, 8))
    assert wide["divergence_nats"] < narrow["divergence_nats"] / 2
    assert read_manifest(static_bundle("fp32")).parity["top1_agreement"] == 1.0


def test_at_8_bits_down_projections_and_heads_keep_16(static_bundle: MakeBundle) -> None:
    """Massive activations lie there: both sides of these products are uint16, all others uint8."""
    bundle = Bundle.load(static_bundle("int8", 8))
    for role, head in (("static-verify", "model.embed_tokens"), ("static-entry", "draft.head")):
        graph = onnx.load(bundle.graph(role), load_external_data=False).graph  # type: ignore[arg-type]
        kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
        makers = {node.output[0]: node for node in graph.node}
        readers = {node.input[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
        wide = set()
        for product in (node for node in graph.node if node.op_type == "Gemm"):
            read, matrix = (makers[name] for name in product.input)
            before, after = kinds[read.input[2]], kinds[readers[product.output[0]].input[2]]
            assert before == after in (onnx.TensorProto.UINT8, onnx.TensorProto.UINT16)
            if before == onnx.TensorProto.UINT16:
                wide.add(matrix.input[0].removesuffix(".weight.int8"))
        prefix = "draft.0" if role == "static-entry" else "model.layers.0"
        assert {head, f"{prefix}.mlp.down_proj"} <= wide
        assert all(name == head or name.endswith(".down_proj") for name in wide)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_graphs_are_what_an_npu_takes(static_bundle: MakeBundle, precision: str) -> None:
    bundle = Bundle.load(static_bundle(precision))
    roles = {"static-prefill": 16, "static-verify": 8, "static-entry": 8, "static-level": 4}
    assert set(bundle.manifest.graphs) == set(roles)
    for role, rows in roles.items():
        path = bundle.graph(role)  # type: ignore[arg-type]
        onnx.checker.check_model(str(path))
        graph = onnx.load(path, load_external_data=False).graph
        assert {node.domain for node in graph.node} == {""}
        for operators in operator_tables().values():
            assert {node.op_type for node in graph.node} <= operators
        sizes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)}
        assert all(size.HasField("dim_value") for dims in sizes.values() for size in dims)
        assert sizes["embedded"][0].dim_value == rows and sizes["mask"][-1].dim_value == 128
        assert path.stat().st_size < 100_000  # weights lie beside it


def test_operator_tables_name_their_source() -> None:
    text = (Path(__file__).parents[1] / "export" / "npu_operators.json").read_text("utf-8")
    tables = json.loads(text)
    assert set(tables) == {"QNNExecutionProvider", "OpenVINOExecutionProvider"}
    for table in tables.values():
        assert table["version"] and "/blob/" in table["source"] and len(table["operators"].split()) > 90


def test_a_graph_outside_the_tables_is_refused(static_bundle: MakeBundle, tmp_path: Path) -> None:
    model = onnx.load(Bundle.load(static_bundle("fp32")).graph("static-level"), load_external_data=False)
    model.graph.node[0].op_type = "Erf"
    with pytest.raises(ModelError, match=r"x\.onnx holds the operator Erf, which the table of QNN.* does not list"):
        save_checked(model, tmp_path / "x.onnx")
    model = onnx.load(Bundle.load(static_bundle("fp32")).graph("static-level"), load_external_data=False)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "T"
    with pytest.raises(ModelError, match="has no fixed shape"):
        save_checked(model, tmp_path / "x.onnx")


def test_weights_are_stored_once(static_bundle: MakeBundle, tiny_bundle: MakeBundle) -> None:
    """The tied embeddings are the lm_head's bytes, and graphs of other row counts add none."""
    whole = read_manifest(tiny_bundle("fp32")).components["target weights"]
    assert read_manifest(static_bundle("fp32")).components["target weights"] < 1.3 * whole  # gaps of alignment
    graph = onnx.load(Bundle.load(static_bundle("fp32")).graph("static-verify"), load_external_data=False).graph
    places = {tensor.name: {e.key: e.value for e in tensor.external_data} for tensor in graph.initializer}
    assert places["model.embed_tokens.weight"]["location"] == "target-embeddings.npy"


def test_rows_that_are_not_needed_change_nothing(static_bundle: MakeBundle) -> None:
    """Padding, stale inputs and forgotten tokens leave a row's logits as they were, bit for bit."""
    engines = BundleEngines(Bundle.load(static_bundle("fp32")), SETTINGS)
    target = engines.open_target(exact=True)
    assert isinstance(target, StaticTarget)
    target.prefill([7, 8, 9])
    first = target.verify(20, Tree.chain([21, 22])).logits.copy()
    target.commit([0, 1, 2])
    target.verify(30, Tree.chain([31, 32, 33, 34, 35, 36, 37]))
    target.commit([0, 1])
    target.keep(3)
    assert target.length == 3 and not target.cache.keys[0][..., 3:].any()
    again = target.verify(20, Tree.chain([21, 22])).logits
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(target.verify(20, Tree.empty()).logits[0], first[0])


def test_a_prompt_in_blocks_equals_the_same_prompt_token_by_token(static_bundle: MakeBundle) -> None:
    target = BundleEngines(Bundle.load(static_bundle("fp32")), SETTINGS).open_target(exact=True)
    ids = [int(i) for i in np.random.default_rng(3).integers(6, 250, 41)]
    whole = target.prefill(ids)
    logits, taps = whole.logits.copy(), whole.taps
    target.keep(0)
    for number, token in enumerate(ids):
        step = target.verify(token, Tree.empty())
        np.testing.assert_allclose(step.taps[0], taps[number], atol=1e-5)
        target.commit([0])
    np.testing.assert_allclose(step.logits, logits, atol=1e-4)


def test_a_chat_keeps_its_prefix(static_bundle: MakeBundle) -> None:
    session = Session.open(static_bundle("fp32"), SETTINGS)
    options = GenerateOptions(max_tokens=12, raw=True)
    first = session.generate(PROMPTS[0], options)
    longer = PROMPTS[0] + first.text + " and"
    kept = session.generate(longer, replace(options, reuse_prefix=True))
    fresh = Session.open(static_bundle("fp32"), SETTINGS).generate(longer, options)
    assert kept.reused_tokens > 5 and kept.token_ids == fresh.token_ids


def test_the_end_of_the_cache_ends_the_answer(static_bundle: MakeBundle) -> None:
    prompt = "The mill on the far bank needs flour sacks carried over, " * 3
    session = Session.open(static_bundle("fp32"), SETTINGS)
    whole = session.generate(prompt, GenerateOptions(raw=True, max_tokens=400))
    assert whole.prompt_tokens > 90 and whole.prompt_tokens + len(whole.token_ids) <= 128
    assert whole.token_ids == session.generate(prompt, GenerateOptions(raw=True, max_tokens=400, plain=True)).token_ids
    with pytest.raises(PromptError, match=r"has \d+ tokens, 127 fit; .*longer context"):
        session.generate(prompt * 2, GenerateOptions(raw=True))


def test_more_nodes_than_the_graph_has_rows(static_bundle: MakeBundle) -> None:
    session = Session.open(static_bundle("fp32"), SETTINGS)
    with pytest.raises(UsageError, match=r"--draft-nodes is 8, .* verifies 8 rows, .* --verify-rows 9"):
        session.generate("x", GenerateOptions(draft_nodes=8))
    assert session.policy(GenerateOptions()).budget == 7


def test_a_bundle_whose_tables_are_gone(static_bundle: MakeBundle, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(static_bundle("fp32"), copy)
    (copy / "target-rotary.npy").write_bytes(b"no")
    with pytest.raises(BundleError, match=r"target-rotary\.npy has 2 bytes"):
        Session.open(copy, SETTINGS)
    bundle = Bundle(directory=copy, manifest=read_manifest(copy))
    with pytest.raises(BundleError, match=r"target-rotary\.npy cannot be read .* export the bundle again"):
        BundleEngines(bundle, SETTINGS).open_target(exact=True)
    value = json.loads((copy / "manifest.json").read_text())
    value["static"]["verify_rows"] = 0
    (copy / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(BundleError, match="0 verify rows"):
        read_manifest(copy)


def test_export_on_the_command_line(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "npu"
    arguments = ("export", tiny_model.model, "--draft", tiny_model.draft, "--for", "npu", "--out", out)
    done = run(*arguments, "--context", 64, "--verify-rows", 4, "--prefill-block", 8)
    assert done.code == 0 and "one row a step and several" in done.out, done.err
    manifest = read_manifest(out)
    assert manifest.precision == "int8" and manifest.context == 64 and manifest.static is not None
    assert (manifest.static.prefill_rows, manifest.static.verify_rows, manifest.static.activation_bits) == (8, 4, 16)
    assert run("generate", out, "Marn", "--raw", "--max-tokens", 4, "--threads", 1).code == 0
    tuned = run("tune", out)
    assert tuned.code == 2 and "graphs of fixed size" in tuned.err.splitlines()[-1] and "1 to 4 rows" in tuned.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--precision", "int4"), ("--precision is int4", "int8")),
        (("--context", 300), ("--context is 300", "256")),
        (("--prefill-block", 512), ("--prefill-block is 512", "at most 256")),
        (("--verify-rows", 0), ("--verify-rows is 0", "at least 1")),
        (("--activation-bits", 4), ("--activation-bits is 4", "8 or 16")),
        (("--draft-precision", "int4"), ("--draft-precision is int4", "--for npu does not have")),
    ],
)
def test_requests_that_cannot_be(
    run: Run, tiny_model: TinyModel, options: tuple[object, ...], said: tuple[str, ...]
) -> None:
    one_line(run("export", tiny_model.model, "--for", "npu", "--plain-only", *options), 2, *said)


def test_options_of_npus_alone(run: Run, tiny_model: TinyModel) -> None:
    one_line(run("export", tiny_model.model, "--verify-rows", 8), 2, "--verify-rows is 8", "add --for npu")
