"""Which nodes of a drafted tree the true path takes: beam expansion at many places of recorded answers at once.

What the runtime's proposer does for one place (its beam, then the best nodes by path probability: EAGLE-2, arXiv
2406.16858), in tensors over all places, each with its own budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elsi_edge.draft.attention import make_spans
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.unroll import Own, PackedBatch, empty_own, own_step, read_entries
from elsi_edge.tree_shape import TreeShape

_CHUNK = 1024  # positions scored at a time


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """One way to draft: a chain or a tree of so many nodes."""

    nodes: int
    chain: bool

    @property
    def name(self) -> str:
        """As tables call it: "chain-4", "tree-60"."""
        return f"{'chain' if self.chain else 'tree'}-{self.nodes}"


class Places:
    """Every answer position of some conversations, with the draft's first guesses and keys over the true prefix."""

    def __init__(self, network: DraftNetwork, batch: PackedBatch, ids: Tensor) -> None:
        self.network, self.batch, self.ids = network, batch, ids.to(batch.bases.device)
        self.positions = batch.positions[batch.bases]  # [N]
        # The answer's own next tokens by depth, -1 past its end. shape: [K - 1, N]
        self.truth = torch.where(batch.step_targets[:-1] >= 0, batch.step_tokens[1:], -1)
        spans = make_spans(batch.positions, batch.bases, batch.base_bounds, batch.entry_bounds)
        self.first, self.prefix = read_entries(network, batch, spans)  # [N, W] the draft's states below the root
        bounds = torch.tensor(batch.base_bounds, device=batch.bases.device)
        self.owner = torch.bucketize(torch.arange(len(batch.bases), device=bounds.device), bounds[1:], right=True)

    def children(self, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Target ids and log-probabilities [n, count] of the likeliest tokens, best first."""
        tokens, values = [], []
        for part in torch.split(states, _CHUNK):
            logits = self.network.logits(part)
            top, index = logits.topk(min(count, logits.shape[1]), dim=-1)
            values.append(top - torch.logsumexp(logits, dim=-1, keepdim=True))
            tokens.append(self.ids[index])
        return torch.cat(tokens), torch.cat(values)

    def expand(self, own: Own, states: Tensor, tokens: Tensor, place: Tensor, depth: int) -> Tensor:
        """Run nodes of depth `depth` (1 = below the root), ordered by place; `own` are their ancestors' keys."""
        counts = torch.bincount(self.owner[place], minlength=len(self.batch.base_bounds) - 1).tolist()
        bounds = tuple(np.cumsum([0, *counts]).tolist())
        spans = make_spans(self.batch.positions, self.batch.bases[place], bounds, self.batch.entry_bounds)
        return own_step(self.network, states, tokens, self.positions[place] + depth, self.prefix, own, spans)


@dataclass(kw_only=True)
class _Level:
    """Candidates of one depth at n live places. C = beam * beam columns (beam at the first), in the order of creation.

    Rows of `scores` are -inf where there is no candidate.
    """

    scores: Tensor  # [n, C] path log-probabilities
    tokens: Tensor  # [n, C] target ids
    parents: Tensor  # [n, C] row of the parent in the states of the level above


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a way to draft does at every place, [N] each."""

    name: str
    budgets: Tensor  # nodes
    depths: Tensor  # levels
    beams: Tensor

    @classmethod
    def make(cls, drafting: Drafting, emitted: Tensor, limit: int | None) -> "Plan":
        """The plan where `emitted` [N] tokens came before each place, and `limit` may."""
        shape = TreeShape.for_budget(drafting.nodes, chain=drafting.chain)
        levels = torch.full_like(emitted, shape.depth)
        if (
            limit is not None
        ):  # the runtime caps the levels; a chain's nodes with them, a tree's only where none is left
            levels = torch.minimum(levels, (limit - emitted - 1).clamp(min=0))
        budgets = levels if drafting.chain else torch.where(levels > 0, drafting.nodes, 0)
        beams = torch.where(levels > 0, shape.beam, 0)
        return cls(name=drafting.name, budgets=budgets, depths=levels, beams=beams)

    def to(self, device: torch.device) -> "Plan":
        """The same on a device."""
        moved = (getattr(self, name).to(device) for name in ("budgets", "depths", "beams"))
        return Plan(name=self.name, **dict(zip(("budgets", "depths", "beams"), moved, strict=True)))


def alike(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Plans whose beams are the same everywhere: they grow the same nodes, and differ in how many they keep."""
    groups: list[list[Plan]] = []
    for plan in plans:
        found = next((group for group in groups if torch.equal(group[0].beams, plan.beams)), None)
        groups.append([plan]) if found is None else found.append(plan)
    return groups


class Search:
    """Beam expansion at all places at once, each with its own beam, as far as the largest of some like plans goes."""

    def __init__(self, places: Places, plans: Sequence[Plan]) -> None:
        self.places, self.plans, self.beams = places, plans, plans[0].beams
        self.budgets, self.depths = (
            torch.stack([getattr(plan, name) for plan in plans]).amax(0) for name in ("budgets", "depths")
        )
        budgets = self.budgets
        self.beam = int(self.beams.max())
        count, device = len(budgets), budgets.device
        self.live = torch.nonzero(budgets > 0)[:, 0]  # places that still grow
        self.last = torch.zeros(count, device=device)  # score of the deepest node of the true path so far
        self.on_path = budgets > 0  # whether the true path was in the tree so far
        self.true_row = torch.arange(count, device=device)  # its row in the states of the level above
        self.best = torch.full((count, max(1, int(budgets.max()))), -torch.inf, device=device)  # scores, best first
        self.levels: list[tuple[Tensor, Tensor]] = []  # places [n] and scores [n, C]
        self.path: list[tuple[Tensor, Tensor, Tensor]] = []  # places [m], scores [m] and columns [m] of true nodes

    def run(self) -> list[Tensor]:
        """[N] accepted nodes, by plan."""
        states, own = self.places.first[self.live], empty_own(self.places.network)
        rows = torch.arange(len(self.live), device=self.live.device)[:, None]  # [n, 1] row of each slot in `states`
        base = torch.zeros(len(self.live), 1, device=self.live.device)  # [n, slots] score of each slot
        self.true_row[self.live] = rows[:, 0]
        for depth in range(1, int(self.depths.max()) + 1 if len(self.live) else 0):
            level = self._candidates(states, rows, base)
            self._follow(level, depth)
            kept = self._frontier(level, depth)
            if kept is None:
                break
            rows, base, tokens, parents, place = kept
            own = [[(key[parents], value[parents]) for key, value in pairs] for pairs in own]
            states = self.places.expand(own, states[parents], tokens, place, depth)
        return [self._survivors(plan) for plan in self.plans]

    def _candidates(self, states: Tensor, rows: Tensor, base: Tensor) -> _Level:
        """Children of every slot of every live place, -inf where the slot is empty or the place's beam is narrower."""
        tokens, values = self.places.children(states, self.beam)
        column = torch.arange(values.shape[1], device=values.device)
        slot_ok = rows >= 0
        safe = rows.clamp(min=0)
        fits = slot_ok[:, :, None] & (column < self.beams[self.live][:, None])[:, None]
        scores = torch.where(fits, base[:, :, None] + values[safe], -torch.inf)
        parents = safe[:, :, None].expand_as(scores)
        return _Level(scores=scores.flatten(1), tokens=tokens[safe].flatten(1), parents=parents.flatten(1))

    def _follow(self, level: _Level, depth: int) -> None:
        """Note the true path's node among the candidates, or that it left the tree."""
        self.levels.append((self.live, level.scores))
        truth = self.places.truth[depth - 1][self.live]
        match = (level.tokens == truth[:, None]) & (level.parents == self.true_row[self.live][:, None])
        match &= torch.isfinite(level.scores) & self.on_path[self.live][:, None]
        found, column = match.any(1), match.int().argmax(1)
        self.on_path[self.live] = found
        place, column = self.live[found], column[found]
        score = level.scores[found].gather(1, column[:, None])[:, 0]
        self.last[place] = score
        self.path.append((place, score, column))

    def _frontier(self, level: _Level, depth: int) -> tuple[Tensor, ...] | None:
        """The nodes to expand: the beam's best of every place that can still change its length. None when none can.

        Returns rows [n, beam] (-1 where empty) and scores [n, beam] of the slots, and of the nodes, by place: tokens,
        parents' rows and places.
        """
        ordered, column = level.scores.sort(dim=1, descending=True, stable=True)
        best, column = ordered[:, : self.beam], column[:, : self.beam]
        slot = torch.arange(best.shape[1], device=best.device)
        needed = torch.isfinite(best) & (slot < self.beams[self.live][:, None])
        needed &= (depth < self.depths[self.live])[:, None]
        needed &= best > self._entrance(level)[:, None]
        # A true path that left the beam, or the budget, grows no further.
        true_column = self._by_place(self.path[-1][0], self.path[-1][2])[self.live]
        self.on_path[self.live] &= ((column == true_column[:, None]) & needed).any(1)
        needed &= self.on_path[self.live][:, None] | (best > self.last[self.live][:, None])
        keep = needed.any(1)
        if not keep.any():
            return None
        # Slots in the order of creation, empty ones last.
        column = torch.where(needed, column, level.scores.shape[1])[keep]
        column, _ = column.sort(dim=1)
        filled = column < level.scores.shape[1]
        safe = column.clamp(max=level.scores.shape[1] - 1)
        scores, tokens, parents = (x[keep].gather(1, safe) for x in (level.scores, level.tokens, level.parents))
        self.live = self.live[keep]
        rows = torch.where(filled, filled.flatten().cumsum(0).view_as(filled) - 1, -1)
        self._move_true_rows(column, rows)
        place = self.live[:, None].expand_as(filled)
        return rows, scores, tokens[filled], parents[filled], place[filled]

    def _move_true_rows(self, column: Tensor, rows: Tensor) -> None:
        """`true_row` of live places: the row that the last true node has among the nodes to expand."""
        true_column = self._by_place(self.path[-1][0], self.path[-1][2])[self.live]
        is_true = (column == true_column[:, None]) & (rows >= 0)
        self.true_row[self.live] = torch.where(is_true, rows, -1).amax(1)

    def _entrance(self, level: _Level) -> Tensor:
        """[n] score that a node must exceed for a child of it to be among the budget's best, at every live place."""
        kept = torch.cat([self.best[self.live], level.scores], dim=1).topk(self.best.shape[1], dim=1).values
        self.best[self.live] = kept
        return kept.gather(1, self.budgets[self.live][:, None] - 1)[:, 0]

    def _by_place(self, place: Tensor, value: Tensor) -> Tensor:
        """[N] values of some places, -1 elsewhere."""
        spread = torch.full((len(self.budgets),), -1, device=value.device)
        spread[place] = value
        return spread

    def _survivors(self, plan: Plan) -> Tensor:
        """Path nodes among the plan's best of all that it grows at their place; ties go to the earlier node."""
        accepted = torch.zeros_like(plan.budgets)
        for depth, (place, score, column) in enumerate(self.path, start=1):
            rank = torch.zeros_like(place)
            for other, (owners, scores) in enumerate(self.levels, start=1):
                row = self._by_place(owners, torch.arange(len(owners), device=place.device))[place]
                grown = (row >= 0) & (other <= plan.depths[place])
                theirs = torch.where(grown[:, None], scores[row.clamp(min=0)], -torch.inf)
                rank += (theirs > score[:, None]).sum(1)
                if other < depth:
                    rank += (theirs == score[:, None]).sum(1)
                elif other == depth:
                    earlier = torch.arange(theirs.shape[1], device=place.device) < column[:, None]
                    rank += ((theirs == score[:, None]) & earlier).sum(1)
            accepted[place[(rank < plan.budgets[place]) & (depth <= plan.depths[place])]] = depth
        return accepted
