"""Tap capture against a forward pass written by hand, batching, and the models that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.calibration import capture
from elsi_edge.errors import DataError, ModelError
from tests.tiny_text import CONFIG, llama_weights, write_model_dir

torch = pytest.importorskip("torch")

Floats = NDArray[np.float64]
SMALL: dict[str, Any] = {**CONFIG, "num_hidden_layers": 3}


def weights(config: dict[str, Any] = SMALL) -> dict[str, NDArray[np.float32]]:
    """Random, tame enough for float32 to be exact to 1e-4."""
    found = llama_weights(config, seed=4)
    return {
        name: (1.0 + 0.1 * w if w.ndim == 1 else w / np.sqrt(w.shape[1])).astype(np.float32)
        for name, w in found.items()
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("capture") / "tiny", config=SMALL, weights=weights())


def rms(x: Floats, gain: NDArray[np.float32]) -> Floats:
    scaled: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + SMALL["rms_norm_eps"]) * gain
    return scaled


def rotate(x: Floats) -> Floats:
    """Rotary embedding of [T, heads, D], halves of the head paired."""
    length, _, width = x.shape
    angles = np.arange(length)[:, None] / SMALL["rope_theta"] ** (np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = x[..., : width // 2], x[..., width // 2 :]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attend(x: Floats, w: dict[str, NDArray[np.float32]], at: str) -> Floats:
    length, groups, head = len(x), SMALL["num_attention_heads"] // SMALL["num_key_value_heads"], SMALL["head_dim"]
    q, k, v = ((x @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(length, -1, head) for n in "qkv")
    q, k, v = rotate(q), rotate(k).repeat(groups, axis=1), v.repeat(groups, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(head) + np.triu(np.full((length, length), -np.inf), k=1)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("hts,shd->thd", p / p.sum(axis=-1, keepdims=True), v).reshape(length, -1)
    out: Floats = mixed @ w[f"{at}self_attn.o_proj.weight"].T
    return out


def by_hand(ids: list[int]) -> tuple[Floats, Floats, Floats]:
    """Taps 0..L [L + 1, T, E], the state after the final norm [T, E], the predictive entropy [T]."""
    w = weights()
    x = w["model.embed_tokens.weight"][ids].astype(np.float64)
    taps = [x]
    for block in range(SMALL["num_hidden_layers"]):
        at = f"model.layers.{block}."
        x = x + attend(rms(x, w[at + "input_layernorm.weight"]), w, at)
        h = rms(x, w[at + "post_attention_layernorm.weight"])
        gate = h @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
        taps.append(x)
    final = rms(x, w["model.norm.weight"])
    logits = final @ w["model.embed_tokens.weight"].T
    log_p = logits - logits.max(axis=-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    return np.stack(taps), final, -(np.exp(log_p) * log_p).sum(axis=-1)


PROMPTS = [[7, 8, 9, 250, 30], [60], [100, 2, 4, 90, 91, 92, 93, 94, 95, 110, 11], [12, 13]]


def test_taps_are_the_block_inputs(model_dir: Path) -> None:
    found = {p.index: p for p in capture.capture(capture.load_target(model_dir), PROMPTS, blocks=3)}
    assert sorted(found) == [0, 1, 2, 3]
    for index, ids in enumerate(PROMPTS):
        taps, final, entropy = by_hand(ids)
        assert found[index].states.shape == (4, len(ids), 64) and found[index].states.dtype == np.float32
        np.testing.assert_allclose(found[index].states, taps, atol=2e-4)
        np.testing.assert_allclose(found[index].final_norm, final, atol=2e-4)
        np.testing.assert_allclose(found[index].entropy, entropy, atol=2e-4)
        # each tap is told from its neighbours, and L from the state after the norm
        assert min(np.abs(taps[t + 1] - taps[t]).max() for t in range(3)) > 0.05
        assert np.abs(taps[3] - final).max() > 0.05


@pytest.mark.parametrize("batch_tokens", [1, 8, 10_000])
def test_batches_change_nothing_but_rounding(model_dir: Path, batch_tokens: int) -> None:
    model = capture.load_target(model_dir)
    alone = {p.index: p for ids in range(4) for p in capture.capture(model, PROMPTS, batch_tokens=1)}
    for prompt in capture.capture(model, PROMPTS, batch_tokens=batch_tokens):
        np.testing.assert_allclose(prompt.states, alone[prompt.index].states, atol=1e-5)
        np.testing.assert_allclose(prompt.entropy, alone[prompt.index].entropy, atol=1e-5)


def test_plan_batches() -> None:
    assert capture.plan_batches([5, 1, 11, 2], tokens=10) == [[1, 3], [0], [2]]
    assert capture.plan_batches([3, 3, 3, 3, 3], tokens=9) == [[0, 1, 2], [3, 4]]
    assert capture.plan_batches([], tokens=9) == []


def test_hooks_are_gone_afterwards(model_dir: Path) -> None:
    model = capture.load_target(model_dir)
    next(iter(capture.capture(model, PROMPTS)))  # abandoned half-way
    import gc

    gc.collect()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_empty_prompt_and_other_depth_are_refused(model_dir: Path) -> None:
    model = capture.load_target(model_dir)
    with pytest.raises(DataError, match="prompt 2 of 2 has no tokens"):
        next(capture.capture(model, [[1], []]))
    with pytest.raises(ModelError, match="3 decoder blocks are called, its configuration says 5"):
        next(capture.capture(model, PROMPTS, blocks=5))


def test_families_with_other_names_for_their_parts() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50, n_positions=32)).eval()
    stack = capture.find_stack(gpt2)
    assert stack.blocks == tuple(gpt2.transformer.h) and stack.final_norm is gpt2.transformer.ln_f
    config = GPTNeoXConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    neox = GPTNeoXForCausalLM(config).eval()
    stack = capture.find_stack(neox)
    assert stack.blocks == tuple(neox.gpt_neox.layers) and stack.final_norm is neox.gpt_neox.final_layer_norm
    prompt = next(capture.capture(neox, [[1, 2, 3]]))
    assert prompt.states.shape == (3, 3, 32)
    hidden = neox.gpt_neox(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(prompt.states[:2], torch.cat(hidden[:2]).detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(prompt.final_norm, hidden[2][0].detach().numpy(), atol=1e-5)


def test_recurrent_and_hybrid_models_are_refused(tmp_path: Path) -> None:
    from transformers import Lfm2Config, MambaConfig

    configs = {
        "mamba": (MambaConfig(num_hidden_layers=1), "mamba has .* blocks"),
        "lfm2": (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "lfm2 has conv blocks"),
    }
    for name, (config, message) in configs.items():
        config.save_pretrained(tmp_path / name)  # refused from the configuration, before any weights are read
        with pytest.raises(ModelError, match=message + "; recurrent and hybrid models are not supported") as error:
            capture.load_target(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_model_that_says_it_keeps_a_state_is_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_is_stateful", True)
    with pytest.raises(ModelError, match="llama keeps a recurrent state; recurrent and hybrid models are not"):
        capture.load_target(model_dir)


def test_unreadable_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model") as error:
        capture.load_target(tmp_path)
    assert "\n" not in str(error.value)


def test_no_stack_is_said() -> None:
    class Flat(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)

        def forward(self, input_ids: Any, use_cache: bool) -> Any:
            return self.embed(input_ids)

    with pytest.raises(ModelError, match="Flat: no stack of decoder blocks"):
        capture.find_stack(Flat())
