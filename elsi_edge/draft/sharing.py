"""A batch over several pieces: which rows each computes, and the sum of their gradients."""

from collections.abc import Sequence

import torch

from elsi_edge.draft.data import Row
from elsi_edge.processes import Processes


def deal(rows: Sequence[Row], pieces: int) -> list[list[Row]]:
    """Rows over `pieces` pieces of about equal tokens, long rows first; a piece may be empty."""
    parts: list[list[Row]] = [[] for _ in range(pieces)]
    loads = [0] * pieces
    for row in rows if pieces == 1 else sorted(rows, key=lambda row: -row.length):
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += row.length
    return parts


def sum_gradients(network: torch.nn.Module, group: Processes) -> None:
    """Sum every gradient over the processes, in one call; a process without rows brings zeros."""
    if group.count == 1:
        return
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in trained]
    flat = group.sum_(torch.cat([part.flatten() for part in parts]))
    for weight, part in zip(trained, torch.split(flat, [w.numel() for w in trained]), strict=True):
        weight.grad = part.view_as(weight)
