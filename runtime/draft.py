"""The draft on ONNX Runtime: entries of committed states, then nodes that run on the draft's own states.

Entry p of the draft pairs the target's state at position p with token p + 1 and predicts token p + 2 (EAGLE, arXiv
2401.15077, section 3.1). A node continues an entry or another node with the draft's own output state in place of the
target's (EAGLE-3's training-time test, arXiv 2503.01840, trains for this).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import DraftConfig
from elsi_edge.runtime.bound import BoundGraph, Scratch
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.tree import ROOT, attention_bias, path_mask

ENTRY_ROWS = 256  # entries a call takes
_MOST_SHAPES = 16  # of calls whose buffers are kept


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """What one call of the draft yields. Views into buffers that the next call of its shape overwrites."""

    log_probs: NDArray[np.float32]  # [R, U] over the draft vocabulary
    states: NDArray[np.float32]  # [R, E] the draft's own states, to continue from
    # [R][K] the likeliest indices, likeliest first, where the graph found them.
    top: Sequence[Sequence[int]] | None = None

    def likeliest(self, row: int, count: int) -> list[int]:
        """Indices of the `count` likeliest of a row, likeliest first, of equal ones the lower."""
        if self.top is not None and count <= len(self.top[row]):
            return list(self.top[row][:count])
        return likeliest(self.log_probs[row], count)


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Arrays of one shape of call, and views into them."""

    bound: dict[str, NDArray[Any]]  # by the names of inputs and outputs
    ids: NDArray[np.int64]  # [T]
    given: NDArray[np.float32]  # [T, M*E] taps, or [T, E] states
    states: NDArray[np.float32]  # [R, E] the draft's own, of the rows with predictions
    scores: NDArray[np.float32]  # [R, U] log-probabilities, or logits where the graph yields those


