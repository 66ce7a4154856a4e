"""Drafts from and to other tools: names, offsets, numbers of states, logits, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from elsi_edge.artifacts import DraftConfig, LayerSelection, ModelShape
from elsi_edge.draft.checkpoint import load_draft, save_draft, tensor_shapes
from elsi_edge.draft.layouts import LAYOUTS, Target, export_draft, import_draft
from elsi_edge.draft.layouts.spec import default_taps
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.errors import DraftError, ElsiError, SelectionError
from tests.cli_run import Run, one_line
from tests.conftest import TinyModel, write_random_draft

Floats = NDArray[np.float32]
E, V, U, BLOCKS = 32, 90, 40, 28
HEADS, KV, D, MLP = 4, 2, 8, 48
SHAPE = ModelShape(
    family="llama", blocks=BLOCKS, width=E, heads=HEADS, kv_heads=KV, head_width=D, mlp_width=MLP, vocab_size=V,
    context=512, tied_embeddings=True, rope_theta=500.0, norm_eps=1e-5,
)  # fmt: skip
TABLE = np.random.default_rng(5).standard_normal((V, E)).astype(np.float32)


def target(embeddings: Floats | None = TABLE) -> Target:
    return Target(
        model="owner/target", shape=SHAPE, fingerprint="f" * 64, tokenizer_sha256="t" * 64, template_sha256="c" * 64,
        embeddings=lambda: embeddings, architectures=("LlamaForCausalLM",),
    )  # fmt: skip


def our_draft(directory: Path, *taps: int, depth: int = 1, **changes: Any) -> Path:
    selection = LayerSelection(
        taps=taps, method="elsi", entropy=tuple(map(float, range(BLOCKS + 1))), blocks=BLOCKS, width=E,
        target_fingerprint="f" * 64, model="owner/target",
    )  # fmt: skip
    config = DraftConfig(
        selection=selection, width=E, heads=HEADS, kv_heads=KV, head_width=D, mlp_width=MLP, draft_vocab_size=U,
        target_vocab_size=V, context=512, rope_theta=500.0, norm_eps=1e-5, depth=depth, target_fingerprint="f" * 64,
        tokenizer_sha256="t" * 64, template_sha256="c" * 64, vocab_coverage=0.75, training={"steps": 7},
    )  # fmt: skip
    write_random_draft(directory, replace(config, **changes))
    return directory


# A configuration as their documentation and published drafts have it, written by hand.
BY_HAND: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": E,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "vocab_size": V,
    },
    "draft_vocab_size": U,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 14, 25],
    "tie_word_embeddings": False,
}


def foreign_tensors(*, taps: int = 3, first: str = "layers.0.") -> dict[str, Any]:
    draw = np.random.default_rng(8)
    ids = np.sort(draw.choice(V, U, replace=False)).astype(np.int64)

    def matrix(rows: int, columns: int) -> Floats:
        drawn = np.asarray(draw.standard_normal((rows, columns)) / np.sqrt(columns), np.float16)
        return drawn.astype(np.float32)

    def norm(size: int) -> Floats:
        return draw.uniform(0.5, 1.5, size).astype(np.float16).astype(np.float32)

    return {
        "fc.weight": matrix(E, taps * E),
        "norm.weight": norm(E),
        "lm_head.weight": matrix(U, E),
        "d2t": ids - np.arange(U),
        "t2d": np.isin(np.arange(V), ids),
        f"{first}input_layernorm.weight": norm(E),
        f"{first}hidden_norm.weight": norm(E),
        f"{first}post_attention_layernorm.weight": norm(E),
        f"{first}self_attn.q_proj.weight": matrix(HEADS * D, 2 * E),
        f"{first}self_attn.k_proj.weight": matrix(KV * D, 2 * E),
        f"{first}self_attn.v_proj.weight": matrix(KV * D, 2 * E),
        f"{first}self_attn.o_proj.weight": matrix(E, HEADS * D),
        f"{first}mlp.gate_proj.weight": matrix(MLP, E),
        f"{first}mlp.up_proj.weight": matrix(MLP, E),
        f"{first}mlp.down_proj.weight": matrix(E, MLP),
    }


def write_foreign(directory: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def by_hand(weights: dict[str, Any], states: Floats, tokens: NDArray[np.int64], first: str) -> tuple[Floats, Floats]:
    """EAGLE-3's forward in numpy, from the other tool's weights: states [T, 3E] and next tokens [T], causal."""

    def w(name: str) -> Floats:
        value: Floats = weights[f"{first}{name}.weight"]
        return value

    def norm(x: Floats, weight: Floats) -> Floats:
        return np.asarray(x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * weight, np.float32)

    length = len(tokens)
    hidden = states @ weights["fc.weight"].T
    both = np.concatenate(
        [norm(TABLE[tokens], w("input_layernorm")), norm(hidden, w("hidden_norm"))], -1
    )  # shape: [T, 2E]
    angles = np.arange(length)[:, None] * 500.0 ** (-np.arange(0, D, 2) / D)
    cos, sin = np.cos(angles), np.sin(angles)

    def turned(x: Floats) -> Floats:
        left, right = x[:, : D // 2], x[:, D // 2 :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1, dtype=np.float32)

    attended = np.zeros((length, HEADS * D), np.float32)
    for head in range(HEADS):
        own, shared = slice(head * D, (head + 1) * D), head // (HEADS // KV)
        pair = slice(shared * D, (shared + 1) * D)
        query = turned(both @ w("self_attn.q_proj")[own].T)
        key = turned(both @ w("self_attn.k_proj")[pair].T)
        scores = query @ key.T / np.sqrt(D)
        scores[np.triu_indices(length, 1)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        attended[:, own] = share @ (both @ w("self_attn.v_proj")[pair].T)
    hidden = hidden + attended @ w("self_attn.o_proj").T
    normed = norm(hidden, w("post_attention_layernorm"))
    gate = normed @ w("mlp.gate_proj").T
    hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return norm(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T, hidden


@pytest.mark.parametrize("first", ["layers.0.", "midlayer."])
def test_an_imported_draft_gives_the_logits_of_the_layout(tmp_path: Path, first: str) -> None:
    weights = foreign_tensors(first=first)
    found = import_draft(write_foreign(tmp_path / "theirs", BY_HAND, weights), target())
    save_draft(tmp_path / "ours", found.config, found.tensors, found.draft_to_target_ids)
    loaded = load_draft(tmp_path / "ours")
    network = DraftNetwork(loaded.config, torch.from_numpy(TABLE))
    network.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in loaded.tensors.items()})
    draw = np.random.default_rng(2)
    states = draw.standard_normal((7, 3 * E)).astype(np.float32)
    tokens = draw.integers(0, V, 7)
    with torch.no_grad():
        logits, next_states = network.forward_step(
            network.project(torch.from_numpy(states))[None], torch.from_numpy(tokens)[None], torch.arange(7)[None]
        )
    expected, hidden = by_hand(weights, states, tokens, first)
    np.testing.assert_allclose(logits[0].numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(next_states[0].numpy(), hidden, atol=2e-5)
    assert found.config.selection.taps == (2, 14, 25)
    assert (found.config.rope_theta, found.config.norm_eps, found.config.context) == (500.0, 1e-5, 512)


def test_offsets_become_absolute_ids(tmp_path: Path) -> None:
    weights = foreign_tensors()
    ids = np.array([*range(5), *range(50, 85)], dtype=np.int64)
    weights |= {"d2t": np.array([0] * 5 + [45] * 35, dtype=np.int64), "t2d": np.isin(np.arange(V), ids)}
    found = import_draft(write_foreign(tmp_path / "a", BY_HAND, weights), target())
    assert found.draft_to_target_ids.tolist() == ids.tolist()
    turned = ids[::-1]
    weights["d2t"] = np.ascontiguousarray(turned - np.arange(U))
    other = import_draft(write_foreign(tmp_path / "b", BY_HAND, weights), target())
    assert other.draft_to_target_ids.tolist() == ids.tolist()
    np.testing.assert_array_equal(other.tensors["head.weight"], weights["lm_head.weight"][::-1])


@pytest.mark.parametrize(
    ("layout", "taps", "ids"),
    [
        ("speculators", (2, 14, 25), (2, 14, 25)),  # EAGLE's {2, n/2, n-3} of 28 blocks
        ("specforge", (2, 14, 25), (1, 13, 24)),  # the same states as outputs of blocks: {1, n/2-1, n-4}
        ("openvino", (2, 14, 25), (1, 13, 24)),
        ("speculators", (0, 28), (0, 28)),  # the embeddings, and the state after the last block
        ("specforge", (1, 28, 5), (0, 27, 4)),
    ],
)
def test_numbers_of_the_states(layout: str, taps: tuple[int, ...], ids: tuple[int, ...]) -> None:
    assert tuple(LAYOUTS[layout].layer_id(tap) for tap in taps) == ids
    assert tuple(LAYOUTS[layout].tap(number) for number in ids) == taps


def test_without_ids_the_states_are_eagles(tmp_path: Path) -> None:
    assert default_taps(28) == (2, 14, 25) and default_taps(36) == (2, 18, 33)
    flat = {**BY_HAND["transformer_layer_config"], "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U}
    weights = foreign_tensors(first="midlayer.")
    found = import_draft(write_foreign(tmp_path / "none", flat, weights), target())
    assert found.config.selection.taps == (2, 14, 25) and "names no states" in found.notes[0]
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 13, 24], "use_aux_hidden_state": True}
    named = import_draft(write_foreign(tmp_path / "named", flat, weights), target())
    assert (named.layout, named.config.selection.taps, named.notes) == ("specforge", (2, 14, 25), ())
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(tensor, named.tensors[name])


def test_states_in_another_order_are_sorted_with_their_columns(tmp_path: Path) -> None:
    weights = foreign_tensors(taps=2)
    config = {**BY_HAND, "eagle_aux_hidden_state_layer_ids": [20, 3]}
    found = import_draft(write_foreign(tmp_path / "a", config, weights), target())
    assert found.config.selection.taps == (3, 20)
    fc = weights["fc.weight"]
    np.testing.assert_array_equal(found.tensors["projection.weight"], np.concatenate([fc[:, E:], fc[:, :E]], 1))
    given = import_draft(tmp_path / "a", target(), taps=(4, 20))
    assert given.config.selection.taps == (4, 20)
    np.testing.assert_array_equal(given.tensors["projection.weight"], fc)


@pytest.mark.parametrize(
    ("layout", "taps", "depth"),
    [
        ("speculators", (27,), 1),
        ("speculators", (0, 3, 9, 28), 2),
        ("specforge", (2, 14, 25), 1),
        ("openvino", (1, 2, 28), 1),
    ],
)
def test_a_round_trip_is_bit_for_bit(tmp_path: Path, layout: str, taps: tuple[int, ...], depth: int) -> None:
    ours = our_draft(tmp_path / "ours", *taps, depth=depth)
    export_draft(load_draft(ours), tmp_path / "theirs", LAYOUTS[layout], target())
    for keep in (True, False):
        if not keep:
            (tmp_path / "theirs" / "elsi-edge.json").unlink()
        found = import_draft(tmp_path / "theirs", target())
        assert (found.layout, found.notes) == (layout, ())
        back = tmp_path / f"back-{keep}"
        config = save_draft(back, found.config, found.tensors, found.draft_to_target_ids)
        assert (back / "draft.safetensors").read_bytes() == (ours / "draft.safetensors").read_bytes()
        assert config.selection.taps == taps and config.depth == depth
        if keep:
            assert (back / "draft.json").read_bytes() == (ours / "draft.json").read_bytes()
    export_draft(load_draft(tmp_path / "back-False"), tmp_path / "again", LAYOUTS[layout], target())
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "theirs" / "config.json").read_bytes()


def test_an_export_has_their_names_shapes_and_settings(tmp_path: Path) -> None:
    ours = our_draft(tmp_path / "ours", 3, 9)
    export_draft(load_draft(ours), tmp_path / "theirs", LAYOUTS["speculators"], target())
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    expected = foreign_tensors(taps=2)
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert (weights["d2t"].dtype, weights["t2d"].dtype, int(weights["t2d"].sum())) == (np.int64, np.bool_, U)
    ids = load_draft(ours).draft_to_target_ids
    assert (weights["d2t"] + np.arange(U)).tolist() == ids.tolist() == np.flatnonzero(weights["t2d"]).tolist()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["speculators_model_type"], config["norm_before_residual"]) == ("eagle3", False)
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (U, E)
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 9]
    block, wanted = config["transformer_layer_config"], dict(BY_HAND["transformer_layer_config"])
    assert block["rope_theta"] == wanted.pop("rope_parameters")["rope_theta"]
    assert block == {**block, **wanted}


def _bf16(directory: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file as save_torch

    save_torch(
        {
            name: torch.from_numpy(value).to(torch.bfloat16) if value.dtype == np.float32 else torch.from_numpy(value)
            for name, value in tensors.items()
        },
        directory / "model.safetensors",
    )


def test_bfloat16_weights_and_the_targets_own_table(tmp_path: Path) -> None:
    weights = foreign_tensors()
    directory = write_foreign(tmp_path / "a", BY_HAND, weights)
    _bf16(directory, {**weights, "embed_tokens.weight": TABLE})
    found = import_draft(directory, target())
    rounded = torch.from_numpy(weights["norm.weight"]).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found.tensors["final_norm.weight"], rounded)
    with pytest.raises(DraftError, match="embeddings of its own"):
        import_draft(directory, target(TABLE[::-1].copy()))
    assert "was not found" in import_draft(directory, target(None)).notes[0]


def _with(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(config: dict[str, Any], _: dict[str, Any]) -> None:
        for name, value in changes.items():
            place = config["transformer_layer_config"] if name in config["transformer_layer_config"] else config
            place[name] = value

    return change


def _block(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, _: config["transformer_layer_config"].update(changes)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_with(norm_before_residual=True), ("norm_before_residual is True", "norm_before_residual false")),
        (_with(norm_before_fc=True), ("norm_before_fc is True",)),
        (_with(speculators_model_type="eagle"), ("'eagle'", "'eagle3'")),
        (_block(model_type="qwen3"), ("model_type is 'qwen3'", "'llama'")),
        (_block(hidden_act="gelu"), ("'gelu'", "'silu'")),
        (_block(attention_bias=True), ("attention_bias",)),
        (_block(rope_scaling={"rope_type": "llama3", "factor": 8.0}), ("rope_scaling", "'llama3'")),
        (_block(num_hidden_layers=3), ("num_hidden_layers is 3", "1 to 2")),
        (_block(head_dim="8"), ("head_dim is '8'",)),
        (_with(hidden_size=64), ("hidden_size is 64", "has 32")),
        (_with(vocab_size=91), ("vocab_size is 91", "has 90")),
        (_with(target_hidden_size=64), ("target_hidden_size is 64", "has 32")),
        (_with(eagle_aux_hidden_state_layer_ids=[2, 14]), ("96 columns", "make 64", "--taps")),
        (_with(eagle_aux_hidden_state_layer_ids=[2, 14, 29]), ("[2, 14, 29]", "0..28")),
        (_with(eagle_aux_hidden_state_layer_ids=[2, 2, 9]), ("[2, 2, 9]",)),
        (_with(draft_vocab_size=41), ("d2t is [40]", "41")),
        (lambda _, w: w.pop("d2t"), ("d2t is missing", "40", "90")),
        (lambda _, w: w.update(d2t=w["d2t"] + np.arange(U)), ("offsets",)),
        (lambda _, w: w.update(t2d=np.roll(w["t2d"], 1)), ("t2d marks 40 of 90",)),
        (lambda _, w: w.pop("norm.weight"), ("lacks the weight 'norm.weight'",)),
        (lambda _, w: w.update({"layers.0.self_attn.q_norm.weight": np.ones(D)}), ("q_norm", "no place")),
        (lambda _, w: w.update({"lm_head.weight": np.ones((U, E + 1))}), ("'lm_head.weight' is [40, 33]", "[40, 32]")),
        (lambda _, w: w.update({"norm.weight": np.ones(E, np.int8)}), ("'norm.weight' is I8",)),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], parts: tuple[str, ...]
) -> None:
    config, weights = json.loads(json.dumps(BY_HAND)), foreign_tensors()
    change(config, weights)
    with pytest.raises(DraftError) as caught:
        import_draft(write_foreign(tmp_path / "a", config, weights), target())
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_ids_that_tools_count_differently_are_asked_for(tmp_path: Path) -> None:
    flat = {
        **BY_HAND["transformer_layer_config"], "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U,
        "eagle_aux_hidden_state_layer_ids": [1, 13, 24],
    }  # fmt: skip
    directory = write_foreign(tmp_path / "a", flat, foreign_tensors(first="midlayer."))
    with pytest.raises(DraftError, match=r"\[1, 13, 24\].*--taps"):
        import_draft(directory, target())
    assert import_draft(directory, target(), taps=(2, 14, 25)).config.selection.taps == (2, 14, 25)


@pytest.mark.parametrize(
    ("layout", "taps", "changes", "error", "parts"),
    [
        ("specforge", (27,), {}, DraftError, ("exactly 3 taps", "sees 1")),
        ("openvino", (1, 2), {}, DraftError, ("exactly 3 taps", "sees 2")),
        ("specforge", (0, 1, 2), {}, SelectionError, ("tap 0", "'specforge'")),
        ("specforge", (1, 2, 3), {"depth": 2}, DraftError, ("2 blocks", "room for 1")),
        ("speculators", (1,), {"width": 16, "target_width": E}, DraftError, ("16 wide", "32")),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, layout: str, taps: tuple[int, ...], changes: Any, error: type[ElsiError], parts: tuple[str, ...]
) -> None:
    draft = load_draft(our_draft(tmp_path / "ours", *taps, **changes))
    with pytest.raises(error) as caught:
        export_draft(draft, tmp_path / "theirs", LAYOUTS[layout], target())
    assert not (tmp_path / "theirs").exists()
    for part in parts:
        assert part in str(caught.value)


def test_a_final_norm_draft_has_no_number(tmp_path: Path) -> None:
    draft = load_draft(our_draft(tmp_path / "ours", BLOCKS))
    selection = replace(draft.config.selection, state="final-norm")
    with pytest.raises(DraftError, match="after the final norm"):
        export_draft(
            replace(draft, config=replace(draft.config, selection=selection)), tmp_path / "out",
            LAYOUTS["speculators"], target(),
        )  # fmt: skip


def test_provenance_of_another_target_or_other_weights(tmp_path: Path) -> None:
    ours = our_draft(tmp_path / "ours", 3)
    theirs = tmp_path / "theirs"
    export_draft(load_draft(ours), theirs, LAYOUTS["speculators"], target())
    with pytest.raises(DraftError, match="trained for the target ffffffffffff, the model given is 000000000000"):
        import_draft(theirs, replace(target(), fingerprint="0" * 64))
    weights = load_file(theirs / "model.safetensors")
    weights["norm.weight"] = weights["norm.weight"] + np.float16(1)
    save_file(weights, theirs / "model.safetensors")
    found = import_draft(theirs, target())
    assert "other weights" in found.notes[0] and "imported" in found.config.training


# --- the command line


def test_export_and_import_by_command(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    done = run("draft", "export", tiny_model.model, "--draft", tiny_model.draft, "--out", theirs, "--json")
    assert (done.code, done.json["layer_ids"], done.json["taps"]) == (0, [1], [1]), done.err
    assert "vllm serve" in done.err
    again = run("draft", "export", tiny_model.model, "--draft", tiny_model.draft, "--out", theirs)
    one_line(again, 1, "exists already", "--force")
    done = run("draft", "import", tiny_model.model, theirs, "--out", back)
    assert done.code == 0 and "sees tap 1, says 128 of 300 tokens" in done.out, done.err
    assert f"--draft {back} --layers 1" in done.err
    assert (back / "draft.safetensors").read_bytes() == (tiny_model.draft / "draft.safetensors").read_bytes()
    one_line(run("draft", "import", tiny_model.model, theirs, "--out", back), 1, "holds a draft already", "--force")
    shown = run("inspect", back, "--json").json
    assert shown["kind"] == "draft"
    done = run("draft", "export", tiny_model.model, "--draft", tiny_model.draft, "--format", "specforge")
    one_line(done, 1, "exactly 3 taps", "sees 1")


def test_a_hub_id_offline_is_one_clear_line(run: Run, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name, model = "no-one/no-such-draft", tiny_model.model
    for command in (
        ("export", model, "--draft", name),
        ("draft", "export", model, "--draft", name),
        ("draft", "import", model, name),
    ):
        one_line(run(*command), 1, name, "HF_HUB_OFFLINE")
    one_line(run("draft", "import", tiny_model.model, "nowhere"), 1, "nowhere holds no draft")


def test_a_hub_draft_is_exported(run: Run, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elsi_edge.hub.snapshot", lambda repo: tiny_model.draft)
    done = run("draft", "export", tiny_model.model, "--draft", "owner/draft", "--json")
    assert done.code == 0 and done.json["taps"] == [1], done.err


def test_a_foreign_draft_given_to_export_says_how_to_import_it(run: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    theirs = write_foreign(tmp_path / "theirs", BY_HAND, foreign_tensors())
    done = run("export", tiny_model.model, "--draft", theirs)
    one_line(done, 1, "elsi-edge draft import", str(theirs))


def test_every_weight_of_ours_has_a_place_in_theirs() -> None:
    from elsi_edge.draft.layouts.spec import expected_shapes

    config = DraftConfig(
        selection=LayerSelection(taps=(1, 2), method="explicit", blocks=BLOCKS), width=E, heads=HEADS, kv_heads=KV,
        head_width=D, mlp_width=MLP, draft_vocab_size=U, target_vocab_size=V, context=9, rope_theta=1.0, norm_eps=1e-5,
        depth=2,
    )  # fmt: skip
    ours = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
    assert ours == sum(int(np.prod(shape)) for shape in expected_shapes(config, LAYOUTS["speculators"]).values())
