"""Windows shorter than the context in every form of the target's graph, and what Gemma 3 asks of a draft.

A window counts positions. In a tree they are not columns; in chains and batches they are.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.artifacts import AnswerRequest, DraftConfig, LayerSelection, Precision
from elsi_edge.bundle import Bundle
from elsi_edge.draft.checkpoint import LoadedDraft, load_draft
from elsi_edge.export.pipeline import ExportSettings, export_bundle
from elsi_edge.export.recipe import Recipe
from elsi_edge.models import SourceModel, resolve
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.target_runner import BundleRunner
from elsi_edge.runtime.tree import ROOT, Tree, attention_bias, bias_name, bias_window
from elsi_edge.text import TextCodec
from tests.conftest import write_random_draft
from tests.test_export_families import _compare_every_tap, family_model

WINDOW, CONTEXT = 16, 512
needs_library = pytest.mark.skipif(not native_ops.report().available, reason=native_ops.report().why_not)
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    """Gemma 3: six blocks, the last sees everything, the others 16 positions."""
    place = tmp_path_factory.mktemp("gemma")
    return resolve(str(family_model(place / "gemma", "gemma3_text", max_position_embeddings=CONTEXT)))


@pytest.fixture(scope="module")
def draft(source: SourceModel) -> LoadedDraft:
    """Random, on taps 2 and 6 (the last residual stream)."""
    shape, codec = source.shape, TextCodec.from_model_dir(source.directory)
    config = DraftConfig(
        selection=LayerSelection(taps=(2, 6), method="explicit", blocks=shape.blocks, width=shape.width),
        width=shape.width,
        heads=2,
        kv_heads=1,
        head_width=16,
        mlp_width=64,
        draft_vocab_size=128,
        target_vocab_size=shape.vocab_size,
        context=CONTEXT,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
        target_fingerprint=source.fingerprint,
        tokenizer_sha256=codec.tokenizer_sha256,
        template_sha256=codec.template_sha256,
    )
    write_random_draft(source.directory.parent / "draft", config)
    return load_draft(source.directory.parent / "draft")


@pytest.fixture(scope="module")
def made(source: SourceModel, draft: LoadedDraft) -> Make:
    """`made("fp32")`: a bundle with the draft, `plain=True` without; each is exported once."""

    def make(precision: Precision, *, plain: bool = False) -> Path:
        out = source.directory.parent / f"{precision}-{plain}"
        if not out.exists():
            settings = ExportSettings(precision=precision, draft_precision="fp32" if precision == "fp32" else None)
            export_bundle(source, out, settings, draft=None if plain else draft)
        return out

    return make


def opened(bundle: Path, role: str) -> OrtTarget:
    manifest = Bundle.load(bundle).manifest
    path, settings = bundle / manifest.graphs[role], SessionSettings(threads=1)
    session = native_ops.open_native(path, settings) if role == "target-native" else open_session(path, settings)
    return OrtTarget(session, shape=manifest.shape, tap_width=manifest.tap_width)


def ids_of(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(6, 300, count).tolist()
    return found


def deep_tree(seed: int) -> Tree:
    """A spine of 24 nodes, longer than the window, with other nodes hanging below it and between its own."""
    draw, parents, spine = np.random.default_rng(seed), list[int](), [ROOT]
    while len(spine) <= 24:
        if draw.random() < 0.4 and parents:
            parents.append(int(draw.integers(-1, len(parents))))
        else:
            parents.append(spine[-1])
            spine.append(len(parents) - 1)
    return Tree(tokens=tuple(draw.integers(6, 300, len(parents)).tolist()), parents=tuple(parents))


def paths(tree: Tree) -> Iterator[tuple[int, list[int]]]:
    """Rows without children, and the nodes from the root to each."""
    for node in range(tree.size):
        if node not in tree.parents:
            path = [node]
            while tree.parents[path[0]] != ROOT:
                path.insert(0, tree.parents[path[0]])
            yield node, path


def along(target: OrtTarget, tree: Tree, path: list[int], past: int) -> tuple[NDArray[np.float32], ...]:
    """Logits and taps of a path's nodes, decoded token by token; the root is token 3."""
    logits, taps = [], []
    target.keep(past)
    for token in [3, *(tree.tokens[node] for node in path)]:
        step = target.verify(token, Tree.empty())
        logits.append(step.logits[0].copy())
        taps.append(step.taps[0].copy())
        target.commit([0])
    target.keep(past)
    return np.stack(logits), np.stack(taps)


