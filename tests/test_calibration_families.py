"""Taps, final states and predictions of model families against forward passes written by hand; what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.calibration import capture, head
from elsi_edge.errors import ModelError
from tests import forward_by_hand as by_hand
from tests.forward_by_hand import Floats, Pass, Weights

torch = pytest.importorskip("torch")

TOLERANCE = 2e-4  # float32 against float64
FELT = 20 * TOLERANCE  # what a fault must change at least, to be found
PROMPTS = [[7, 8, 9, 90, 30], [60], [100, 2, 4, 90, 91, 92, 93, 94, 95, 110, 11, 2, 5, 77], [12, 13]]

WIDE: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
GPT2: dict[str, Any] = {
    "vocab_size": 120,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 32,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Family: its forward pass, its configuration, and changes to the latter alone that its forward pass must feel.
FAMILIES: dict[str, tuple[Callable[..., Pass], dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (by_hand.llama, {**WIDE, "head_dim": 16, "mlp_bias": True, "attention_bias": True}, [{"rope_theta": 1e4}]),
    "mistral": (
        by_hand.mistral,
        {**WIDE, "head_dim": 24, "sliding_window": 4},
        [{"sliding_window": 5}, {"sliding_window": 3}, {"sliding_window": None}],
    ),
    "qwen2": (by_hand.llama, {**WIDE, "head_dim": 16, "tie_word_embeddings": True}, [{"rope_theta": 1e4}]),
    "qwen3": (by_hand.qwen3, {**WIDE, "head_dim": 32}, [{"rope_theta": 1e4}, {"rms_norm_eps": 0.1}]),
    "gemma3_text": (
        by_hand.gemma3,
        {
            **{key: value for key, value in WIDE.items() if key != "rope_theta"},
            "head_dim": 24,
            "sliding_window": 4,
            "layer_types": KINDS,
            "rope_parameters": ROPES,
            "query_pre_attn_scalar": 60,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
        [
            {"sliding_window": None},
            {"layer_types": KINDS[1:] + KINDS[:1]},
            {"query_pre_attn_scalar": 24},
            {"final_logit_softcapping": 1e9},
            {"rope_parameters": dict.fromkeys(ROPES, ROPES["full_attention"])},
        ],
    ),
    "phi3": (
        by_hand.phi3,
        {**WIDE, "partial_rotary_factor": 0.5, "sliding_window": None},
        [{"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25}],
    ),
    "smollm3": (
        by_hand.smollm3,
        {**WIDE, "no_rope_layers": [1, 0, 1], "use_sliding_window": False, "tie_word_embeddings": True},
        [{"no_rope_layers": [1, 1, 1]}, {"no_rope_layers": [0, 1, 1]}],
    ),
    "gpt_neox": (
        by_hand.gpt_neox,
        {
            **{key: value for key, value in WIDE.items() if key not in ("rope_theta", "rms_norm_eps")},
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": False,
        },
        [{"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}}],
    ),
    "gpt2": (by_hand.gpt2, GPT2, [{"layer_norm_epsilon": 0.3}]),
}


def tiny(family: str, config: dict[str, Any], *, dtype: Any = torch.float32, seed: int = 5) -> Any:
    """A seeded random model: matrices of unit gain, norms and biases far from ones and zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                mean = 0.0 if "bias" in name or "gemma3" in family else 1.0
                weight.normal_(mean, 0.3)
            else:
                weight.normal_(0.0, 0.5 if "embed" in name or "wpe" in name else weight.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def weights_of(model: Any) -> Weights:
    """By name, float64."""
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def gap(found: Any, wanted: Floats) -> float:
    """The largest difference."""
    return float(np.abs(found - wanted).max())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small wait for threads more than they compute."""
    with capture.torch_threads(1):
        yield


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_against_its_forward_pass_by_hand(family: str) -> None:
    forward, config, _ = FAMILIES[family]
    model = tiny(family, config)
    weights = weights_of(model)
    found = {prompt.index: prompt for prompt in capture.capture(model, PROMPTS, blocks=3)}
    for index, ids in enumerate(PROMPTS):
        wanted, got = forward(ids, config, weights), found[index]
        assert got.states.shape == (4, len(ids), 64) and got.states.dtype == np.float32
        assert got.argmax.dtype == np.int64 and got.entropy.dtype == np.float32
        for tap in range(4):  # near its own tap alone: neither a neighbour nor, for the last, the state after the norm
            assert gap(got.states[tap], wanted.taps[tap]) < TOLERANCE
            others = [wanted.taps[other] for other in range(4) if other != tap] + [wanted.final_norm]
            assert min(gap(got.states[tap], other) for other in others) > 0.1
        assert gap(got.final_norm, wanted.final_norm) < TOLERANCE
        assert gap(got.entropy, wanted.entropy) < TOLERANCE
        np.testing.assert_array_equal(got.argmax, wanted.argmax)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_weight_and_number_matters(family: str) -> None:
    """Else the test above would pass for a forward pass that forgets it."""
    forward, config, changes = FAMILIES[family]
    ids, weights = PROMPTS[2], weights_of(tiny(family, config))
    wanted = forward(ids, config, weights)

    def felt(other: Pass) -> float:
        return max(
            gap(other.taps, wanted.taps), gap(other.final_norm, wanted.final_norm), gap(other.entropy, wanted.entropy)
        )

    for name in weights:
        without = {**weights, name: np.zeros_like(weights[name])}
        assert felt(forward(ids, config, without)) > FELT, name
    for change in changes:
        assert felt(forward(ids, {**config, **change}, weights)) > FELT, change


OTHERS: dict[str, dict[str, Any]] = {
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 1.5, "sliding_window": 4},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "bloom": {"n_layer": 3, "n_head": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_other_ordinary_stacks_work(family: str) -> None:
    """Against transformers' own states, which end after the norm, and its whole logits."""
    model = tiny(family, {**WIDE, **OTHERS[family]})
    assert head.open_head(model, [5, 6, 7]) is not None  # no need for whole logits
    stack = capture.find_stack(model)
    for prompt in capture.capture(model, PROMPTS, blocks=3):
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([PROMPTS[prompt.index]]), output_hidden_states=True)
            after = stack.final_norm(torch.from_numpy(prompt.states[3])[None])[0]
            entropy = torch.distributions.Categorical(logits=wanted.logits[0].double()).entropy()
        for tap in range(3):
            assert gap(prompt.states[tap], wanted.hidden_states[tap][0].numpy()) < TOLERANCE
        assert gap(prompt.final_norm, wanted.hidden_states[3][0].numpy()) < TOLERANCE
        assert gap(prompt.final_norm, after.numpy()) < TOLERANCE
        assert gap(prompt.entropy, entropy.numpy()) < TOLERANCE
        np.testing.assert_array_equal(prompt.argmax, wanted.logits[0].argmax(-1).numpy())


