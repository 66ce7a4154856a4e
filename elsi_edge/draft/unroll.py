"""Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): the draft unrolled on its own states, rows packed.

Everything is indexed by the *base* position p at which drafting starts, so nothing but tokens and targets is shifted:

    step 0   entry p      reads the target's state s_p     and x_{p+1}     predicts x_{p+2}
    step j   entry p + j  reads its own output of step j-1 and x_{p+j+1}   predicts x_{p+j+2}

What a query of step 2 at bases 3 and 4 of one conversation sees (keys of step 0 by position, then its own base's keys):

             step 0: 0 1 2 3 4 5     step 1: b3 b4     step 2: b3 b4
    base 3           x x x x . .             x  .              x  .
    base 4           x x x x x .             .  x              .  x

Conversations lie end to end and attention runs per conversation: no padding, and none sees another. Entries are
computed in full only where a loss counts (the bases); elsewhere their keys and values are all that anyone reads.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from elsi_edge.draft.attention import Spans, make_spans, unrolled_attention
from elsi_edge.draft.network import DraftNetwork, rotate


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Conversations laid end to end. P entries, N bases, R target records, K steps, all over the whole batch."""

    taps: Tensor  # [P, M*E] the target's states, any float type
    next_tokens: Tensor  # [P] int64, x_{p+1}
    positions: Tensor  # [P] int64, p within its conversation
    entry_bounds: tuple[int, ...]  # conversation c owns entries entry_bounds[c] : entry_bounds[c + 1]
    bases: Tensor  # [N] int64, index among the P entries, ascending
    base_bounds: tuple[int, ...]  # conversation c owns bases base_bounds[c] : base_bounds[c + 1]
    step_tokens: Tensor  # [K, N] int64, x_{p+j+1}; 0 past the end
    step_targets: Tensor  # [K, N] int64, which of the R records is that of x_{p+j+2}; -1 where none counts
    target_ids: Tensor  # [R, k] int64, target ids of the top-k, best first
    target_log_probs: Tensor  # [R, k] float32, natural logarithms of their probabilities
    tokens: int  # tokens of the conversations, for the speed
    row_ids: tuple[str, ...]  # keys of the conversations
    shards: tuple[str, ...]  # files that they came from

    def counts(self) -> Tensor:
        """[K] positions with a target, by step."""
        return (self.step_targets >= 0).sum(1)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        if device.type == "cpu":
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys (rotated) and values of every entry, by block: what all later steps attend to."""

    keys: list[Tensor]  # [P, H, D] each
    values: list[Tensor]  # [P, H, D] each


Own = list[list[tuple[Tensor, Tensor]]]
"""By block: keys and values of each query's own steps 1..j, [N, H, D] each."""


def empty_own(network: DraftNetwork) -> Own:
    """No own steps yet."""
    return [[] for _ in network.blocks]


def unroll(network: DraftNetwork, batch: PackedBatch, steps: int) -> list[Tensor]:
    """The draft's own states at every base for each step: `steps` tensors [N, W]; `network.logits` scores them."""
    spans = make_spans(batch.positions, batch.bases, batch.base_bounds, batch.entry_bounds)
    states, prefix = read_entries(network, batch, spans)
    base_positions = batch.positions[batch.bases]
    own = empty_own(network)
    outputs = [states]
    for step in range(1, steps):
        states = own_step(network, states, batch.step_tokens[step], base_positions + step, prefix, own, spans)
        outputs.append(states)
    return outputs


def read_entries(network: DraftNetwork, batch: PackedBatch, spans: Spans) -> tuple[Tensor, Prefix]:
    """Step 0: the draft's own states at the bases, [N, W], and keys and values of all entries.

    The last block runs in full at the bases alone; one before it must, since the last reads its states everywhere.
    """
    states = network.project(batch.taps.float()).float()  # shape: [P, W]
    query_size, head_width = network.query_size, network.config.head_width
    prefix = Prefix(keys=[], values=[])
    for index, block in enumerate(network.blocks):
        last = index + 1 == len(network.blocks)
        inputs = network.inputs(index, states, batch.next_tokens)  # shape: [P, E + W], later [P, W]
        rows = inputs[batch.bases] if last else inputs
        query = functional.linear(rows, block.qkv.weight[:query_size])  # shape: [N, heads*D]
        key, value = functional.linear(inputs, block.qkv.weight[query_size:]).chunk(2, dim=-1)  # shape: [P, H*D] each
        cos, sin = (table.to(key.dtype) for table in network.rotary(batch.positions))
        prefix.keys.append(rotate(_heads(key, head_width), cos, sin))
        prefix.values.append(_heads(value, head_width))
        if last:
            cos, sin, states = cos[batch.bases], sin[batch.bases], states[batch.bases]
            seen = spans
        else:
            everywhere = torch.arange(len(states), device=states.device)
            seen = make_spans(batch.positions, everywhere, batch.entry_bounds, batch.entry_bounds)
        query = rotate(_heads(query, head_width), cos, sin)
        attended = unrolled_attention(query, prefix.keys[index], prefix.values[index], [], seen)
        states = block.finish(states, attended.flatten(1))
    return states, prefix


def own_step(
    network: DraftNetwork,
    states: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    prefix: Prefix,
    own: Own,
    spans: Spans,
) -> Tensor:
    """One more step on the draft's own states [N, W]; `own` grows by its keys and values. Returns states [N, W]."""
    head_width = network.config.head_width
    for index, block in enumerate(network.blocks):
        fused = block.qkv(network.inputs(index, states, token_ids))
        query, key, value = fused.split([network.query_size, network.kv_size, network.kv_size], dim=-1)
        cos, sin = (table.to(key.dtype) for table in network.rotary(positions))
        own[index].append((rotate(_heads(key, head_width), cos, sin), _heads(value, head_width)))
        query = rotate(_heads(query, head_width), cos, sin)
        attended = unrolled_attention(query, prefix.keys[index], prefix.values[index], own[index], spans)
        states = block.finish(states, attended.flatten(1))
    return states


def _heads(x: Tensor, head_width: int) -> Tensor:
    return x.view(x.shape[0], -1, head_width)
