"""How a budget of nodes becomes a tree: known to the runtime that drafts it and to the replay that predicts it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """How far and how wide the draft looks for a budget of nodes."""

    depth: int  # levels
    beam: int  # nodes expanded per level, and children looked at per node

    @classmethod
    def for_budget(cls, budget: int, *, chain: bool) -> "TreeShape":
        """A default until a device is measured: deep enough for the budget, wide enough to have a choice."""
        if chain or budget <= 2:
            return cls(depth=budget, beam=1)
        return cls(depth=1 + math.ceil(math.log2(budget)), beam=min(8, max(2, budget // 2)))