def test_the_text_part_of_a_vision_language_model_works() -> None:
    """Its vision tower has more blocks, but none of them is called."""
    text = {key: value for key, value in FAMILIES["gemma3_text"][1].items() if key != "tie_word_embeddings"}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    image = {"mm_tokens_per_image": 4, "image_token_index": 119, "boi_token_index": 118, "eoi_token_index": 117}
    config = {"text_config": text, "vision_config": {**vision, "num_hidden_layers": 6}, **image}
    model = tiny("gemma3", config)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    stack = capture.find_stack(model)
    assert stack.blocks == tuple(model.model.language_model.layers)
    assert stack.final_norm is model.model.language_model.norm
    named = {name.replace("model.language_model.", "model."): w for name, w in weights_of(model).items()}
    found = next(capture.capture(model, PROMPTS[2:3], blocks=3))
    # This class leaves the soft-cap out that the text model alone has.
    wanted = by_hand.gemma3(PROMPTS[2], {**text, "final_logit_softcapping": 1e9}, named)
    assert gap(found.states, wanted.taps) < TOLERANCE and gap(found.final_norm, wanted.final_norm) < TOLERANCE
    assert gap(found.entropy, wanted.entropy) < TOLERANCE


def test_bfloat16_states_beyond_the_range_of_float16() -> None:
    """As Gemma 3's are: a coordinate planted in one token's embedding."""
    _, config, _ = FAMILIES["gemma3_text"]
    model = tiny("gemma3_text", config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[90, 3] = 30_000.0
    found = next(capture.capture(model, [PROMPTS[0]]))
    row = PROMPTS[0].index(90)
    assert found.states.dtype == np.float32
    assert np.isfinite(found.states).all() and np.isfinite(found.final_norm).all() and np.isfinite(found.entropy).all()
    assert found.states[:, row, 3].min() > 200_000.0


def test_a_model_that_looks_ahead_is_refused() -> None:
    """Padding on the right would change what it says."""
    _, config, _ = FAMILIES["gemma3_text"]
    model = tiny("gemma3_text", {**config, "use_bidirectional_attention": True})
    with pytest.raises(ModelError, match="Gemma3ForCausalLM: a later token changes earlier predictions"):
        next(capture.capture(model, PROMPTS))


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        (
            "opt",
            {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
            "OPTForCausalLM: no final norm found .* its 3 blocks and the output head; a Linear with matrices stands",
        ),
        ("gpt2", {}, "GPT2LMHeadModel: no output head found"),
        ("llama", {}, "LlamaForCausalLM: a forward pass over token ids alone fails: images are needed"),
    ],
)
def test_a_missing_part_is_named(
    family: str, config: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, {**WIDE, **config})
    if family == "gpt2":
        monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    if family == "llama":

        def refuse(*args: Any, **options: Any) -> None:
            raise ValueError("images\nare needed")

        monkeypatch.setattr(model.model, "forward", refuse)
    with pytest.raises(ModelError, match=message) as error:
        capture.find_stack(model)
    assert "\n" not in str(error.value)


RECURRENT = """bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 minimax nemotron_h qwen3_next
recurrent_gemma rwkv xlstm zamba zamba2"""


@pytest.mark.parametrize("family", RECURRENT.split())
def test_recurrent_and_hybrid_models_are_refused(family: str, tmp_path: Path) -> None:
    """From the configuration alone: there are no weights here."""
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{family} .*; recurrent and hybrid models are not supported") as error:
        capture.load_target(tmp_path)
    assert "\n" not in str(error.value)
