"""Soft cross-entropy against the target's top-k, restricted to the draft vocabulary, fused with the head.

For one position, with S = top-k of the target that the draft can say, p the target's probabilities, q the draft's:

    loss = - sum_{v in S} p(v) log q(v) = mass * logsumexp(z) - sum_{v in S} p(v) z(v),   mass = sum_{v in S} p(v)

Probability outside S is dropped, not spread over S: a position whose likely tokens the draft cannot say weighs less,
and one whose top-k lies wholly outside weighs nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.unroll import PackedBatch, unroll

_CHUNK = 512  # positions scored at a time, so that a chunk of logits stays in the caches


def batch_loss(
    network: DraftNetwork,
    batch: PackedBatch,
    inverse: Tensor,
    settings: TrainSettings,
    dtype: torch.dtype,
    steps: int = 0,
    counts: Sequence[int] = (),
) -> Tensor:
    """The unrolled loss: over steps, the weighted mean of each step's mean over its answer positions. A scalar.

    `steps` unrolled ones, all of the settings' when 0. `counts` are the positions with a target by step that the means
    are over, the batch's own when left out: the losses of a batch's pieces add up to the whole's when each is given
    those of the whole.
    """
    steps = steps or settings.unroll
    over = list(counts) or batch.counts().tolist()
    with torch.autocast(batch.taps.device.type, dtype=dtype, enabled=dtype != torch.float32):
        states = unroll(network, batch, steps)
    hidden, records, weights = [], [], []
    for step, (state, weight) in enumerate(zip(states, settings.weights(steps), strict=True)):
        kept = torch.nonzero(batch.step_targets[step] >= 0)[:, 0]
        if len(kept) == 0 or weight == 0.0:
            continue
        hidden.append(state[kept])
        records.append(batch.step_targets[step][kept])
        weights.append(torch.full((len(kept),), weight / over[step], device=state.device))
    if not hidden:
        return states[0].sum() * 0.0
    index = torch.cat(records)
    draft_ids, probs = restricted_probs(batch.target_log_probs[index], batch.target_ids[index], inverse)
    normed = network.final_norm(torch.cat(hidden))
    return fused_soft_cross_entropy(normed, network.head.weight, draft_ids, probs, torch.cat(weights), dtype=dtype)


def kept_mass(batch: PackedBatch, inverse: Tensor) -> float:
    """Sum over the batch's records of the target's probability that the draft's vocabulary (and the top-k) keeps."""
    return float(restricted_probs(batch.target_log_probs, batch.target_ids, inverse)[1].sum())


def restricted_probs(log_probs: Tensor, target_ids: Tensor, target_to_draft: Tensor) -> tuple[Tensor, Tensor]:
    """Draft-vocabulary ids (0 where there is none) and probabilities (0 there) of the target's top-k, both [N, k]."""
    local = target_to_draft[target_ids]
    return local.clamp(min=0), torch.where(local >= 0, log_probs.exp(), 0.0)


def fused_soft_cross_entropy(
    hidden: Tensor, head: Tensor, draft_ids: Tensor, probs: Tensor, weights: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Sum over positions of weight * loss, a scalar.

    `hidden` [N, E] after the final norm, `head` [U, E], `draft_ids` int64 and `probs` float32 [N, k], `weights` [N].
    Logits [N, U] are computed once, in `dtype`, and turned into their own gradient in place.
    """
    result: Tensor = _FusedSoftCrossEntropy.apply(hidden, head, draft_ids, probs, weights, dtype)  # type: ignore[no-untyped-call]
    return result


class _FusedSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, draft_ids: Tensor, probs: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            narrow, table = hidden.detach().to(dtype), head.detach().to(dtype)
            slopes = torch.empty(narrow.shape[0], table.shape[0], dtype=dtype, device=narrow.device)  # shape: [N, U]
            total = torch.zeros((), dtype=torch.float64, device=narrow.device)
            for start in range(0, narrow.shape[0], _CHUNK):
                part = slice(start, start + _CHUNK)
                logits = torch.matmul(narrow[part], table.t()).float()
                total += _loss_and_slope(logits, draft_ids[part], probs[part], weights[part])
                slopes[part] = logits
            ctx.save_for_backward(narrow, table, slopes)
            ctx.types = (hidden.dtype, head.dtype)
        return total.float()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        narrow, table, slopes = ctx.saved_tensors
        hidden_type, head_type = ctx.types
        scale = upstream[0]
        with torch.autocast(narrow.device.type, enabled=False):
            to_hidden = torch.matmul(slopes, table).to(hidden_type) * scale
            to_head = torch.matmul(slopes.t(), narrow).to(head_type) * scale if ctx.needs_input_grad[1] else None
        return to_hidden, to_head, None, None, None, None


def _loss_and_slope(logits: Tensor, draft_ids: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """The chunk's weighted loss; `logits` float32 [n, U] become d loss / d logits in place."""
    weighted = probs * weights[:, None]
    mass = weighted.sum(-1)
    chosen = logits.gather(-1, draft_ids)
    top = logits.amax(-1, keepdim=True)
    normaliser = logits.sub_(top).exp_().sum(-1)
    loss = (mass.double() * (normaliser.log() + top[:, 0]).double()).sum() - (weighted.double() * chosen.double()).sum()
    logits.mul_((mass / normaliser)[:, None])
    logits.scatter_add_(-1, draft_ids, -weighted)
    return loss
