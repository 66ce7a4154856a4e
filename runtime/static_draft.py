"""The draft of a static bundle: entries in blocks of R rows, nodes of a level in one graph of w rows."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import DraftConfig
from elsi_edge.bundle import Bundle
from elsi_edge.runtime.draft import DraftStep, log_softmax
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.static_cache import RowGraph, StaticCache, Tables, open_static
from elsi_edge.runtime.tree import path_mask


class StaticDraft:
    """Two graphs over one cache: entries read taps, nodes the draft's own states (see `elsi_edge.runtime.draft`)."""

    def __init__(
        self,
        entry: ort.InferenceSession,
        level: ort.InferenceSession,
        *,
        config: DraftConfig,
        context: int,
        draft_to_target_ids: NDArray[np.int64],
        tables: Tables,
    ) -> None:
        self.config = config
        self.draft_to_target_ids = draft_to_target_ids  # [U] absolute target ids
        slots = min(context, config.context)
        self.cache = StaticCache(
            blocks=config.depth, kv_heads=config.kv_heads, head_width=config.head_width, slots=slots
        )
        self._entry, self._level = (RowGraph(one, self.cache, tables) for one in (entry, level))

    @property
    def length(self) -> int:
        """Entries committed."""
        return self.cache.length

    def keep(self, entries: int) -> None:
        """Forget everything but the first `entries` entries."""
        self.cache.truncate(entries)

    def room(self) -> int:
        """How many levels of nodes fit before the cache ends."""
        return self.cache.capacity - self.cache.length

    def extend(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> DraftStep:
        """Commit one entry per row of `taps` [T, M*E] and the token that followed it; returns the last entry's step."""
        graph, cache = self._entry, self.cache
        cache.clear(cache.length)  # the nodes of the round before
        for start in range(0, len(next_tokens), graph.count):
            tokens = next_tokens[start : start + graph.count]
            count = len(tokens)
            graph.inputs["taps"][:count], graph.inputs["taps"][count:] = taps[start : start + count], 0.0
            positions = np.arange(cache.length, cache.length + count)
            graph.run(tokens, positions, np.tri(count, dtype=np.bool_), length=cache.length, at=cache.length)
            cache.store(graph, range(count), cache.length)
            cache.length += count
        return DraftStep(
            log_probs=log_softmax(graph.outputs["logits"]), states=graph.outputs["next_state"][count - 1 : count].copy()
        )

    def expand(
        self, tokens: Sequence[int], states: NDArray[np.float32], depth: int, parents: Sequence[int]
    ) -> DraftStep:
        """Run T nodes at `depth` (1 = below the root) without committing.

        `states` [T, E] are their parents'; `parents` [W] are the places of the parents of all nodes run since the last
        commit, these T last, among those; ROOT for the first level.
        """
        graph, cache = self._level, self.cache
        seen = path_mask(parents)[-len(tokens) :]
        first = cache.length + len(parents) - len(tokens)
        cache.clear(first)
        log_probs, own = [], []
        for start in range(0, len(tokens), graph.count):
            count = min(graph.count, len(tokens) - start)
            some = slice(start, start + count)
            graph.inputs["state"][:count], graph.inputs["state"][count:] = states[some], 0.0
            positions = np.full(count, cache.length + depth - 1)
            graph.run(tokens[some], positions, seen[some], length=cache.length, at=first + start)
            cache.store(graph, range(count), first + start)
            log_probs.append(log_softmax(graph.outputs["logits"][:count]))
            own.append(graph.outputs["next_state"][:count].copy())
        return DraftStep(log_probs=np.concatenate(log_probs), states=np.concatenate(own))


def open_static_draft(
    bundle: Bundle, config: DraftConfig, draft_to_target_ids: NDArray[np.int64], settings: SessionSettings
) -> StaticDraft:
    """The draft of a static bundle. Raises BundleError, ProviderError, UsageError."""
    return StaticDraft(
        open_static(bundle, "static-entry", settings),
        open_static(bundle, "static-level", settings),
        config=config,
        context=bundle.manifest.context,
        draft_to_target_ids=draft_to_target_ids,
        tables=Tables.load(bundle.directory, "draft"),
    )
