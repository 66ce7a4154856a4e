"""Where a run stands on held-out rows: its last evaluation, its best one, and whether it has stopped getting better."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from elsi_edge.draft.data import Row, ShardSet, epoch_batches
from elsi_edge.draft.evaluate import CHAIN, Evaluation, evaluate, replayed_tau
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.optimiser import MovingAverage
from elsi_edge.draft.replay import greedy
from elsi_edge.draft.resume import TrainState, copy_weights
from elsi_edge.draft.rounding import rounded
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.processes import Processes

_Item = TypeVar("_Item")


class Judge:
    """Evaluates the moving average on the held-out rows; with patience it keeps the best one, and says when to stop."""

    def __init__(
        self,
        data: ShardSet,
        held_out: list[Row],
        ids: Tensor,
        settings: TrainSettings,
        dtype: torch.dtype,
        group: Processes,
    ) -> None:
        """`ids` [U] are the draft's absolute target ids; `group` shares the rows."""
        self.data, self.ids, self.settings, self.dtype, self.group = data, ids, settings, dtype, group
        self.evaluation: Evaluation | None = None
        self.evaluated = -1  # step of the last evaluation
        self.best, self.stale = -1.0, 0  # best mean agreement; evaluations since
        self.best_weights: dict[str, Tensor] = {}  # of the best evaluation, kept where the run may stop early
        self.best_evaluation: Evaluation | None = None
        batches = epoch_batches(held_out, budget=settings.batch_tokens, seed=0, epoch=0)
        kept = _up_to(batches, settings.evaluate_tokens, lambda rows: sum(row.length for row in rows))
        self._batches = [data.batch(rows, CHAIN).to(ids.device) for rows in kept[group.rank :: group.count]]
        self._replayed = _up_to(greedy(held_out), settings.replay_tokens, lambda row: row.records)

    def judge(self, network: DraftNetwork, average: MovingAverage, step: int) -> Evaluation:
        """Evaluate the average's weights, rounded as the settings say; `network` is left as it was."""
        trained = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        copy_weights(network, average.weights)
        with rounded(network, self.settings.qat):
            result = evaluate(network, self._batches, self.ids, self.dtype, self.group)
            if self._replayed:
                tau, answers = replayed_tau(network, self.data, self._replayed, self.ids, self.group)
                result = replace(result, tau=tau, replayed=answers)
        copy_weights(network, trained)
        self.evaluation, self.evaluated = result, step
        self.stale = 0 if result.score > self.best else self.stale + 1
        if result.score > self.best and self.settings.patience > 0:
            self.best_weights = {name: weight.clone() for name, weight in average.weights.items()}
            self.best_evaluation = result
        self.best = max(self.best, result.score)
        return result

    def worn_out(self) -> bool:
        """Whether held-out agreement has not risen for as many evaluations as patience allows."""
        return 0 < self.settings.patience <= self.stale

    def standing(self) -> dict[str, Any]:
        """Its part of a TrainState."""
        return {
            "best": self.best,
            "stale": self.stale,
            "evaluated": self.evaluated,
            "evaluation": {} if self.evaluation is None else self.evaluation.plain(),
            "best_weights": {name: weight.cpu() for name, weight in self.best_weights.items()},
            "best_evaluation": {} if self.best_evaluation is None else self.best_evaluation.plain(),
        }

    def restore(self, state: TrainState, device: torch.device) -> None:
        """Stand where `state` stood."""
        self.best, self.stale, self.evaluated = state.best, state.stale, state.evaluated
        self.evaluation, self.best_evaluation = _evaluation(state.evaluation), _evaluation(state.best_evaluation)
        self.best_weights = {name: weight.to(device) for name, weight in state.best_weights.items()}


def _evaluation(plain: dict[str, Any]) -> Evaluation | None:
    return Evaluation(**{**plain, "agreement": tuple(plain["agreement"])}) if plain else None


def _up_to(items: Sequence[_Item], tokens: int, size: Callable[[_Item], int]) -> list[_Item]:
    """The first items whose sizes come to `tokens` tokens."""
    kept: list[_Item] = []
    for item in items:
        if sum(map(size, kept)) >= tokens:
            break
        kept.append(item)
    return kept
