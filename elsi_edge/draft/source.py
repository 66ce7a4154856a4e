"""What training takes from the source model: its embedding table, its final norm, and a warm start for the draft.

Read through transformers' own model, so any Llama-like family works; what does not fit is said and starts at random.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsi_edge.artifacts import DraftConfig, ModelShape
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.errors import ModelError
from elsi_edge.torch_model import load_causal_lm

_EMBEDDING_START = 0.02  # standard deviation of the embedding half of the fused qkv, times the state half's own


@dataclass(frozen=True, kw_only=True)
class SourceWeights:
    """Weights of the target, float32, without gradients."""

    embeddings: Tensor  # [at least V, E]
    final_norm: Tensor | None  # [E]
    head: Tensor  # [V, E]
    block: dict[str, Tensor]  # last block: q, k, v, o, gate, up, down, attention_norm, mlp_norm; only those that exist
    biases: tuple[str, ...] = ()  # those of them that add a bias, which a draft does not have


_PATHS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def read_source(directory: Path, shape: ModelShape) -> SourceWeights:
    """Load the source model once and keep what training needs. Raises ModelError, MissingExtraError."""
    model = load_causal_lm(directory, feature="training a draft", dtype=torch.float32)
    embeddings = model.get_input_embeddings().weight.detach().clone()
    output = model.get_output_embeddings()
    if output is None or embeddings.shape[1] != shape.width or output.weight.shape[0] < shape.vocab_size:
        found = "none" if output is None else list(output.weight.shape)
        raise ModelError(
            f"{directory}: embeddings {list(embeddings.shape)} and head {found} do not fit the shards' target "
            f"(width {shape.width}, vocabulary {shape.vocab_size}); give the model that the shards were made with"
        )
    decoder = model.get_decoder()
    last = decoder.layers[-1] if hasattr(decoder, "layers") else None
    block = {name: weight for name, path in _PATHS.items() if (weight := _weight(last, path)) is not None}
    biases = tuple(name for name, path in _PATHS.items() if _weight(last, path, "bias") is not None)
    return SourceWeights(
        embeddings=embeddings,
        final_norm=_weight(decoder, "norm"),
        head=output.weight.detach().clone(),
        block=block,
        biases=biases,
    )


@torch.no_grad()
def initialise(
    network: DraftNetwork, source: SourceWeights | None, draft_to_target_ids: Tensor, seed: int
) -> list[str]:
    """Give every weight its start; returns what could not be taken from the target and why, empty when all was.

    From the target: last block's q, k, v (state half of the fused qkv), o, MLP and norms, final norm, head rows; the
    projection is the identity on the last tap. The rest, or all without `source`, is random.
    """
    config = network.config
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if weight.ndim == 2:
            weight.copy_(torch.randn(weight.shape, generator=generator) * (2 / sum(weight.shape)) ** 0.5)
        elif not name.endswith("norm.weight"):
            weight.zero_()
    network.projection.weight.zero_()
    network.projection.weight[:, -config.width :] = torch.eye(config.width)
    if source is None:
        return []
    block = source.block
    refusals: list[str] = []
    if source.biases:
        refusals.append(f"biases of {', '.join(source.biases)}: the target's last block adds them, the draft has none")
    _start_qkv(network, block, generator, refusals)
    _copy(network.o.weight, block.get("o"), "o", refusals)
    _copy(network.state_norm.weight, block.get("attention_norm"), "attention norm", refusals)
    _copy(network.mlp_norm.weight, block.get("mlp_norm"), "MLP norm", refusals)
    for name in ("gate", "up", "down"):
        _copy(getattr(network, name).weight, block.get(name), name, refusals)
    _copy(network.final_norm.weight, source.final_norm, "final norm", refusals)
    _copy(network.head.weight, source.head[draft_to_target_ids], "head", refusals)
    return refusals


def _start_qkv(
    network: DraftNetwork, block: dict[str, Tensor], generator: torch.Generator, refusals: list[str]
) -> None:
    width = network.config.width
    parts = [block.get(name) for name in ("q", "k", "v")]
    fused = torch.cat([part for part in parts if part is not None]) if all(p is not None for p in parts) else None
    rows = network.query_size + 2 * network.kv_size
    if fused is None or fused.shape != (rows, width) or parts[0] is None or parts[0].shape[0] != network.query_size:
        _copy(network.qkv.weight[:, width:], fused, "q, k, v", refusals)
        return
    noise = torch.randn(rows, width, generator=generator)
    network.qkv.weight[:, width:] = fused
    network.qkv.weight[:, :width] = noise * float(fused.std()) * _EMBEDDING_START


def _copy(weight: Tensor, value: Tensor | None, name: str, refusals: list[str]) -> None:
    if value is None:
        refusals.append(f"{name}: the target's last block has none where Llama keeps it")
    elif value.shape != weight.shape:
        refusals.append(f"{name}: the target has {list(value.shape)}, the draft {list(weight.shape)}")
    else:
        weight.copy_(value)


def _weight(module: Any, path: str, name: str = "weight") -> Tensor | None:
    for part in path.split("."):
        module = getattr(module, part, None)
    weight = getattr(module, name, None)
    return weight.detach().clone() if isinstance(weight, Tensor) else None


def draft_config(shape: ModelShape, **structure: Any) -> DraftConfig:
    """A draft of the target's own shape; `structure` gives the selection, the vocabulary and the provenance."""
    return DraftConfig(
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        mlp_width=shape.mlp_width,
        target_vocab_size=shape.vocab_size,
        context=shape.context,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
        **structure,
    )
