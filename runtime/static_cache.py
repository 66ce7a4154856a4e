"""Keys and values of fixed width, and a graph of fixed row count over them: what static bundles run on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from elsi_edge.bundle import Bundle, GraphRole
from elsi_edge.errors import BundleError
from elsi_edge.runtime.bound import BoundGraph
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_graph, resolve_provider, session_options

_CPU = "CPUExecutionProvider"
EMBEDDING_STEM = "target-embeddings"
HIDDEN = -30_000.0  # added to the score of a slot that a row does not see; float16 holds it, and its exponential is 0


def open_static(bundle: Bundle, role: GraphRole, settings: SessionSettings) -> ort.InferenceSession:
    """Open a graph of a static bundle. Raises BundleError, ProviderError, UsageError.

    ONNX Runtime's CPU provider has no products for 16-bit activations: left alone it would dequantise every weight in
    every call, so there they are dequantised once, when the session opens. The arithmetic is the same.
    """
    options, form = session_options(settings), bundle.manifest.static
    if resolve_provider(settings.provider) != _CPU:
        # A node that the device refuses is an error, not a part that runs elsewhere.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    elif form is not None and form.activation_bits == 16:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return open_graph(bundle.graph(role), options, settings)


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


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the runtime looks up for the graphs: embeddings of tokens, rotations of positions."""

    embeddings: NDArray[Any]  # [V, E] float32, or int8 with scales
    scales: NDArray[np.float32] | None  # [V] of int8 embeddings
    rotary: NDArray[np.float32]  # [2, context, D] cosines, and sines that carry the sign of the first half

    @classmethod
    def load(cls, directory: Path, part: str) -> Self:
        """The tables of a part, "target" or "draft". Raises BundleError for a file that is missing or odd."""
        scales = directory / f"{EMBEDDING_STEM}-scales.npy"
        return cls(
            embeddings=_load(directory / f"{EMBEDDING_STEM}.npy", 2),
            scales=_load(scales, 1) if scales.is_file() else None,
            rotary=_load(directory / rotary_file(part), 3),
        )

    def embed(self, tokens: Sequence[int], out: NDArray[np.float32]) -> None:
        """Embeddings [n, E] of tokens into `out`."""
        out[...] = self.embeddings[tokens]
        if self.scales is not None:
            out *= self.scales[tokens, None]


def rotary_file(part: str) -> str:
    """Name of the table of rotations of a part, "target" or "draft"."""
    return "target-rotary.npy" if part == "target" else "draft.rotary.npy"


def _load(file: Path, rank: int) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} cannot be read ({error}); export the bundle again") from error
    if array.ndim != rank:
        raise BundleError(
            f"{file} has the shape {list(array.shape)}, {rank} axes are expected; export the bundle again"
        )
    return array


class RowGraph:
    """A graph of T rows whose buffers are bound once; rows that a call does not need are padded with zeros."""

    def __init__(self, session: ort.InferenceSession, cache: StaticCache, tables: Tables) -> None:
        self._graph, self._tables = BoundGraph(session), tables
        shapes = {name: _fixed(name, value.shape) for name, value in self._graph.inputs.items()}
        if {"embedded", "mask", "past.0.key"} - set(shapes) or shapes["mask"][-1] != cache.capacity:
            raise BundleError(
                f"a graph of this bundle is not over a cache of {cache.capacity} slots, as its manifest says; "
                "export again"
            )
        self.count = shapes["embedded"][0]  # T
        self.inputs: dict[str, NDArray[np.float32]] = {}
        for name, shape in shapes.items():
            if name.startswith("past."):
                block, kind = int(name.split(".")[1]), name.split(".")[2]
                array: NDArray[Any] = (cache.keys if kind == "key" else cache.values)[block]
                if array.shape != tuple(shape):
                    raise BundleError(f"{name} is {list(shape)}, the manifest says {list(array.shape)}; export again")
            else:
                array = self.inputs[name] = np.zeros(shape, np.float32)
            self._graph.bind_input(name, array)
        self.outputs: dict[str, NDArray[np.float32]] = {}
        for name, value in self._graph.outputs.items():
            self.outputs[name] = np.zeros(_fixed(name, value.shape), np.float32)
            self._graph.bind_output(name, self.outputs[name])

    def run(
        self, tokens: Sequence[int], positions: NDArray[np.int64], seen: NDArray[np.bool_], *, length: int, at: int
    ) -> None:
        """One call over rows for `tokens` [n], n at most T, at `positions` [n].

        Row i is written to slot at + i; a graph that yields one row of logits yields the last one's. A row sees the
        first `length` slots, and of those after them what `seen` [n, W] says.
        """
        count, inputs = len(tokens), self.inputs
        if count > self.count:
            raise ValueError(f"{count} rows, but the graph has {self.count}")
        self._tables.embed(tokens, inputs["embedded"][:count])
        inputs["embedded"][count:] = 0.0
        for name, table in zip(("cos", "sin"), self._tables.rotary, strict=True):
            inputs[name][0, 0, :count] = table[positions]
        mask, write = inputs["mask"][0, 0], inputs["write"][0, 0]
        mask[...] = HIDDEN
        mask[:count, :length] = 0.0
        mask[:count, length : length + seen.shape[1]][seen] = 0.0
        write[...] = 0.0
        write[np.arange(count), at + np.arange(count)] = 1.0
        if "select" in inputs:
            inputs["select"][...] = 0.0
            inputs["select"][0, count - 1] = 1.0
        self._graph.run()


def _fixed(name: str, shape: Sequence[int | str | None]) -> tuple[int, ...]:
    sizes = tuple(size for size in shape if isinstance(size, int))
    if len(sizes) != len(shape) or math.prod(sizes) < 1:
        raise BundleError(f"{name} has the shape {list(shape)}, a static bundle's are fixed; export again")
    return sizes
