"""The source model and the draft under torch, as the yardstick of an export."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elsi_edge.artifacts import LayerSelection
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.draft.network import DraftCache, DraftNetwork
from elsi_edge.errors import ModelError
from elsi_edge.torch_model import embedding_table, load_causal_lm

Floats = NDArray[np.float32]


class Reference:
    """The source model in float32; logits and block-input residuals of a token sequence."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = load_causal_lm(directory, feature="exporting a model", dtype=torch.float32)
        base = self._model.base_model
        if not hasattr(base, "layers") or not hasattr(base, "norm"):
            raise ModelError(f"{directory}: found no stack of blocks with a final norm; this family is not exported")
        self._blocks, self._norm = base.layers, base.norm
        self.embeddings: torch.Tensor = embedding_table(self._model)

    def run(self, ids: Sequence[int], selection: LayerSelection | None, last: int = 0) -> tuple[Floats, Floats]:
        """Logits [T, V], of the `last` rows alone where that is not 0, and the selection's taps side by side [T, M*E]
        (M = 0 without one)."""
        found: dict[int, torch.Tensor] = {}
        handles = []
        for tap in () if selection is None else selection.taps:
            module = self._norm if tap == len(self._blocks) else self._blocks[tap]

            def keep(_: Any, args: Any, kwargs: Any, tap: int = tap) -> None:
                found[tap] = args[0] if args else kwargs["hidden_states"]

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            with torch.inference_mode():
                logits = self._model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=last).logits[0]
                if selection is not None and selection.state == "final-norm":
                    found = {tap: self._norm(state) for tap, state in found.items()}
        finally:
            for handle in handles:
                handle.remove()
        taps = torch.cat([found[tap][0] for tap in sorted(found)], -1) if found else torch.empty(len(ids), 0)
        return logits.float().numpy(), taps.float().numpy()


class DraftReference:
    """The draft's network with its stored weights."""

    def __init__(self, draft: LoadedDraft, embeddings: torch.Tensor) -> None:
        self._network = DraftNetwork(draft.config, embeddings)
        self._network.load_state_dict({name: torch.from_numpy(value) for name, value in draft.tensors.items()})
        self._network.eval()

    def rollout(self, next_tokens: Sequence[int], taps: Floats, token: int) -> tuple[Floats, Floats]:
        """Log-probabilities [U] after entries for `taps` [T, M*E], then after one node on the draft's own state."""
        count = len(next_tokens)
        cache = DraftCache()
        with torch.inference_mode():
            states = self._network.project(torch.from_numpy(taps))[None]
            positions = torch.arange(count)[None]
            logits, own = self._network.forward_step(states, torch.tensor([list(next_tokens)]), positions, cache)
            more, _ = self._network.forward_step(own[:, -1:], torch.tensor([[token]]), torch.tensor([[count]]), cache)
        return tuple(torch.log_softmax(x[0, -1].float(), -1).numpy() for x in (logits, more))  # type: ignore[return-value]
