"""How well a draft guesses the target, on held-out rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elsi_edge.artifacts import to_plain
from elsi_edge.draft.data import Row, ShardSet
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.replay import DRAFTINGS, replay
from elsi_edge.draft.unroll import PackedBatch, unroll
from elsi_edge.processes import Alone, Processes

CHAIN = 4  # drafted tokens per verification in `tau_chain4`
_CHUNK = 1024  # positions scored at a time


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over every answer position of the held-out rows."""

    agreement: tuple[float, ...]  # per unrolled step: share of positions where the draft's best is the target's
    tau_chain4: float  # expected tokens per verification of a chain of 4, the bonus token included
    positions: int  # at step 0
    tau: Mapping[str, float] = field(default_factory=dict)  # by replay of greedy answers: "chain-4", "tree-30", ...
    replayed: int = 0  # answers

    @property
    def score(self) -> float:
        """What early stopping watches: mean agreement over the steps."""
        return sum(self.agreement) / len(self.agreement)

    def plain(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        values: dict[str, Any] = to_plain(self)
        return values


@torch.no_grad()
def evaluate(
    network: DraftNetwork,
    batches: Sequence[PackedBatch],
    draft_to_target_ids: Tensor,
    dtype: torch.dtype,
    group: Processes | None = None,
) -> Evaluation:
    """Unroll `CHAIN` steps over batches packed for as many; over all processes of a `group`, each with its own batches.

    A hit: the draft's argmax, as a target id, is the target's argmax; what the draft cannot say is therefore a miss.
    The chain at a base ends with its first miss (and with the row), so tau is 1 + the mean number of leading hits.
    Inputs are the row's own tokens: for greedy answers this is what decoding would meet at every position, for sampled
    ones an estimate.
    """
    sums = torch.zeros(2 * CHAIN + 1, dtype=torch.float64, device=draft_to_target_ids.device)
    hits, counts, accepted = sums[:CHAIN], sums[CHAIN:-1], sums[-1]  # views
    for batch in batches:
        alive = torch.ones(len(batch.bases), dtype=torch.bool, device=sums.device)
        with torch.autocast(sums.device.type, dtype=dtype, enabled=dtype != torch.float32):
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
    (group or Alone()).sum_(sums)
    total = max(1.0, float(counts[0]))
    return Evaluation(
        agreement=tuple(float(hit / max(1.0, float(count))) for hit, count in zip(hits, counts, strict=True)),
        tau_chain4=1.0 + float(accepted) / total,
        positions=int(counts[0]),
    )


def replayed_tau(
    network: DraftNetwork, data: ShardSet, rows: Sequence[Row], ids: Tensor, group: Processes
) -> tuple[dict[str, float], int]:
    """tau by drafting's name over greedy held-out rows, and how many they were; each process replays its share."""
    sums = torch.zeros(len(DRAFTINGS), 2, dtype=torch.float64, device=ids.device)
    for _, result in replay(network, data, rows[group.rank :: group.count], ids):
        sums += torch.tensor([[result[d.name].tokens, result[d.name].verifications] for d in DRAFTINGS]).to(sums)
    group.sum_(sums)
    if not rows:
        return {}, 0
    return {d.name: float(t / v) for d, (t, v) in zip(DRAFTINGS, sums, strict=True) if v > 0}, len(rows)


def _best(network: DraftNetwork, states: Tensor) -> Tensor:
    return torch.cat([network.logits(part).argmax(-1) for part in torch.split(states, _CHUNK)])
