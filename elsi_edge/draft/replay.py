"""tau by replay: what decoding would have accepted of a draft's chains and trees, on recorded greedy answers.

At T = 0 the target's next tokens are known, so no target is needed: at every place of an answer the draft proposes what
the runtime's proposer would (beam expansion, then the best nodes by path probability: EAGLE-2, arXiv 2406.16858), and
the accepted path is the longest that follows the answer. Walking over those lengths from the answer's first token, each
time by the accepted nodes and the bonus token, gives the verifications that decoding would have needed.

All places of a few conversations run at once. The draft's keys over the true prefix are shared; a node sees those up to
its place and its own ancestors. What cannot change a length is not computed: once the true path has left the tree, only
nodes that score above its last node can still grow something that displaces it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsi_edge.draft.data import Row, ShardSet
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.search import Drafting as Drafting
from elsi_edge.draft.search import Places, Plan, Search, alike
from elsi_edge.tree_shape import TreeShape

_PLACES = 1024  # places of an answer that run at once, so that the caches hold what they share


DRAFTINGS = (*(Drafting(nodes=n, chain=True) for n in (2, 4)), *(Drafting(nodes=n, chain=False) for n in (30, 60)))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What one way to draft would have done on one answer."""

    tokens: int  # emitted by verifications: the answer but for its first token, which prefill gives
    verifications: int

    @property
    def tau(self) -> float:
        """Tokens per verification, the bonus included."""
        return self.tokens / max(1, self.verifications)


@torch.no_grad()
def replay(
    network: DraftNetwork,
    data: ShardSet,
    rows: Sequence[Row],
    ids: Tensor,
    draftings: Sequence[Drafting] = DRAFTINGS,
    *,
    limit: int | None = None,
) -> Iterator[tuple[Row, dict[str, Replayed]]]:
    """Replay rows whose answers are greedy, a few at a time; by drafting's name.

    `ids` [U] are the draft's absolute target ids. `limit` is the most tokens that decoding was allowed: near it the
    runtime drafts fewer levels. None lets every tree have its full depth, as the papers' figures do.
    """
    held: list[Row] = []
    for row in rows:
        if held and sum(r.bases for r in held) + row.bases > _PLACES:
            yield from _replay_rows(network, data, held, ids, draftings, limit)
            held = []
        held.append(row)
    if held:
        yield from _replay_rows(network, data, held, ids, draftings, limit)


def tau(results: Sequence[Mapping[str, Replayed]]) -> dict[str, float]:
    """Tokens per verification over all answers, by drafting's name."""
    names = results[0] if results else ()
    return {
        name: sum(r[name].tokens for r in results) / max(1, sum(r[name].verifications for r in results))
        for name in names
    }


def _replay_rows(
    network: DraftNetwork,
    data: ShardSet,
    rows: list[Row],
    ids: Tensor,
    draftings: Sequence[Drafting],
    limit: int | None,
) -> list[tuple[Row, dict[str, Replayed]]]:
    deepest = max(TreeShape.for_budget(d.nodes, chain=d.chain).depth for d in draftings)
    batch = data.batch(rows, deepest + 1).to(network.embeddings.device)
    places = Places(network, batch, ids)
    bounds = batch.base_bounds
    emitted = torch.cat([torch.arange(row.records - row.bases, row.records) for row in rows])  # [N] before each place
    plans = [Plan.make(drafting, emitted, limit).to(places.first.device) for drafting in draftings]
    lengths: dict[str, list[NDArray[np.int64]]] = {}
    for shared in alike(plans):
        for plan, accepted in zip(shared, Search(places, shared).run(), strict=True):
            values = accepted.cpu().numpy()
            lengths[plan.name] = [values[bounds[c] : bounds[c + 1]] for c in range(len(rows))]
    return [(r, {name: walk(own[c], r.records) for name, own in lengths.items()}) for c, r in enumerate(rows)]


def walk(accepted: NDArray[np.int64], total: int) -> Replayed:
    """Verifications for an answer of `total` tokens, the first of which the prefill gives.

    `accepted`, for the last of the answer's places, are the nodes accepted where place i has i tokens emitted.
    """
    emitted, verifications, missing = 1, 0, total - len(accepted)
    while emitted < total:
        emitted += min(int(accepted[emitted - missing]) + 1, total - emitted)
        verifications += 1
    return Replayed(tokens=total - 1, verifications=verifications)


def greedy(rows: Sequence[Row]) -> list[Row]:
    """Rows whose answers are the target's at T = 0."""
    return [row for row in rows if row.key.endswith("@0")]