@pytest.mark.parametrize("past", [5, 60])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tree_deeper_than_the_window_equals_its_paths(made: Make, past: int, seed: int) -> None:
    target, tree = opened(made("fp32"), "target-tree"), deep_tree(seed)
    assert target.windows == (WINDOW,)
    target.prefill(ids_of(past, seed))
    step = target.verify(3, tree)
    got, taps = step.logits.copy(), step.taps.copy()
    for _, path in paths(tree):
        want, states = along(target, tree, path, past)
        rows = [0, *(node + 1 for node in path)]
        np.testing.assert_allclose(got[rows], want, atol=1e-4)
        np.testing.assert_allclose(taps[rows], states, atol=1e-4 * float(np.abs(states).max()))
        again = target.verify(3, tree)  # a path kept out of a tree's columns goes on as it would have alone
        assert np.array_equal(again.logits, got)
        target.commit(rows)
        follow = target.verify(9, Tree.empty()).logits[0].copy()
        target.keep(past)
        for token in [3, *(tree.tokens[node] for node in path)]:
            target.verify(token, Tree.empty())
            target.commit([0])
        np.testing.assert_allclose(follow, target.verify(9, Tree.empty()).logits[0], atol=1e-4)
        target.keep(past)


@needs_library
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_native_trees_have_the_bits_of_their_paths(made: Make, precision: Precision) -> None:
    target = opened(made(precision), "target-native")
    for past, seed in ((5, 2), (60, 3)):
        target.keep(0)
        target.prefill(ids_of(past, seed))
        tree = deep_tree(seed)
        step = target.verify(3, tree)
        got, taps = step.logits.copy(), step.taps.copy()
        for _, path in paths(tree):
            rows = [0, *(node + 1 for node in path)]
            want, states = along(target, tree, path, past)
            assert np.array_equal(got[rows], want)
            assert np.array_equal(taps[rows], states)


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_chains_have_the_bits_of_one_row_a_step_wherever_the_window_ends(made: Make, precision: Precision) -> None:
    target = opened(made(precision), "target-chain")
    rest = ids_of(40, 4)
    for past in (3, 40):  # the window begins to move within the rows, and has moved long before
        results = []
        for rows in (1, 2, 7, 16):
            target.keep(0)
            target.prefill(ids_of(past, 5))
            found = []
            for start in range(0, len(rest), rows):
                block = rest[start : start + rows]
                found.append(target.verify(block[0], Tree.chain(block[1:])).logits.copy())
                target.commit(range(len(block)))
            results.append(np.concatenate(found))
        assert all(np.array_equal(result, results[0]) for result in results[1:])


