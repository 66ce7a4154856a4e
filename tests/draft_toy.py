"""A planted target for the draft's tests: the next token is a fixed function of the last one, in numpy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elsi_edge.artifacts import LayerSelection, ModelShape, PromptRow, TargetStates

V, E, BLOCKS = 64, 16, 4
EOS, START, ASSISTANT = 60, 61, 62  # end token and the tokens of the chat template
SHAPE = ModelShape(
    family="llama",
    blocks=BLOCKS,
    width=E,
    heads=4,
    kv_heads=2,
    head_width=4,
    mlp_width=24,
    vocab_size=V,
    context=256,
    tied_embeddings=False,
    rope_theta=10000.0,
    norm_eps=1e-5,
)


def following(token: int) -> int:
    """The planted next token; walks through 40 ids before it repeats."""
    return (token + 7) % 40


class ToyRunner:
    """Gives a sharp distribution at `following(token)` and states that tell the tokens apart."""

    def __init__(self, fingerprint: str = "toy", *, scale: float = 1.0) -> None:
        self.fingerprint = fingerprint
        self.shape = SHAPE
        self.table = np.random.default_rng(0).standard_normal((BLOCKS + 1, V, E)).astype(np.float32) * scale
        self.calls = 0
        self.fail_after: int | None = None

    def answer(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        ids: list[int] = []
        last = prompt_ids[-2] if temperature == 0 else (prompt_ids[-2] + seed) % 40
        while len(ids) < max_tokens:
            last = following(last)
            ids.append(last)
        return ids

    def states(self, token_ids: Sequence[int], taps: Sequence[int]) -> TargetStates:
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise KeyboardInterrupt
        logits = np.zeros((len(token_ids), V), np.float32)
        logits[np.arange(len(token_ids)), [following(token) for token in token_ids]] = 8.0
        ids = np.array(token_ids)
        return TargetStates(states=np.stack([self.table[tap][ids] for tap in taps]), logits=logits)


class ToyCodec:
    """Numbers separated by spaces; `START` before and `ASSISTANT` after a prompt."""

    has_template = True
    eos_ids = frozenset({EOS})
    template_sha256 = "template"
    tokenizer_sha256 = "tokenizer"

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [START, *self.encode_raw(messages[0]["content"]), ASSISTANT]

    def encode_raw(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if word.isdigit()]


def prompts(count: int, length: int = 3) -> list[PromptRow]:
    """Prompts of random numbers."""
    generator = np.random.default_rng(1)
    return [PromptRow(id=f"p{i}", turns=(" ".join(map(str, generator.integers(0, 40, length))),)) for i in range(count)]


def selection(*taps: int) -> LayerSelection:
    """An explicit selection of the toy target."""
    return LayerSelection(taps=taps or (2,), method="explicit", blocks=BLOCKS, width=E, model="toy")


def write_model(directory: Path, **changes: Any) -> Path:
    """A random transformers model of the toy's shape, for embeddings and warm start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=E,
        num_hidden_layers=BLOCKS,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_width,
        intermediate_size=SHAPE.mlp_width,
        vocab_size=V,
        max_position_embeddings=SHAPE.context,
        tie_word_embeddings=False,
        **changes,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
