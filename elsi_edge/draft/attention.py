"""Attention of the unrolled training forward, with its gradient written out: no slices or masks for autograd to carry.

Per conversation and step, with q of the bases, step-0 keys K and values V of all entries, and own keys k_i and values
v_i of the base's steps 1..j:

    S = [q K^T + mask, q . k_1, ..., q . k_j] / sqrt(D)      A = softmax(S)      out = A_0 V + sum_i a_i v_i

Heads are grouped: query head h reads key head h // (heads / H).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Which bases and entries belong to one conversation, and what its bases may see."""

    base_bounds: tuple[int, ...]  # conversation c owns bases base_bounds[c] : base_bounds[c + 1]
    entry_bounds: tuple[int, ...]  # and entries entry_bounds[c] : entry_bounds[c + 1]
    masks: tuple[
        Tensor, ...
    ]  # per conversation that has bases, float32 [n, p]: 0 where key position <= base, else -inf

    def each(self) -> list[tuple[slice, slice, Tensor]]:
        """Slice of bases, slice of entries and mask of every conversation that has bases."""
        bounds = zip(pairwise(self.base_bounds), pairwise(self.entry_bounds), strict=True)
        slices = [(slice(*bases), slice(*entries)) for bases, entries in bounds if bases[0] < bases[1]]
        return [(bases, entries, mask) for (bases, entries), mask in zip(slices, self.masks, strict=True)]


def make_spans(positions: Tensor, bases: Tensor, base_bounds: tuple[int, ...], entry_bounds: tuple[int, ...]) -> Spans:
    """Spans with their masks; `positions` [P] within the conversation, `bases` [N] indices among the P entries."""
    base_positions = positions[bases]
    masks = []
    for (first, last), (start, stop) in zip(pairwise(base_bounds), pairwise(entry_bounds), strict=True):
        if first == last:
            continue
        hidden = positions[None, start:stop] > base_positions[first:last, None]
        masks.append(torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf))
    return Spans(base_bounds=base_bounds, entry_bounds=entry_bounds, masks=tuple(masks))


def unrolled_attention(
    query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]], spans: Spans
) -> Tensor:
    """Attend causally over step 0 and along the diagonal over each base's own steps.

    `query` [N, heads, D], `keys` and `values` [P, H, D], `own` pairs of them [N, H, D]. Returns [N, heads, D].
    """
    flat = [tensor for pair in own for tensor in pair]
    result: Tensor = _UnrolledAttention.apply(spans, query, keys, values, *flat)  # type: ignore[no-untyped-call]
    return result


