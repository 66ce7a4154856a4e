"""The draft: a slim EAGLE-3-style network (arXiv 2503.01840), a block or two over [token embedding, state].

An *entry* at position p pairs the state s_p with the token x_{p+1}; it is rotated by p and predicts the target's
distribution at p+1, that is the token x_{p+2}. Its output is the draft's own state for position p+1, which the next
drafted entry reads in place of a state of the target.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from elsi_edge.artifacts import DraftConfig
from elsi_edge.errors import DraftError


@dataclass(kw_only=True)
class DraftCache:
    """Keys (rotated) and values of the entries seen so far; grows as `forward_step` runs."""

    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by block: [B, H, S, D] each

    @property
    def length(self) -> int:
        """S, entries cached."""
        return self.pairs[0][0].shape[2] if self.pairs else 0

    def append(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add entries and return all of them. Shapes [B, H, T, D] in, [B, H, S+T, D] out."""
        if block in self.pairs:
            keys, values = (torch.cat(two, dim=2) for two in zip(self.pairs[block], (keys, values), strict=True))
        self.pairs[block] = keys, values
        return keys, values


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32 as Llama does it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # shape: [E]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Block(nn.Module):
    """Attention and MLP over the residual stream. `extra` is what the fused qkv reads beside the normed state."""

    def __init__(self, config: DraftConfig, *, extra: int) -> None:
        super().__init__()
        width = config.width
        self.query_size = config.heads * config.head_width
        self.kv_size = config.kv_heads * config.head_width
        self.state_norm = RmsNorm(width, config.norm_eps)
        self.qkv = nn.Linear(extra + width, self.query_size + 2 * self.kv_size, bias=False)  # rows: q, k, v
        self.o = nn.Linear(self.query_size, width, bias=False)
        self.mlp_norm = RmsNorm(width, config.norm_eps)
        self.gate = nn.Linear(width, config.mlp_width, bias=False)
        self.up = nn.Linear(width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, width, bias=False)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, both added to the un-normed state. [..., W], [..., heads*D] -> [..., W]."""
        states = states + self.o(attended)
        normed = self.mlp_norm(states)
        finished: Tensor = states + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return finished


class DraftNetwork(Block):
    """The draft's weights and its inference-style forward. Parameter names are the names in `draft.safetensors`.

    It is its own first block, which reads [embedding, state]; a second one (depth 2) reads the state alone. W is the
    draft's width, E the target's. The target's embedding table is frozen and belongs to the target: it is attached,
    never a parameter, never saved.
    """

    embeddings: Tensor  # [V, E]

    def __init__(self, config: DraftConfig, embeddings: Tensor | None = None) -> None:
        super().__init__(config, extra=config.embedding_width)
        self.config = config
        self.projection = nn.Linear(config.m * config.embedding_width, config.width, bias=False)
        self.embed_norm = RmsNorm(config.embedding_width, config.norm_eps)
        self.later = nn.ModuleList(Block(config, extra=0) for _ in range(config.depth - 1))
        self.final_norm = RmsNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.draft_vocab_size, bias=False)
        head_width = config.head_width
        inverse = config.rope_theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        self.register_buffer("inverse_frequencies", inverse.float(), persistent=False)  # shape: [D/2]
        self.register_buffer("embeddings", torch.empty(0), persistent=False)
        if embeddings is not None:
            self.attach_embeddings(embeddings)

    @property
    def blocks(self) -> list[Block]:
        """All blocks in order."""
        return [self, *self.later]

    def attach_embeddings(self, table: Tensor) -> None:
        """Use the target's embedding table, [at least V, E]. Raises DraftError when its width is another."""
        wanted = self.config.embedding_width
        if table.ndim != 2 or table.shape[1] != wanted:
            raise DraftError(
                f"the target's embedding table is {list(table.shape)}, the draft reads rows of {wanted}; "
                "this draft belongs to another target"
            )
        self.embeddings = table.detach()

    def project(self, taps: Tensor) -> Tensor:
        """States of the target at the taps, concatenated in the selection's order, to draft states.

        [..., M*E] -> [..., W]. Only the target's states pass here; the draft's own outputs are states already.
        """
        projected: Tensor = self.projection(taps)
        return projected

    def inputs(self, block: int, states: Tensor, token_ids: Tensor) -> Tensor:
        """What a block's fused qkv reads: [..., E + W], normed embedding of the next token and normed state; later
        blocks the normed state alone, [..., W]."""
        if block > 0:
            normed: Tensor = self.blocks[block].state_norm(states)
            return normed
        return torch.cat([self.embed_norm(self.embeddings[token_ids]), self.state_norm(states)], dim=-1)

    def logits(self, states: Tensor) -> Tensor:
        """Scores over the draft vocabulary. [..., W] -> [..., U]."""
        scores: Tensor = self.head(self.final_norm(states))
        return scores

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, each [..., 1, D/2] so that they broadcast over heads."""
        angles = positions[..., None].float() * self.inverse_frequencies  # type: ignore[operator]
        return angles.cos()[..., None, :], angles.sin()[..., None, :]

    def forward_step(
        self,
        states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        past: DraftCache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run T entries after the S cached ones; `past` grows by them.

        `states` [B, T, W] are projected states of the target or the draft's own; `token_ids` [B, T] the token *after*
        each; `positions` [B, T] the states' positions; `mask` bool [B, T, S+T], true where an entry sees another,
        causal by order when left out. Returns logits [B, T, U] and the next states [B, T, W].
        """
        batch, new = token_ids.shape
        past = past if past is not None else DraftCache()
        cached = past.length
        if mask is None:
            mask = torch.ones(new, cached + new, dtype=torch.bool, device=states.device).tril(cached)[None]
        cos, sin = self.rotary(positions)
        head_width = self.config.head_width
        for index, block in enumerate(self.blocks):
            fused = block.qkv(self.inputs(index, states, token_ids))
            query, key, value = fused.split([self.query_size, self.kv_size, self.kv_size], dim=-1)
            query = rotate(query.view(batch, new, -1, head_width), cos, sin).transpose(1, 2)  # shape: [B, heads, T, D]
            key = rotate(key.view(batch, new, -1, head_width), cos, sin).transpose(1, 2)  # shape: [B, H, T, D]
            keys, values = past.append(index, key, value.view(batch, new, -1, head_width).transpose(1, 2))
            attended = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask[:, None], enable_gqa=True
            )
            states = block.finish(states, attended.transpose(1, 2).reshape(batch, new, -1))
        return self.logits(states), states


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last axis, computed in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's half-split rotary embedding of [..., heads, D] by tables [..., 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
