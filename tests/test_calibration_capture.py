"""Tap capture against a forward pass written by hand, batching, and the models that are refused."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elsi_edge.calibration import capture
from elsi_edge.errors import DataError, ModelError
from elsi_edge.weights import list_tensors
from tests.figures import random_model
from tests.forward_by_hand import Pass, llama
from tests.tiny_text import CONFIG, llama_weights, write_model_dir

torch = pytest.importorskip("torch")

SMALL: dict[str, Any] = {**CONFIG, "num_hidden_layers": 3}


def weights(config: dict[str, Any] = SMALL) -> dict[str, NDArray[np.float32]]:
    """Random, tame enough for float32 to be exact to 1e-4."""
    found = llama_weights(config, seed=4)
    return {
        name: (1.0 + 0.1 * w if w.ndim == 1 else w / np.sqrt(w.shape[1])).astype(np.float32)
        for name, w in found.items()
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small wait for threads more than they compute."""
    with capture.torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("capture") / "tiny", config=SMALL, weights=weights())


def by_hand(ids: list[int]) -> Pass:
    """What the directory's model does with one prompt."""
    named = {name: w.astype(np.float64) for name, w in weights().items()}
    return llama(ids, SMALL, {**named, "lm_head.weight": named["model.embed_tokens.weight"]})


PROMPTS = [[7, 8, 9, 250, 30], [60], [100, 2, 4, 90, 91, 92, 93, 94, 95, 110, 11], [12, 13]]


def test_taps_are_the_block_inputs(model_dir: Path) -> None:
    found = {p.index: p for p in capture.capture(capture.load_target(model_dir), PROMPTS, blocks=3)}
    assert sorted(found) == [0, 1, 2, 3]
    for index, ids in enumerate(PROMPTS):
        wanted = by_hand(ids)
        assert found[index].states.shape == (4, len(ids), 64) and found[index].states.dtype == np.float32
        np.testing.assert_allclose(found[index].states, wanted.taps, atol=2e-4)
        np.testing.assert_allclose(found[index].final_norm, wanted.final_norm, atol=2e-4)
        np.testing.assert_allclose(found[index].entropy, wanted.entropy, atol=2e-4)
        np.testing.assert_array_equal(found[index].argmax, wanted.argmax)


@pytest.mark.parametrize("batch_tokens", [1, 8, 10_000])
def test_batches_change_nothing_but_rounding(model_dir: Path, batch_tokens: int) -> None:
    model = capture.load_target(model_dir)
    alone = {p.index: p for p in capture.capture(model, PROMPTS, batch_tokens=1)}
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


def test_a_hybrid_by_the_kinds_of_its_blocks_is_refused(tmp_path: Path) -> None:
    from transformers import Lfm2Config

    Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="lfm2 has conv blocks; recurrent and hybrid models are not supported"):
        capture.load_target(tmp_path)


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


BRIEF: dict[str, Any] = {
    **{
        key: value
        for key, value in random_model.config("qwen3-150m").items()
        if key not in ("rope_theta", "torch_dtype")
    },
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
SPELLINGS: dict[str, dict[str, Any]] = {
    "top": {"rope_theta": 5000.0, "torch_dtype": "bfloat16"},
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "dtype": "bfloat16"},
    "neither": {"rope_theta": 5000.0},
    "other": {"rope_theta": 5000.0, "dtype": "float32"},
    "scaling": {"rope_theta": 5000.0, "rope_scaling": None},
}


def test_spellings_of_one_configuration_are_one_model(tmp_path: Path) -> None:
    """bfloat16 stays that, whatever config.json says of it, and the rotary base is found."""
    found: dict[str, capture.PromptStates] = {}
    for name, spelling in SPELLINGS.items():
        random_model.write(tmp_path / name, {**BRIEF, **spelling})
        model = capture.load_target(tmp_path / name)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        found[name] = next(capture.capture(model, [PROMPTS[2]]))
    for prompt in found.values():
        np.testing.assert_array_equal(prompt.states, found["top"].states)
        np.testing.assert_array_equal(prompt.entropy, found["top"].entropy)
    random_model.write(tmp_path / "far", {**BRIEF, "rope_theta": 500_000.0})
    far = next(capture.capture(capture.load_target(tmp_path / "far"), [PROMPTS[2]]))
    assert np.abs(far.states - found["top"].states).max() > 0.01


def test_float16_is_read_as_float32(model_dir: Path, tmp_path: Path) -> None:
    model = capture.load_target(model_dir)
    model.half().save_pretrained(tmp_path)  # type: ignore[operator]
    assert {ref.dtype for ref in list_tensors(tmp_path).values()} == {"F16"}
    loaded = capture.load_target(tmp_path)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}


_PEAK = """
import sys
from pathlib import Path
import torch, transformers.models.qwen3.modeling_qwen3
from elsi_edge.calibration import capture
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
torch.set_num_threads(1)
bare = peak()
model = capture.load_target(Path(sys.argv[1]))
loaded = peak()
next(capture.capture(model, [[1, 2, 3, 4]]))
print(bare, loaded, peak(), sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.slow
def test_weights_are_held_once(tmp_path: Path) -> None:
    """After a forward pass, which touches every weight: a second copy would be as large again."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    size = 2 * random_model.write(tmp_path, random_model.config("qwen3-150m"))
    done = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    bare, loaded, used, held = map(int, done.stdout.split())
    assert held == size
    assert loaded - bare < 1.1 * size
    assert used - bare < 1.3 * size  # a few tens of megabytes are torch itself, used for the first time