class _UnrolledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spans: Spans, query: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            result = torch.empty_like(query)
            saved = []
            for bases, entries, mask in spans.each():
                grouped = _group(query[bases], keys.shape[1])
                pairs = [_heads_first(tensor[bases]) for tensor in own]
                weights = _weights(grouped, _heads_first(keys[entries]), pairs[::2], mask)
                attended = _mix(weights, _heads_first(values[entries]), pairs[1::2])
                result[bases] = _ungroup(attended, len(mask))
                saved.append(weights)
        ctx.spans = spans
        ctx.save_for_backward(query, keys, values, result, *own, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        spans: Spans = ctx.spans
        query, keys, values, result, *rest = ctx.saved_tensors
        own, saved = rest[: -len(spans.masks)], rest[-len(spans.masks) :]
        scale = query.shape[-1] ** -0.5
        with torch.autocast(query.device.type, enabled=False):
            grads = [torch.empty_like(tensor) for tensor in (query, keys, values, *own)]
            if len(spans.masks) + 1 < len(spans.entry_bounds):  # nothing is written for a conversation without bases
                grads[1:3] = [torch.zeros_like(keys), torch.zeros_like(values)]
            to_query, to_keys, to_values, *to_own = grads
            dot = (upstream[0].float() * result.float()).sum(-1, keepdim=True)  # shape: [N, heads, 1], sum of dA * A
            for (bases, entries, mask), weights in zip(spans.each(), saved, strict=True):
                groups, kv_heads = query.shape[1] // keys.shape[1], keys.shape[1]
                size = mask.shape[1]
                grouped = _group(query[bases], kv_heads)
                out = _group(upstream[0][bases], kv_heads)
                key, value = _heads_first(keys[entries]), _heads_first(values[entries])
                pairs = [_heads_first(tensor[bases]) for tensor in own]
                slopes = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
                slopes[..., :size] = torch.bmm(out, value.transpose(1, 2))
                for index, own_value in enumerate(pairs[1::2]):
                    slopes[..., size + index] = _diagonal_dot(out, own_value)
                slopes.sub_(_group(dot[bases], kv_heads)).mul_(weights).mul_(scale)
                slopes = slopes.to(query.dtype)
                causal = slopes[..., :size]
                part = torch.bmm(causal, key)
                for index, own_key in enumerate(pairs[::2]):
                    column = slopes[..., size + index, None]
                    part += column * _repeat(own_key, groups)
                    to_own[2 * index][bases] = _fold(column * grouped, groups)
                    share = weights[..., size + index, None] * out
                    to_own[2 * index + 1][bases] = _fold(share, groups)
                to_query[bases] = _ungroup(part, len(mask))
                to_keys[entries] = torch.bmm(causal.transpose(1, 2), grouped).transpose(0, 1)
                to_values[entries] = torch.bmm(weights[..., :size].transpose(1, 2), out).transpose(0, 1)
        return None, *grads


def _weights(grouped: Tensor, key: Tensor, own_keys: list[Tensor], mask: Tensor) -> Tensor:
    """A of the module's formula, [H, G*n, p + j], in the keys' type."""
    kv_heads, rows, head_width = grouped.shape
    bases, size = mask.shape
    scores = torch.empty(kv_heads, rows, size + len(own_keys), device=grouped.device)
    scores[..., :size] = torch.bmm(grouped, key.transpose(1, 2))
    for index, own_key in enumerate(own_keys):
        scores[..., size + index] = _diagonal_dot(grouped, own_key)
    scores.mul_(head_width**-0.5)
    scores[..., :size].view(kv_heads, -1, bases, size).add_(mask)
    return torch.softmax(scores, dim=-1).to(key.dtype)


def _mix(weights: Tensor, value: Tensor, own_values: list[Tensor]) -> Tensor:
    size = value.shape[1]
    mixed = torch.bmm(weights[..., :size], value)
    groups = weights.shape[1] // own_values[0].shape[1] if own_values else 1
    for index, own_value in enumerate(own_values):
        mixed += weights[..., size + index, None] * _repeat(own_value, groups)
    return mixed


def _group(x: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, D] -> [H, G*n, D]: the queries of one key head together, group by group."""
    bases, heads, width = x.shape
    return x.view(bases, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)


def _ungroup(x: Tensor, bases: int) -> Tensor:
    """[H, G*n, D] -> [n, heads, D]."""
    kv_heads, _, width = x.shape
    return x.view(kv_heads, -1, bases, width).permute(2, 0, 1, 3).reshape(bases, -1, width)


def _heads_first(x: Tensor) -> Tensor:
    """[n, H, D] -> [H, n, D]."""
    return x.transpose(0, 1).contiguous()


def _repeat(own: Tensor, groups: int) -> Tensor:
    """[H, n, D] -> [H, G*n, D], once per query group."""
    return own.repeat(1, groups, 1)


def _diagonal_dot(grouped: Tensor, own: Tensor) -> Tensor:
    """Each query with its own base's vector: [H, G*n, D], [H, n, D] -> [H, G*n] float32."""
    return (grouped * _repeat(own, grouped.shape[1] // own.shape[1])).sum(-1, dtype=torch.float32)


def _fold(x: Tensor, groups: int) -> Tensor:
    """Sum over the query groups of one key head: [H, G*n, D] -> [n, H, D]."""
    kv_heads, rows, width = x.shape
    return x.view(kv_heads, groups, rows // groups, width).sum(1).transpose(0, 1)