class OrtDraft:
    """A draft graph and its projection graph, or both in one native graph; one cache, batch 1."""

    def __init__(
        self,
        draft: ort.InferenceSession,
        projection: ort.InferenceSession | None,
        *,
        config: DraftConfig,
        draft_to_target_ids: NDArray[np.int64],
    ) -> None:
        self.config = config
        self.draft_to_target_ids = draft_to_target_ids  # [U] absolute target ids
        self.cache = KvCache(blocks=config.depth, kv_heads=config.kv_heads, head_width=config.head_width)
        self._graph = BoundGraph(draft)
        self._projection = None if projection is None else BoundGraph(projection)  # None: the graph projects
        self._scratch = Scratch()
        self._made: dict[tuple[int, int, int], _Buffers] = {}  # by shape of a call
        self._seqlens, self._total = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._cached = np.zeros(1, np.int32)
        if projection is None:
            self._graph.bind_always("cached", self._cached)
        else:
            self._graph.bind_always("seqlens_k", self._seqlens)
            self._graph.bind_always("total_sequence_length", self._total)

    @property
    def length(self) -> int:
        """Entries committed."""
        return self.cache.length

    def keep(self, entries: int) -> None:
        """Forget everything but the first `entries` entries; the buffers stay."""
        self.cache.truncate(entries)

    def extend(self, next_tokens: Sequence[int], taps: NDArray[np.float32]) -> DraftStep:
        """Commit one entry per row of `taps` [T, M*E] and the token that followed it; returns the last entry's step."""
        for start in range(0, len(next_tokens), ENTRY_ROWS):
            tokens = next_tokens[start : start + ENTRY_ROWS]
            block = taps[start : start + len(tokens)]
            name, states = ("taps", block) if self._projection is None else ("state", self._project(block))
            step = self._run(tokens, name, states)
            self.cache.commit(range(len(tokens)))
        return step

    def expand(
        self, tokens: Sequence[int], states: NDArray[np.float32], depth: int, parents: Sequence[int]
    ) -> DraftStep:
        """Run T nodes at `depth` (1 = below the root) without committing.

        `states` [T, E] are their parents'; `parents` [W] are the places of the parents of all nodes run since the last
        commit, these T last, among those; ROOT for the first level.
        """
        return self._run(tokens, "state", states, depth=depth, parents=parents)

    def room(self) -> int:
        """How many levels of nodes fit before the context ends."""
        return self.config.context - self.cache.length

    def _project(self, taps: NDArray[np.float32]) -> NDArray[np.float32]:
        assert self._projection is not None
        count = len(taps)
        source = self._scratch.array("taps", (1, count, taps.shape[1]), np.float32)
        source[0] = taps
        states = self._scratch.array("projected", (1, count, self.config.width), np.float32)
        self._projection.use("taps", source)
        self._projection.use("state", states)
        self._projection.run()
        result: NDArray[np.float32] = states[0]
        return result

    def _run(
        self,
        tokens: Sequence[int],
        name: str,
        given: NDArray[np.float32],
        *,
        depth: int = 0,
        parents: Sequence[int] | None = None,
    ) -> DraftStep:
        """One call over nodes, or without `parents` over entries, each of which follows the one before it.

        `given` is the input `name`. Predictions follow every node, but the last entry alone.
        """
        count, native = len(tokens), self._projection is None
        lines = range(ROOT, count - 1) if parents is None else parents  # [W]
        width = len(lines)
        total = self.cache.length + width
        shape = (count, 1 if parents is None else count, count if name == "taps" else 0)
        self._graph.select((*shape, width if native else 0))
        self._graph.reserve(self.cache, total)
        buffers = self._buffers(*shape)
        buffers.ids[:] = tokens
        buffers.given[:] = given
        self._graph.use_all(buffers.bound)
        if native:
            bound = self._scratch.array("parents", (width,), np.int64)
            bound[:] = lines
            self._cached[0] = self.cache.length
            self._graph.use("parents", bound)
        else:
            seen = np.tri(count, dtype=np.bool_) if parents is None else path_mask(parents)[-count:]
            first = self.cache.length
            buffers.bound["position_ids"][0] = first + depth - 1 if depth else np.arange(first, first + count)
            self._seqlens[0], self._total[...] = total - 1, total
            flat = self._scratch.flat("bias", count * total, np.float32)
            self._graph.bind_input("attention_bias", attention_bias(seen, total - width, out=flat))
        self._graph.run()
        return DraftStep(
            log_probs=buffers.scores if native else log_softmax(buffers.scores),
            states=buffers.states,
            top=buffers.bound["likeliest"][0].tolist() if native else None,
        )

    def _buffers(self, count: int, rows: int, projected: int) -> "_Buffers":
        """What a call over `count` nodes binds, `projected` of them from taps, with predictions for the last `rows` of
        them; made once for each shape."""
        made = self._made.get((count, rows, projected))
        if made is None:
            width, vocab = self.config.width, self.config.draft_vocab_size
            bound: dict[str, NDArray[Any]] = {
                "input_ids": np.empty((1, count), np.int64),
                "state": np.empty((1, count - projected, width), np.float32),
                "logit_rows": np.arange(count - rows, count),
                "next_state": np.empty((1, count, width), np.float32),
            }
            if self._projection is None:
                taps, most = self._graph.inputs["taps"].shape[-1], self._graph.outputs["likeliest"].shape[-1]
                bound["taps"] = np.empty((1, projected, taps), np.float32)
                bound["log_probs"] = np.empty((1, rows, vocab), np.float32)
                bound["likeliest"] = np.empty((1, rows, most), np.int64)
            else:
                bound["position_ids"] = np.empty((1, count), np.int64)
                bound["logits"] = np.empty((1, rows, vocab), np.float32)
            made = self._made[count, rows, projected] = _Buffers(
                bound=bound,
                ids=bound["input_ids"][0],
                given=bound["taps" if projected else "state"][0],
                states=bound["next_state"][0, -rows:],
                scores=bound["logits" if "logits" in bound else "log_probs"][0],
            )
            if len(self._made) > _MOST_SHAPES:
                self._made.pop(next(iter(self._made)))
        return made


def likeliest(log_probs: NDArray[np.float32], count: int) -> list[int]:
    """Indices of the `count` largest of [U], largest first, of equal ones the lower."""
    if count == 1:
        return [int(np.argmax(log_probs))]
    count = min(count, len(log_probs))
    top = np.argpartition(-log_probs, count - 1)[:count]
    return sorted(top.tolist(), key=lambda index: (-log_probs[index], index))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Row-wise log-softmax of [R, U]."""
    result: NDArray[np.float32] = logits - logits.max(axis=-1, keepdims=True)
    result -= np.log(np.exp(result).sum(axis=-1, keepdims=True))
    return result
