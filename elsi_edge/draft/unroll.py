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

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from elsi_edge.draft.attention import make_spans, unrolled_attention
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


def unroll(network: DraftNetwork, batch: PackedBatch, steps: int) -> list[Tensor]:
    """The draft's own states at every base for each step: `steps` tensors [N, E]; `network.logits` scores them."""
    query_size, head_width = network.query_size, network.config.head_width
    states = network.project(batch.taps.float()).float()  # shape: [P, E]
    inputs = network.inputs(states, batch.next_tokens)  # shape: [P, 2E]
    query = functional.linear(inputs[batch.bases], network.qkv.weight[:query_size])  # shape: [N, heads*D]
    key, value = functional.linear(inputs, network.qkv.weight[query_size:]).chunk(2, dim=-1)  # shape: [P, H*D] each
    cos, sin = (table.to(key.dtype) for table in network.rotary(batch.positions))
    keys, values = rotate(_heads(key, head_width), cos, sin), _heads(value, head_width)  # shape: [P, H, D] each
    spans = make_spans(batch.positions, batch.bases, batch.base_bounds, batch.entry_bounds)
    base_positions = batch.positions[batch.bases]
    states = states[batch.bases]
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..j, [N, H, D] each
    outputs: list[Tensor] = []
    for step in range(steps):
        cos, sin = (table.to(key.dtype) for table in network.rotary(base_positions + step))
        if step > 0:
            fused = network.qkv(network.inputs(states, batch.step_tokens[step]))
            query, key, value = fused.split([query_size, network.kv_size, network.kv_size], dim=-1)
            own.append((rotate(_heads(key, head_width), cos, sin), _heads(value, head_width)))
        attended = unrolled_attention(rotate(_heads(query, head_width), cos, sin), keys, values, own, spans)
        states = network.finish(states, attended.flatten(1))
        outputs.append(states)
    return outputs


def _heads(x: Tensor, head_width: int) -> Tensor:
    return x.view(x.shape[0], -1, head_width)