def test_a_prompt_in_pieces_and_answers_in_batches_see_the_same_window(made: Make) -> None:
    """Prompts longer than a prefill's block; sequences of several lengths side by side, in distillation's form."""
    runner = BundleRunner(Bundle.load(made("fp32", plain=True)), SessionSettings(threads=1))
    asked = [
        AnswerRequest(key=str(n), prompt_ids=tuple(ids_of(n, n)), max_tokens=30, temperature=0.0, top_k=0, seed=0)
        for n in (3, 14, 50, 300)
    ]
    together = {r.key: ids for r, ids in runner.answer_batch(iter(asked), batch=3, stop=lambda: False)}
    for request in asked:
        alone = runner.answer(request.prompt_ids, max_tokens=30, temperature=0.0, top_k=0, seed=0)
        assert together[request.key] == alone
        whole = runner.states([*request.prompt_ids, *alone], [0]).logits  # one call, from an empty cache
        assert whole[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist() == alone
    assert len(set(together["300"])) > 3  # no one token again and again


PROMPTS = {
    "persian": "باران دیشب تا صبح بارید.",
    "japanese": "今朝は駅前の公園で友人と会った。",
    "code": "def mean(values):\n    return sum(values) / len(values)\n",
    "spaces": " " * 400,
    "lines": "\n" * 40,
}


def test_states_and_logits_of_several_scripts(source: SourceModel, made: Make) -> None:
    """R28: every block, by torch's own hooks."""
    codec = TextCodec.from_model_dir(source.directory)
    for text in PROMPTS.values():
        _compare_every_tap(source.directory, made("fp32", plain=True), codec.encode_raw(text))


def test_the_draft_reads_scaled_embeddings_and_training_does_too(
    source: SourceModel, draft: LoadedDraft, made: Make
) -> None:
    """Export compares the draft's graphs with its network on these embeddings; here with the target's own tap 0."""
    from elsi_edge.draft.source import read_source

    manifest = Bundle.load(made("fp32")).manifest
    assert manifest.parity["draft_entry_relative_error"] < 1e-4
    assert manifest.parity["draft_node_relative_error"] < 1e-4
    assert manifest.parity["taps_relative_error"] < 1e-5
    weights = read_source(source.directory, source.shape)
    runner = BundleRunner(Bundle.load(made("fp32", plain=True)), SessionSettings(threads=1))
    ids = ids_of(20, 6)
    np.testing.assert_allclose(runner.states(ids, [0]).states[0], weights.embeddings[ids].numpy(), rtol=1e-6)


def test_a_warm_start_takes_gains_not_their_distance_from_one(source: SourceModel) -> None:
    from safetensors.numpy import load_file

    from elsi_edge.draft.source import read_source

    weights, stored = read_source(source.directory, source.shape), load_file(source.directory / "model.safetensors")
    for name, place in (
        ("attention_norm", "model.layers.5.input_layernorm"),
        ("mlp_norm", "model.layers.5.pre_feedforward_layernorm"),
    ):
        np.testing.assert_array_equal(weights.block[name].numpy(), stored[f"{place}.weight"] + np.float32(1.0))
    assert weights.final_norm is not None
    np.testing.assert_array_equal(weights.final_norm.numpy(), stored["model.norm.weight"] + np.float32(1.0))
    assert any("norms after attention and MLP" in note for note in weights.others)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_drafted_answers_equal_plain_ones(made: Make, precision: Precision) -> None:
    session = Session.open(made(precision))
    plain = session.generate("a tale of two", GenerateOptions(plain=True, max_tokens=50))
    assert len(set(plain.token_ids)) > 3
    for nodes in (3, 12):
        drafted = session.generate("a tale of two", GenerateOptions(draft_nodes=nodes, max_tokens=50))
        assert drafted.token_ids == plain.token_ids


def test_windows_are_masks_of_the_tree_form_alone(made: Make) -> None:
    """The operator's own window counts columns: right in chains and batches, wrong in trees."""
    import onnx

    plain = made("int4", plain=True)
    for role, name in Bundle.load(plain).manifest.graphs.items():
        graph = onnx.load(plain / name, load_external_data=False).graph
        attributes = [{a.name: a.i for a in n.attribute} for n in graph.node if n.op_type.endswith("Attention")]
        found = [each.get("local_window_size", each.get("window", 0)) for each in attributes]
        masks = sorted(value.name for value in graph.input if bias_window(value.name) is not None)
        if role.startswith(("target-tree", "target-states")):
            assert (found, masks) == ([-1] * 6, ["attention_bias", f"attention_bias.{WINDOW}"]), role
        else:
            assert (found, masks) == ([WINDOW] * 5 + [-1], []), role


def test_mask_of_a_window_against_positions_counted_by_hand() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        size, cached, window = int(draw.integers(0, 30)), int(draw.integers(0, 20)), int(draw.integers(1, 12))
        parents = tuple(int(draw.integers(-1, node)) for node in range(size))
        tree = Tree(tokens=(0,) * size, parents=parents)
        seen, depths = tree.ancestors(), tree.depths()
        buffer = np.full(4000, 7.0, np.float32)
        bias = attention_bias(seen, cached, out=buffer, window=window, depths=depths)[0, 0]
        places = [*range(cached), *(cached + depth for depth in depths.tolist())]
        for row in range(size + 1):
            for column in range(cached + size + 1):
                visible = (column < cached or seen[row, column - cached]) and (
                    places[cached + row] - places[column] < window
                )
                assert (bias[row, column] == 0.0) == visible
                assert visible or bias[row, column] == np.finfo(np.float32).min


def test_names_of_masks() -> None:
    assert [bias_name(window) for window in (-1, 0, 16)] == ["attention_bias", "attention_bias", "attention_bias.16"]
    assert [
        bias_window(n) for n in ("attention_bias", "attention_bias.16", "input_ids", "attention_bias.x", "x.7")
    ] == [
        0,
        16,
        None,
        None,
        None,
    ]


def test_bytes_of_the_target_as_planned(source: SourceModel, made: Make) -> None:
    from elsi_edge.runtime.plan_sizes import target_bytes

    manifest: Any = Bundle.load(made("int4", plain=True)).manifest
    planned = target_bytes(source.shape, "int4", manifest.context)
    assert abs(sum(planned.values()) - manifest.files["target.weights"].bytes) <= 4096 + planned["norms"]
    assert planned["norms"] == 4 * ((4 * 6 + 1) * 96 + 2 * 6 * 32)  # small, they lie in the graphs


def test_compensated_rounding_measures_under_the_window(source: SourceModel, tmp_path: Path) -> None:
    recipe = Recipe(bits=4, rounding="compensated")
    manifest = export_bundle(source, tmp_path / "b", ExportSettings(precision="int4", recipe=recipe), draft=None)
    assert manifest.parity["chain_bit_identical"] is True
