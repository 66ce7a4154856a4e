"""Optimisers, the learning rate over the budget, and the moving average of the weights."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.settings import TrainSettings

_BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of Newton-Schulz, steep at 0 (K. Jordan, Muon, 2024)
_ITERATIONS = 5
_RMS = 0.2  # of an AdamW update's entries; Muon's are scaled to it, so that one learning rate serves both


def make_optimisers(network: DraftNetwork, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW over the trained weights, or Muon for the blocks' matrices and AdamW for the rest; norms are not decayed.

    The head counts as the rest: its rows are tokens, and Muon is for matrices between hidden states.
    """
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    hidden = [name for name, weight in trained.items() if weight.ndim == 2 and name != "head.weight"]
    matrices = hidden if settings.optimiser == "muon" else []
    rest = [weight for name, weight in trained.items() if name not in matrices]
    groups = [
        {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.lr, betas=_BETAS, eps=1e-8, fused=True
    )
    if not matrices:
        return [adamw]
    sizes = [network.query_size, network.kv_size, network.kv_size]
    parts = [(trained[name], sizes if name.endswith("qkv.weight") else [len(trained[name])]) for name in matrices]
    return [adamw, Muon(parts, lr=settings.lr, weight_decay=settings.weight_decay, arithmetic=settings.arithmetic)]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (K. Jordan, 2024; scaled as in arXiv 2502.16982, section 2.2)."""

    def __init__(
        self, weights: Sequence[tuple[Tensor, Sequence[int]]], *, lr: float, weight_decay: float, arithmetic: str
    ) -> None:
        """`weights`: matrices, each with the heights of the parts that are orthogonalised by themselves (q, k, v)."""
        groups = [{"params": [weight], "rows": list(rows)} for weight, rows in weights]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"].lerp_(gradient, 1.0 - _MOMENTUM)
        ahead = torch.lerp(gradient, momentum, _MOMENTUM)  # Nesterov
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        for part, update in zip(torch.split(weight, group["rows"]), torch.split(ahead, group["rows"]), strict=True):
            scale = _RMS * math.sqrt(max(part.shape))
            part.add_(orthogonalised(update, self._dtype), alpha=-group["lr"] * scale)


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Near U V^T of the matrix's singular value decomposition: singular values between 0.7 and 1.2, [n, m]."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """At a share `progress` of the budget, 0..1: linear warmup, then a cosine down to the floor ("cosine"), or the peak
    until the last share `decay` and a straight line down to the floor ("wsd")."""
    if progress < settings.warmup:
        return settings.lr * max(progress / settings.warmup, 0.01)
    if settings.schedule == "wsd":
        left = min(1.0, max(0.0, 1.0 - progress) / max(settings.decay, 1e-9))
        return settings.lr * (settings.floor + (1.0 - settings.floor) * left)
    done = min(1.0, (progress - settings.warmup) / max(1e-9, 1.0 - settings.warmup))
    return settings.lr * (settings.floor + (1.0 - settings.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


class MovingAverage:
    """Exponential moving average of the trained weights, with a short memory in the first steps."""

    def __init__(self, network: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}

    @torch.no_grad()
    def update(self, network: torch.nn.Module, step: int) -> None:
        """Take in the weights after `step` optimiser steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = zip(*((self.weights[n], w) for n, w in network.named_parameters()), strict=True)
        torch._foreach_lerp_(list(averages), list(weights), 1.0 - decay)


def optimiser_tensors(network: torch.nn.Module, optimisers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimisers' state as flat names `<weight>/<entry>`."""
    return {
        f"{name}/{entry}": value.detach().cpu().clone()
        for optimiser in optimisers
        for name, weight in network.named_parameters()
        for entry, value in optimiser.state.get(weight, {}).items()
    }


def restore_optimisers(
    network: torch.nn.Module, optimisers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimiser_tensors` gave."""
    weights = dict(network.named_parameters())
    for key, value in tensors.items():
        name, entry = key.split("/")
        weight = weights[name]
        owner = next(o for o in optimisers if any(weight is w for group in o.param_groups for w in group["params"]))
        owner.state[weight][entry] = value.clone().to(weight.device)
