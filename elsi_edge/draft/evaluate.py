"""How well a draft guesses the target, on held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.unroll import PackedBatch, unroll

CHAIN = 4  # drafted tokens per verification in `tau_chain4`
_CHUNK = 1024  # positions scored at a time


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over every answer position of the held-out rows."""

    agreement: tuple[float, ...]  # per unrolled step: share of positions where the draft's best is the target's
    tau_chain4: float  # expected tokens per verification of a chain of 4, the bonus token included
    positions: int  # at step 0


@torch.no_grad()
def evaluate(
    network: DraftNetwork, batches: Sequence[PackedBatch], draft_to_target_ids: Tensor, dtype: torch.dtype
) -> Evaluation:
    """Unroll `CHAIN` steps over batches packed for as many.

    A hit: the draft's argmax, as a target id, is the target's argmax; what the draft cannot say is therefore a miss.
    The chain at a base ends with its first miss (and with the row), so tau is 1 + the mean number of leading hits.
    Inputs are the row's own tokens: for greedy answers this is what decoding would meet at every position, for sampled
    ones an estimate.
    """
    hits = torch.zeros(CHAIN, dtype=torch.float64)
    counts = torch.zeros(CHAIN, dtype=torch.float64)
    accepted = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        alive = torch.ones(len(batch.bases), dtype=torch.bool)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            states = unroll(network, batch, CHAIN)
            guesses = [_best(network, state) for state in states]
        for step, guess in enumerate(guesses):
            targets = batch.step_targets[step]
            counted = targets >= 0
            hit = counted & (draft_to_target_ids[guess] == batch.target_ids[targets.clamp(min=0), 0])
            alive = alive & hit
            hits[step] += hit.sum()
            counts[step] += counted.sum()
            accepted += alive.sum()
    total = max(1.0, float(counts[0]))
    return Evaluation(
        agreement=tuple(float(hit / max(1.0, float(count))) for hit, count in zip(hits, counts, strict=True)),
        tau_chain4=1.0 + float(accepted) / total,
        positions=int(counts[0]),
    )


def _best(network: DraftNetwork, states: Tensor) -> Tensor:
    return torch.cat([network.logits(part).argmax(-1) for part in torch.split(states, _CHUNK)])
