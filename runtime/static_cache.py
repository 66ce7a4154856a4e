"""Keys and values of fixed width, and a graph of fixed row count over them: what static bundles run on."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.errors import BundleError
from elsi_edge.runtime.ort import BoundGraph

HIDDEN = -30_000.0  # added to the score of a slot that a row does not see; float16 holds it, and its exponential is 0


class StaticCache:
    """Per block the keys [1, H, D, C] and values [1, H, C, D], float32; a slot that holds no token is zero.

    `length` slots are committed; a draft's nodes lie beyond them until the next commit.
    """

    def __init__(self, *, blocks: int, kv_heads: int, head_width: int, slots: int) -> None:
        self.capacity = slots  # C
        self.length = 0  # S, slots committed
        self._end = 0  # first slot from which all are zero
        self.keys = [np.zeros((1, kv_heads, head_width, slots), np.float32) for _ in range(blocks)]
        self.values = [np.zeros((1, kv_heads, slots, head_width), np.float32) for _ in range(blocks)]

    def store(self, graph: "RowGraph", rows: Sequence[int], at: int) -> None:
        """Put rows of a graph's last run into the slots from `at` on. Raises ValueError beyond the last slot."""
        end = at + len(rows)
        if end > self.capacity:
            raise ValueError(f"rows up to slot {end} do not fit a cache of {self.capacity}")
        taken: Any = slice(0, len(rows)) if list(rows) == list(range(len(rows))) else list(rows)
        for block, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[..., at:end] = graph.outputs[f"new.{block}.key"][..., taken]
            values[:, :, at:end] = graph.outputs[f"new.{block}.value"][:, :, taken]
        self._end = max(self._end, end)

    def clear(self, start: int) -> None:
        """Zero the slots from `start` on: a graph adds its rows to what a slot holds."""
        if start < self._end:
            for keys, values in zip(self.keys, self.values, strict=True):
                keys[..., start : self._end] = 0.0
                values[:, :, start : self._end] = 0.0
            self._end = start

    def truncate(self, length: int) -> None:
        """Forget everything from slot `length` on."""
        self.length = min(self.length, length)
        self.clear(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(array.nbytes for array in (*self.keys, *self.values))


class RowGraph:
    """A graph of T rows whose buffers are bound once; rows that a call does not need are padded."""

    def __init__(self, session: ort.InferenceSession, cache: StaticCache) -> None:
        self._graph = BoundGraph(session)
        shapes = {name: _fixed(name, value.shape) for name, value in self._graph.inputs.items()}
        if {"input_ids", "mask", "past.0.key"} - set(shapes) or shapes["mask"][-1] != cache.capacity:
            raise BundleError(
                f"a graph of this bundle is not over a cache of {cache.capacity} slots, as its manifest says; "
                "export again"
            )
        self.count = shapes["input_ids"][0]  # T
        self.inputs: dict[str, NDArray[Any]] = {}
        for name, shape in shapes.items():
            if name.startswith("past."):
                block, kind = int(name.split(".")[1]), name.split(".")[2]
                array: NDArray[Any] = (cache.keys if kind == "key" else cache.values)[block]
                if array.shape != tuple(shape):
                    raise BundleError(f"{name} is {list(shape)}, the manifest says {list(array.shape)}; export again")
            else:
                dtype = np.int64 if "int64" in self._graph.inputs[name].type else np.float32
                array = self.inputs[name] = np.zeros(shape, dtype)
            self._graph.bind_input(name, array)
        self.outputs: dict[str, NDArray[np.float32]] = {}
        for name, value in self._graph.outputs.items():
            self.outputs[name] = np.zeros(_fixed(name, value.shape), np.float32)
            self._graph.bind_output(name, self.outputs[name])

    def run(
        self, tokens: Sequence[int], positions: NDArray[np.int64], seen: NDArray[np.bool_], *, length: int, at: int
    ) -> None:
        """One call over rows for `tokens` [n], n at most T, at `positions` [n].

        Row i is written to slot at + i. It sees the first `length` slots, and of those after them what `seen` [n, W]
        says.
        """
        count, inputs = len(tokens), self.inputs
        if count > self.count:
            raise ValueError(f"{count} rows, but the graph has {self.count}")
        inputs["input_ids"][:count], inputs["input_ids"][count:] = tokens, 0
        inputs["position_ids"][:count], inputs["position_ids"][count:] = positions, 0
        mask, write = inputs["mask"][0, 0], inputs["write"][0, 0]
        mask[...] = HIDDEN
        mask[:count, :length] = 0.0
        mask[:count, length : length + seen.shape[1]][seen] = 0.0
        write[...] = 0.0
        write[np.arange(count), at + np.arange(count)] = 1.0
        self._graph.run()


def _fixed(name: str, shape: Sequence[int | str | None]) -> tuple[int, ...]:
    sizes = tuple(size for size in shape if isinstance(size, int))
    if len(sizes) != len(shape) or math.prod(sizes) < 1:
        raise BundleError(f"{name} has the shape {list(shape)}, a static bundle's are fixed; export again")
    return sizes
