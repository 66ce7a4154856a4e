"""The target of a static bundle: prompts in blocks of P rows, verifications in one graph of n rows."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.artifacts import ModelShape
from elsi_edge.bundle import Bundle
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.static_cache import RowGraph, StaticCache, Tables, open_static
from elsi_edge.runtime.target import TargetStep
from elsi_edge.runtime.tree import Tree


class StaticTarget:
    """Two graphs over one cache of C slots, batch 1 (see `elsi_edge.export.static_graph` for what they compute).

    Plain decoding runs the verify graph too: a row's sums are then the same, whatever is verified beside it.
    """

    def __init__(
        self,
        prefill: ort.InferenceSession,
        verify: ort.InferenceSession,
        *,
        shape: ModelShape,
        tap_width: int,
        context: int,
        tables: Tables,
    ) -> None:
        self.cache = StaticCache(
            blocks=shape.blocks, kv_heads=shape.kv_heads, head_width=shape.head_width, slots=context
        )
        self.vocab_size, self.tap_width = shape.vocab_size, tap_width
        self._prefill, self._verify = (RowGraph(one, self.cache, tables) for one in (prefill, verify))

    @property
    def rows(self) -> int:
        """Rows of a verification at most."""
        return self._verify.count

    @property
    def length(self) -> int:
        """S, tokens in the cache."""
        return self.cache.length

    def keep(self, rows: int) -> None:
        """Forget everything but the first `rows` tokens of the cache."""
        self.cache.truncate(rows)

    def prefill(self, token_ids: Sequence[int]) -> TargetStep:
        """Append and commit tokens, a block at a time. Returns logits [1, V] of the last and taps [T, M*E].

        Raises ValueError when they do not fit the cache.
        """
        taps = np.empty((len(token_ids), self.tap_width), np.float32)
        graph = self._prefill
        for start in range(0, len(token_ids), graph.count):
            block = token_ids[start : start + graph.count]
            self._run(graph, Tree.chain(block[1:]), block[0])
            if self.tap_width:
                taps[start : start + len(block)] = graph.outputs["taps"][: len(block)]
            self._keep_rows(graph, range(len(block)))
        return TargetStep(logits=graph.outputs["logits"], taps=taps)

    def verify(self, root: int, tree: Tree, *, greedy: bool = False) -> TargetStep:
        """Logits [N + 1, V] and taps [N + 1, M*E] of the root and every node; nothing is committed.

        Raises ValueError for more rows than the graph has.
        """
        rows = tree.size + 1
        self._run(self._verify, tree, root)
        taps: NDArray[np.float32] = self._verify.outputs.get("taps", np.zeros((rows, 0), np.float32))
        return TargetStep(logits=self._verify.outputs["logits"][:rows], taps=taps[:rows])

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last verification in the cache."""
        self._keep_rows(self._verify, rows)

    def _keep_rows(self, graph: RowGraph, rows: Sequence[int]) -> None:
        self.cache.store(graph, rows, self.cache.length)
        self.cache.length += len(rows)

    def _run(self, graph: RowGraph, tree: Tree, root: int) -> None:
        length = self.cache.length
        if length + tree.size + 1 > self.cache.capacity:
            raise ValueError(f"{length} tokens and {tree.size + 1} rows do not fit a cache of {self.cache.capacity}")
        tokens = [root, *tree.tokens]
        graph.run(tokens, length + tree.depths(), tree.ancestors(), length=length, at=length)


def open_static_target(bundle: Bundle, settings: SessionSettings) -> StaticTarget:
    """The target of a static bundle. Raises BundleError, ProviderError, UsageError."""
    manifest = bundle.manifest
    return StaticTarget(
        open_static(bundle, "static-prefill", settings),
        open_static(bundle, "static-verify", settings),
        shape=manifest.shape,
        tap_width=manifest.tap_width,
        context=manifest.context,
        tables=Tables.load(bundle.directory, "target"),
    )
