"""The optimiser seam: AdamW, its schedule over the budget, and the moving average of the weights."""

import math

import torch
from torch import Tensor, nn

from elsi_edge.draft.settings import TrainSettings

_BETAS = (0.9, 0.95)


def make_optimiser(network: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW over the trained weights; norms are not decayed. Another optimiser is another function like this one."""
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=_BETAS, eps=1e-8, fused=True)


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """Linear warmup, then a cosine down to the floor; `progress` is the share of the budget used, 0..1."""
    if progress < settings.warmup:
        return settings.lr * max(progress / settings.warmup, 0.01)
    done = min(1.0, (progress - settings.warmup) / max(1e-9, 1.0 - settings.warmup))
    return settings.lr * (settings.floor + (1.0 - settings.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


class MovingAverage:
    """Exponential moving average of the trained weights, with a short memory in the first steps."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Take in the weights after `step` optimiser steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = zip(*((self.weights[n], w) for n, w in network.named_parameters()), strict=True)
        torch._foreach_lerp_(list(averages), list(weights), 1.0 - decay)


def optimiser_tensors(network: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as flat names `<weight>/<entry>`."""
    return {
        f"{name}/{entry}": value.detach().clone()
        for name, weight in network.named_parameters()
        for entry, value in optimiser.state.get(weight, {}).items()
    }


def restore_optimiser(network: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimiser_tensors` gave."""
    weights = dict(network.named_parameters())
    for key, value in tensors.items():
        name, entry = key.split("/")
        optimiser.state[weights[name]][entry] = value.clone()
