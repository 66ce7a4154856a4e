"""The draft: a slim EAGLE-3-style network (arXiv 2503.01840), one block over [token embedding, state].

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

    keys: Tensor | None = field(default=None)  # [B, H, S, D]
    values: Tensor | None = field(default=None)  # [B, H, S, D]

    @property
    def length(self) -> int:
        """S, entries cached."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add entries and return all of them. Shapes [B, H, T, D] in, [B, H, S+T, D] out."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32 as Llama does it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # shape: [E]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DraftNetwork(nn.Module):
    """The draft's weights and its inference-style forward. Parameter names are the names in `draft.safetensors`.

    The target's embedding table is frozen and belongs to the target: it is attached, never a parameter, never saved.
    """

    embeddings: Tensor  # [V, E]

    def __init__(self, config: DraftConfig, embeddings: Tensor | None = None) -> None:
        super().__init__()
        width, head_width = config.width, config.head_width
        self.config = config
        self.query_size = config.heads * head_width
        self.kv_size = config.kv_heads * head_width
        self.projection = nn.Linear(config.m * width, width, bias=False)
        self.embed_norm = RmsNorm(width, config.norm_eps)
        self.state_norm = RmsNorm(width, config.norm_eps)
        self.qkv = nn.Linear(2 * width, self.query_size + 2 * self.kv_size, bias=False)  # rows: q, k, v
        self.o = nn.Linear(self.query_size, width, bias=False)
        self.mlp_norm = RmsNorm(width, config.norm_eps)
        self.gate = nn.Linear(width, config.mlp_width, bias=False)
        self.up = nn.Linear(width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, width, bias=False)
        self.final_norm = RmsNorm(width, config.norm_eps)
        self.head = nn.Linear(width, config.draft_vocab_size, bias=False)
        inverse = config.rope_theta ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        self.register_buffer("inverse_frequencies", inverse.float(), persistent=False)  # shape: [D/2]
        self.register_buffer("embeddings", torch.empty(0), persistent=False)
        if embeddings is not None:
            self.attach_embeddings(embeddings)

    def attach_embeddings(self, table: Tensor) -> None:
        """Use the target's embedding table, [at least V, E]. Raises DraftError when its width is another."""
        if table.ndim != 2 or table.shape[1] != self.config.width:
            raise DraftError(
                f"the target's embedding table is {list(table.shape)}, the draft reads rows of {self.config.width}; "
                "this draft belongs to another target"
            )
        self.embeddings = table.detach()

    def project(self, taps: Tensor) -> Tensor:
        """States of the target at the taps, concatenated in the selection's order, to draft states.

        [..., M*E] -> [..., E]. Only the target's states pass here; the draft's own outputs are states already.
        """
        projected: Tensor = self.projection(taps)
        return projected

    def inputs(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """What the fused qkv reads: [normed embedding of the next token, normed state]. [..., E] -> [..., 2E]."""
        return torch.cat([self.embed_norm(self.embeddings[token_ids]), self.state_norm(states)], dim=-1)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, both added to the un-normed state. [..., E], [..., heads*D] -> [..., E]."""
        states = states + self.o(attended)
        normed = self.mlp_norm(states)
        finished: Tensor = states + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return finished

    def logits(self, states: Tensor) -> Tensor:
        """Scores over the draft vocabulary. [..., E] -> [..., U]."""
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

        `states` [B, T, E] are projected states of the target or the draft's own; `token_ids` [B, T] the token *after*
        each; `positions` [B, T] the states' positions; `mask` bool [B, T, S+T], true where an entry sees another,
        causal by order when left out. Returns logits [B, T, U] and the next states [B, T, E].
        """
        batch, new = token_ids.shape
        past = past if past is not None else DraftCache()
        cached = past.length
        if mask is None:
            mask = torch.ones(new, cached + new, dtype=torch.bool, device=states.device).tril(cached)[None]
        fused = self.qkv(self.inputs(states, token_ids))
        query, key, value = fused.split([self.query_size, self.kv_size, self.kv_size], dim=-1)
        cos, sin = self.rotary(positions)
        head_width = self.config.head_width
        query = rotate(query.view(batch, new, -1, head_width), cos, sin).transpose(1, 2)  # shape: [B, heads, T, D]
        key = rotate(key.view(batch, new, -1, head_width), cos, sin).transpose(1, 2)  # shape: [B, H, T, D]
        keys, values = past.append(key, value.view(batch, new, -1, head_width).transpose(1, 2))
        attended = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask[:, None], enable_gqa=True
        )
        states = self.finish(states, attended.transpose(1, 2).reshape(batch, new, -1))
        return self.logits(states), states


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the last axis, computed in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's half-split rotary embedding of [..., heads, D] by tables [..., 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
