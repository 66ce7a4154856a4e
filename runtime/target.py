"""The target on ONNX Runtime: prefill, verification of a tree or chain, commit of the accepted rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

    logits: NDArray[np.float32]  # [R, V]; [0, V] where `likeliest` stands for them
    taps: NDArray[np.float32]  # [T, M*E] tapped states, side by side; [T, 0] in a graph without taps
    likeliest: tuple[int, ...] | None = None  # [R] the token of each row's largest logit, of equal ones the lowest


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

    def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> TargetStep:
        """Run the root and the tree's nodes without committing: logits [N + 1, V], taps [N + 1, M*E].

        With `greedy` nothing but the likeliest tokens is asked for, which a target may yield in the logits' place.
        """
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification in the cache."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Arrays of one shape of call, and views into them: made once, since after a step every view takes microseconds."""

    bound: dict[str, NDArray[Any]]  # by the names of inputs and outputs
    ids: NDArray[np.int64]  # [T]
    wanted: NDArray[np.int64]  # [R] rows whose logits are wanted
    parents: NDArray[np.int64]  # [T]
    logits: NDArray[np.float32]  # [R, V]
    taps: NDArray[np.float32]  # [T, M*E]
    likeliest: NDArray[np.int64]  # [R]


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
        self._made: dict[tuple[int, bool], _Buffers] = {}  # of verifications, by rows and whether greedy
        self._finds = "likeliest" in graph.outputs  # each row's likeliest token, and logits only where they are wanted
        self._wanted = np.ones(1, np.int64)
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        if self._finds:
            graph.bind_always("logits_wanted", self._wanted)
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

    def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> TargetStep:
        """Logits [N + 1, V] and taps [N + 1, M*E] of the root and every node; nothing is committed.

        With `greedy`, and a graph that finds them, the likeliest tokens come in place of the logits.
        """
        return self.run(tree, root, logit_rows=range(tree.size + 1), greedy=greedy and self._finds)

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification in the cache."""
        self.cache.commit(rows)

    def run(self, tree: Tree, root: int, *, logit_rows: Sequence[int], greedy: bool = False) -> TargetStep:
        """One call over the root and the tree's nodes; logits of the named rows only, or their likeliest tokens."""
        rows, cached = tree.size + 1, self.cache.length
        if not self.is_tree and not tree.is_chain:
            raise ValueError("this target graph has the chain form; it cannot verify a tree")
        verifies = logit_rows == range(rows)  # which comes in few shapes; prompts come in many
        self._graph.select((rows, greedy) if verifies else None)
        self._graph.reserve(self.cache, cached + rows + self._extra)
        self._total[...] = cached + rows + self._extra
        self._seqlens[0] = cached if self._native else cached + rows + self._extra - 1
        buffers = self._made.get((rows, greedy)) if verifies else None
        if buffers is None:
            buffers = self._buffers(rows, len(logit_rows), greedy=greedy)
            buffers.wanted[:] = logit_rows
            if verifies:
                self._made[rows, greedy] = buffers
        buffers.ids[:] = (root, *tree.tokens)
        self._graph.use_all(buffers.bound)
        if self._finds:
            self._wanted[0] = not greedy
        if self._native:
            buffers.parents[:] = (-1, *[parent + 1 for parent in tree.parents])  # rows: the root is row 0
        elif self.is_tree:
            self._bind_tree(tree, rows, cached)
        self._graph.run()
        found = tuple(buffers.likeliest.tolist()) if greedy else None
        return TargetStep(logits=buffers.logits, taps=buffers.taps, likeliest=found)

    def _buffers(self, rows: int, wanted: int, *, greedy: bool) -> "_Buffers":
        """What a call over `rows` rows binds, of which it wants the logits of `wanted`."""
        array = self._scratch.array
        bound = {
            "input_ids": array("ids", (1, rows), np.int64),
            "logit_rows": np.empty(wanted, np.int64),
            "logits": array("logits", (1, 0 if greedy else wanted, self.vocab_size), np.float32),
        }
        taps = array("taps", (1, rows, self.tap_width), np.float32)
        parents, likeliest = np.empty(rows, np.int64), np.empty((1, wanted), np.int64)
        if self.tap_width:
            bound["taps"] = taps
        if self._native:
            bound["parents"] = parents
        if self._finds:
            bound["likeliest"] = likeliest
        return _Buffers(
            bound=bound,
            ids=bound["input_ids"][0],
            wanted=bound["logit_rows"],
            parents=parents,
            logits=bound["logits"][0],
            taps=taps[0],
            likeliest=likeliest[0],
        )

    def _bind_tree(self, tree: Tree, rows: int, cached: int) -> None:
        positions = self._scratch.array("positions", (1, rows), np.int64)
        positions[0] = cached + tree.depths()
        self._graph.use("position_ids", positions)
        seen, depths = tree.ancestors(), tree.depths()
        for name, window in self._biases.items():
            flat = self._scratch.flat(name, rows * (cached + rows), np.float32)
            bias = attention_bias(seen, cached, out=flat, window=window, depths=depths)
            self._graph.bind_input(name, bias)
