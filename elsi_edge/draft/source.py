"""What training takes from the source model: its embedding table, its final norm, and a warm start for the draft.

Read through transformers' own model, so any Llama-like family works; what does not fit is said and starts at random.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elsi_edge.artifacts import DraftConfig, ModelShape
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.draft.network import Block, DraftNetwork
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.errors import ConfigError, DraftError, ModelError
from elsi_edge.torch_model import embedding_table, load_causal_lm

_HEAD_WIDTH = 16  # GroupQueryAttention with rotary embedding takes multiples of it
_WIDTH = 32  # weights per quantisation block
_EMBEDDING_START = 0.02  # standard deviation of the embedding half of the fused qkv, times the state half's own


@dataclass(frozen=True, kw_only=True)
class SourceWeights:
    """Weights of the target, float32, without gradients."""

    embeddings: Tensor  # [at least V, E], as they enter the target's first block: times its scale where it has one
    final_norm: Tensor | None  # [E]
    head: Tensor  # [V, E]
    blocks: tuple[dict[str, Tensor], ...]  # last two blocks, the very last at the end (see `_PATHS`); what exists
    biases: tuple[str, ...] = ()  # weights of the last block that add a bias, which a draft does not have
    others: tuple[str, ...] = ()  # what else its last block does and a draft does not, in words

    @property
    def block(self) -> dict[str, Tensor]:
        """The last block: q, k, v, o, gate, up, down, attention_norm, mlp_norm; only those that exist."""
        return self.blocks[-1]


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
# Gemma 3's blocks norm what each half yields besides; the norm before the MLP is another there, and gains are 1 + w.
_SANDWICH = "pre_feedforward_layernorm"
_GAIN_LESS_ONE = ("Gemma3RMSNorm",)


def read_source(directory: Path, shape: ModelShape) -> SourceWeights:
    """Load the source model once and keep what training needs. Raises ModelError, MissingExtraError."""
    model = load_causal_lm(directory, feature="training a draft", dtype=torch.float32)
    embeddings = embedding_table(model).clone()
    output = model.get_output_embeddings()
    if output is None or embeddings.shape[1] != shape.width or output.weight.shape[0] < shape.vocab_size:
        found = "none" if output is None else list(output.weight.shape)
        raise ModelError(
            f"{directory}: embeddings {list(embeddings.shape)} and head {found} do not fit the shards' target "
            f"(width {shape.width}, vocabulary {shape.vocab_size}); give the model that the shards were made with"
        )
    decoder = model.get_decoder()
    layers = list(decoder.layers)[-2:] if hasattr(decoder, "layers") else [None]
    blocks = tuple(
        {name: weight for name, path in _paths(layer).items() if (weight := _weight(layer, path)) is not None}
        for layer in layers
    )
    biases = tuple(name for name, path in _PATHS.items() if _weight(layers[-1], path, "bias") is not None)
    return SourceWeights(
        embeddings=embeddings,
        final_norm=_weight(decoder, "norm"),
        head=output.weight.detach().clone(),
        blocks=blocks,
        biases=biases,
        others=_others(layers[-1]),
    )


def _paths(layer: Any) -> dict[str, str]:
    return _PATHS | ({"mlp_norm": _SANDWICH} if hasattr(layer, _SANDWICH) else {})


def _others(layer: Any) -> tuple[str, ...]:
    if not hasattr(layer, _SANDWICH):
        return ()
    return ("norms after attention and MLP, and GELU: the target's last block has them, the draft has SiLU and none",)


@torch.no_grad()
def initialise(
    network: DraftNetwork, source: SourceWeights | None, draft_to_target_ids: Tensor, seed: int
) -> list[str]:
    """Give every weight its start; returns what could not be taken from the target and why, empty when all was.

    From the target: q, k, v (state half of the fused qkv), o, MLP and norms of its last block, or of its last two for
    two blocks; final norm, head rows; the projection is the identity on the last tap. A draft of another width than the
    target's starts from the target's head alone (see `_narrow`). The rest, or all without `source`, is random.
    """
    config = network.config
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if weight.ndim == 2:
            weight.copy_(torch.randn(weight.shape, generator=generator) * (2 / sum(weight.shape)) ** 0.5)
        elif not name.endswith("norm.weight"):
            weight.zero_()
    rows = None if source is None else source.head[draft_to_target_ids]
    if config.width != config.embedding_width:
        return [] if rows is None or source is None else _narrow(network, rows, source.final_norm)
    network.projection.weight.zero_()
    network.projection.weight[:, -config.width :] = torch.eye(config.width)
    if source is None:
        return []
    refusals: list[str] = []
    if source.biases:
        refusals.append(f"biases of {', '.join(source.biases)}: the target's last block adds them, the draft has none")
    refusals += source.others
    for index, block in enumerate(network.blocks):
        place = len(source.blocks) - len(network.blocks) + index
        _start_block(block, source.blocks[max(0, place)], generator, refusals)
    _copy(network.final_norm.weight, source.final_norm, "final norm", refusals)
    _copy(network.head.weight, rows, "head", refusals)
    return refusals


def _start_block(block: Block, given: dict[str, Tensor], generator: torch.Generator, refusals: list[str]) -> None:
    width = block.state_norm.weight.shape[0]
    extra = block.qkv.weight.shape[1] - width
    parts = [given.get(name) for name in ("q", "k", "v")]
    fused = torch.cat([part for part in parts if part is not None]) if all(p is not None for p in parts) else None
    rows = block.query_size + 2 * block.kv_size
    if fused is None or fused.shape != (rows, width) or parts[0] is None or parts[0].shape[0] != block.query_size:
        _copy(block.qkv.weight[:, extra:], fused, "q, k, v", refusals)
    else:
        noise = torch.randn(rows, extra, generator=generator)
        block.qkv.weight[:, extra:] = fused
        block.qkv.weight[:, :extra] = noise * float(fused.std()) * _EMBEDDING_START
    _copy(block.o.weight, given.get("o"), "o", refusals)
    _copy(block.state_norm.weight, given.get("attention_norm"), "attention norm", refusals)
    _copy(block.mlp_norm.weight, given.get("mlp_norm"), "MLP norm", refusals)
    for name in ("gate", "up", "down"):
        _copy(getattr(block, name).weight, given.get(name), name, refusals)


def _narrow(network: DraftNetwork, rows: Tensor, final_norm: Tensor | None) -> list[str]:
    """Start a draft of another width W: head and projection on the W strongest directions of the target's head.

    With `rows` [U, E] scaled by the final norm and its right singular vectors R [E, W], states s become R^T s and the
    head rows R: the scores are the target's own but for the directions left out and the norm's scale.
    """
    scaled = rows if final_norm is None else rows * final_norm
    width, target = network.config.width, network.config.embedding_width
    kept = min(width, target)
    _, vectors = torch.linalg.eigh((scaled.T @ scaled).double())
    basis = vectors.flip(1)[:, :kept].float()  # shape: [E, kept], strongest first
    network.projection.weight[:kept] = 0.0
    network.projection.weight[:kept, -target:] = basis.T
    network.head.weight.zero_()
    network.head.weight[:, :kept] = scaled @ basis
    return [f"the last block: the target is {target} wide, the draft {width}; its head alone was taken"]


@torch.no_grad()
def continue_draft(network: DraftNetwork, ids: Tensor, draft: LoadedDraft, source: SourceWeights) -> list[str]:
    """Start from another draft; its head rows go to the same target tokens, the target's own head fills the rest.

    Training turns the head's rows to the draft's states. A linear map, fitted on the rows that both have, does the same
    to those from the target; as they are, tokens that the other draft did not know would be its likeliest everywhere.

    Returns what could not be taken and why. Raises DraftError when the two are of different targets.
    """
    mine, its = network.config, draft.config
    if its.target_fingerprint != mine.target_fingerprint:
        raise DraftError(
            f"--init is a draft for the target {its.target_fingerprint[:12]}, the shards were made with "
            f"{mine.target_fingerprint[:12]}; give a draft of the same target"
        )
    refusals: list[str] = []
    for name, weight in network.named_parameters():
        value = draft.tensors.get(name)
        if name == "projection.weight" and not mine.selection.same_taps(its.selection):
            refusals.append(f"projection: that draft sees {its.selection.describe()}")
        elif name != "head.weight" and value is None:
            refusals.append(f"{name}: that draft has none")
        elif name != "head.weight":
            _copy(weight, torch.from_numpy(value), name, refusals)
    theirs = torch.from_numpy(draft.draft_to_target_ids)
    if its.width != mine.width:
        return [*refusals, f"head: that draft is {its.width} wide, this one {mine.width}"]
    rows = torch.from_numpy(draft.tensors["head.weight"]).to(network.head.weight.dtype)
    place = torch.searchsorted(theirs, ids).clamp(max=len(theirs) - 1)
    shared = theirs[place] == ids
    network.head.weight[shared] = rows[place[shared]]
    if source.head.shape[1] == mine.width and not shared.all():
        network.head.weight[~shared] = mapped(source.head[ids[~shared]], source.head[theirs], rows)
    return refusals


def mapped(rows: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Rows [R, E] under the linear map, with an offset, that takes `before` [N, E] to `after` [N, E] best.

    Ridge regression of the change, so that few rows change little.
    """
    given, wanted = (torch.nn.functional.pad(part.float(), (0, 1), value=1.0) for part in (before, rows))
    ridge = 1e-3 * given.square().sum(dim=0).mean() * torch.eye(given.shape[1])
    change = torch.linalg.solve(given.T @ given + ridge, given.T @ (after - before).float())
    moved: Tensor = rows.float() + wanted @ change
    return moved.to(rows.dtype)


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
    if not isinstance(weight, Tensor):
        return None
    kept = weight.detach().clone()
    return kept + 1.0 if type(module).__name__ in _GAIN_LESS_ONE else kept


def draft_config(shape: ModelShape, settings: TrainSettings | None = None, **structure: Any) -> DraftConfig:
    """A draft of the target's own shape, but for what `settings` says; `structure` gives selection, vocabulary and
    provenance. Raises ConfigError for heads that do not fit."""
    asked = settings or TrainSettings(steps=1)
    heads = asked.heads or shape.heads
    kv_heads = asked.kv_heads or (shape.kv_heads if heads % shape.kv_heads == 0 else heads)
    head_width = asked.head_width or shape.head_width
    if asked.head_width and head_width % _HEAD_WIDTH:
        raise ConfigError(
            f"training: head_width is {head_width}; ONNX Runtime's attention takes multiples of {_HEAD_WIDTH}"
        )
    width = asked.width or shape.width
    if asked.width and width % _WIDTH:
        raise ConfigError(f"training: width is {width}; quantised weights come in blocks of {_WIDTH}, give a multiple")
    return DraftConfig(
        width=width,
        target_width=0 if width == shape.width else shape.width,
        depth=asked.depth,
        head=asked.head,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=asked.mlp_width or shape.mlp_width,
        target_vocab_size=shape.vocab_size,
        context=shape.context,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
        **structure,
    )
