"""The target on ONNX Runtime: prefill, verification of a tree or chain, commit of the accepted rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import ModelShape
from elsi_edge.errors import BundleError
from elsi_edge.runtime.bound import BoundGraph, Scratch
from elsi_edge.runtime.kv_cache import KvCache
from elsi_edge.runtime.tree import Tree, attention_bias, bias_window

PREFILL_ROWS = 256  # tokens a prefill call takes: bounds activations and the mask


@dataclass(frozen=True, kw_only=True)
class TargetStep:
    """What one call of the target yields. Views into buffers that the next call overwrites."""

    logits: NDArray[np.float32]  # [R, V]
    taps: NDArray[np.float32]  # [T, M*E] tapped states, side by side; [T, 0] in a graph without taps


class Target(Protocol):
    """The seam that the loop sees; the tests fill it with a numpy toy."""

    @property
    def length(self) -> int:
        """S, tokens in the cache."""
        ...

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` tokens of the cache; 0 empties it."""
        ...

    def prefill(self, token_ids: Sequence[int]) -> TargetStep:
        """Append and commit tokens; logits [1, V] of the last one, taps of all."""
        ...

    def verify(self, root: int, tree: Tree) -> TargetStep:
        """Run the root and the tree's nodes without committing: logits [N + 1, V], taps [N + 1, M*E]."""
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification in the cache."""
        ...


class OrtTarget:
    """A target graph in the tree, chain or native form (see `elsi_edge.export`: surgery, native_graph), batch 1."""

    def __init__(self, session: ort.InferenceSession, *, shape: ModelShape, tap_width: int) -> None:
        graph = BoundGraph(session)
        blocks = sum(name.startswith("past_key_values.") and name.endswith(".key") for name in graph.inputs)
        if blocks != shape.blocks or not {"seqlens_k", "cached"} & set(graph.inputs):
            raise BundleError(
                f"the target graph has caches for {blocks} blocks, the manifest says {shape.blocks}; export again"
            )
        self.cache = KvCache(blocks=blocks, kv_heads=shape.kv_heads, head_width=shape.head_width)
        self._native = "parents" in graph.inputs  # its attention takes parents, and sums in path order
        # Masks by the window of the blocks that read them, 0 for blocks that see everything.
        found = {name: bias_window(name) for name in graph.inputs}
        self._biases = {name: window for name, window in found.items() if window is not None}
        self.is_tree = self._native or bool(self._biases)
        self.vocab_size, self.tap_width = shape.vocab_size, tap_width
        # The chain form's attention sees one more row than the matrices do, and writes it beyond the end.
        self._extra = 0 if self.is_tree else 1
        self._graph, self._scratch = graph, Scratch()
        self._all_rows: dict[int, NDArray[np.int64]] = {}  # 0, 1, ... by their number
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        if self._native:
            graph.bind_always("cached", self._seqlens)
        else:
            graph.bind_always("seqlens_k", self._seqlens)
            graph.bind_always("total_sequence_length", self._total)

    @property
    def length(self) -> int:
        """S, tokens in the cache."""
        return self.cache.length

    @property
    def windows(self) -> tuple[int, ...]:
        """Positions that blocks see which do not see everything, ascending; of a graph in the tree form."""
        return tuple(sorted(window for window in self._biases.values() if window > 0))

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` tokens of the cache; its buffers stay."""
        self.cache.truncate(rows)

    def prefill(self, token_ids: Sequence[int]) -> TargetStep:
        """Append and commit tokens in blocks of PREFILL_ROWS rows. Returns logits [1, V] and taps [T, M*E]."""
        taps = np.empty((len(token_ids), self.tap_width), np.float32)
        # At once: growing copies what is there, which a long prompt would have again in every block.
        self._graph.reserve(self.cache, self.cache.length + len(token_ids) + self._extra)
        for start in range(0, len(token_ids), PREFILL_ROWS):
            block = token_ids[start : start + PREFILL_ROWS]
            last = start + len(block) == len(token_ids)
            step = self.run(Tree.chain(block[1:]), block[0], logit_rows=[len(block) - 1] if last else [])
            taps[start : start + len(block)] = step.taps
            self.cache.commit(range(len(block)))
        return TargetStep(logits=step.logits, taps=taps)

    def verify(self, root: int, tree: Tree) -> TargetStep:
        """Logits [N + 1, V] and taps [N + 1, M*E] of the root and every node; nothing is committed."""
        return self.run(tree, root, logit_rows=range(tree.size + 1))

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification in the cache."""
        self.cache.commit(rows)

    def run(self, tree: Tree, root: int, *, logit_rows: Sequence[int]) -> TargetStep:
        """One call over the root and the tree's nodes; logits of the named rows only."""
        rows, cached = tree.size + 1, self.cache.length
        if not self.is_tree and not tree.is_chain:
            raise ValueError("this target graph has the chain form; it cannot verify a tree")
        verifies = logit_rows == range(rows)  # which comes in few shapes; prompts come in many
        self._graph.select(rows if verifies else None)
        self._graph.reserve(self.cache, cached + rows + self._extra)
        self._total[...] = cached + rows + self._extra
        self._seqlens[0] = cached if self._native else cached + rows + self._extra - 1
        ids = self._scratch.array("ids", (1, rows), np.int64)
        ids[0] = (root, *tree.tokens)
        if verifies:
            wanted = self._all_rows.get(rows)
            if wanted is None:
                wanted = self._all_rows[rows] = np.arange(rows)
        else:
            wanted = self._scratch.array("rows", (len(logit_rows),), np.int64)
            wanted[:] = logit_rows
        logits = self._scratch.array("logits", (1, len(logit_rows), self.vocab_size), np.float32)
        taps = self._scratch.array("taps", (1, rows, self.tap_width), np.float32)
        self._graph.use("input_ids", ids)
        self._graph.use("logit_rows", wanted)
        self._graph.use("logits", logits)
        if self.tap_width:
            self._graph.use("taps", taps)
        if self._native:
            parents = self._scratch.array("parents", (rows,), np.int64)
            parents[:] = (-1, *[parent + 1 for parent in tree.parents])  # rows: the root is row 0
            self._graph.use("parents", parents)
        elif self.is_tree:
            self._bind_tree(tree, rows, cached)
        self._graph.run()
        return TargetStep(logits=logits[0], taps=taps[0])

    def _bind_tree(self, tree: Tree, rows: int, cached: int) -> None:
        positions = self._scratch.array("positions", (1, rows), np.int64)
        positions[0] = cached + tree.depths()
        self._graph.use("position_ids", positions)
        seen, depths = tree.ancestors(), tree.depths()
        for name, window in self._biases.items():
            flat = self._scratch.flat(name, rows * (cached + rows), np.float32)
            bias = attention_bias(seen, cached, out=flat, window=window, depths=depths)
            self._graph.bind_input(name, bias)
