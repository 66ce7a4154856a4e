"""8-bit matrices with calibrated activations, as QuantizeLinear and DequantizeLinear pairs that NPU compilers fold.

Every matrix is int8 with a scale for each row of [out, in]; what it reads and yields is quantised to uint16 (A16W8) or
uint8 (A8W8) over the whole tensor, with the range that calibration saw. Everything between products stays in float: the
residual stream, norms, attention and the cache. Massive activations (one coordinate of SmolLM2's first token reaches
24,900 where others are near 6) would leave a residual of one scale nothing but its outliers. They are made in the MLP:
what a down_proj reads and yields reaches 300 times its root mean square there, so it keeps 16 bits in the A8W8 form.

ONNX Runtime's own `quantize_static` is not used: it writes the weights once for each graph, here all graphs share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from elsi_edge.errors import ModelError
from elsi_edge.export.static_graph import Floats, GraphWriter, Ranges, WeightFile
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_session
from elsi_edge.runtime.static_cache import RowGraph, StaticCache, Tables

ActivationBits = Literal[8, 16]

_LARGEST = 127  # of int8 weights, symmetric
# Matrices whose activations keep 16 bits in either form. In 8 the massive activations that a down_proj reads and yields
# leave the others no levels (SmolLM2: 1.7 nats from the source, 0.12 with them in 16); of an lm_head (its own, the tied
# embeddings or a draft's) many tokens would tie for the first. Both sides of a product have one width, as QNN asks.
_WIDE = ("down_proj", "lm_head", "embed_tokens", "head")


@dataclass(frozen=True, kw_only=True)
class QdqMatrices:
    """Matrices in int8, their activations in `activation_bits`."""

    ranges: Ranges
    activation_bits: ActivationBits

    def write_table(self, table: Floats, name: str, stem: Path, weights: WeightFile) -> None:
        """STEM.npy, int8, and STEM-scales.npy [V]."""
        for part, file, kind in (
            (packed(table), stem.with_suffix(".npy"), "int8"),
            (scales_of(table), stem.with_name(f"{stem.name}-scales.npy"), "scale"),
        ):
            np.save(file, part, allow_pickle=False)
            weights.adopt(f"{name}.{kind}", file)

    def product(self, graph: GraphWriter, source: str, weight: str, result: str) -> str:
        """A Gemm between a dequantised activation and a dequantised weight, its result quantised again."""
        matrix = graph.weight(f"{weight}.int8", lambda: packed(graph.read(weight)))
        scale = graph.weight(f"{weight}.scale", lambda: scales_of(graph.read(weight)))
        zero = graph.weight(f"{weight}.zero", lambda: np.zeros(len(graph.read(weight)), np.int8))
        matrix = graph.node("DequantizeLinear", [matrix, scale, zero], f"{weight}.dequantised", axis=0)
        wide = self.activation_bits == 16 or weight.removesuffix(".weight").rsplit(".", 1)[-1] in _WIDE
        kind = np.uint16 if wide else np.uint8
        read = self._quantised(graph, source, kind)
        graph.node("Gemm", [read, matrix], f"{result}.exact", transB=1)
        return self._quantised(graph, f"{result}.exact", kind, result)

    def _quantised(self, graph: GraphWriter, source: str, kind: type[np.generic], result: str | None = None) -> str:
        """`source` rounded to the levels of an unsigned type; the range is that of `result`, or of `source` itself."""
        name = result or source
        scale, zero = levels(self.ranges[name], kind)
        wires = [graph.constant(scale), graph.constant(zero, kind)]
        graph.node("QuantizeLinear", [source, *wires], f"{name}.quantised")
        return graph.node("DequantizeLinear", [f"{name}.quantised", *wires], result or f"{source}.dequantised")


def levels(limits: tuple[float, float], kind: type[np.generic]) -> tuple[float, int]:
    """Scale and zero point that spread an unsigned type over a range, zero being one of its levels."""
    most = int(np.iinfo(kind).max)  # type: ignore[type-var]
    low, high = min(limits[0], 0.0), max(limits[1], 0.0)
    scale = max((high - low) / most, 1e-12)
    return float(np.float32(scale)), int(np.clip(round(-low / scale), 0, most))


def scales_of(weight: Floats) -> Floats:
    """Scales [out] that spread int8 over the rows of [out, in]."""
    largest: Floats = np.abs(weight).max(axis=1)
    scales: Floats = np.maximum(largest / np.float32(_LARGEST), np.float32(1e-12))
    return scales


def packed(weight: Floats) -> NDArray[np.int8]:
    """The int8 matrix: rows over their scales, to the nearest."""
    rounded: Floats = np.clip(np.rint(weight / scales_of(weight)[:, None]), -_LARGEST, _LARGEST)
    return rounded.astype(np.int8)


class Ranging:
    """A float graph that also yields what its products read and yield, to see their ranges."""

    def __init__(self, graph: GraphWriter, directory: Path, cache: StaticCache, tables: Tables) -> None:
        """Write the graph into `directory`, where its weights lie, and open it."""
        model = onnx.shape_inference.infer_shapes(graph.model())
        known = {value.name: value for value in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
        there = {value.name for value in model.graph.output}
        self._names = list(dict.fromkeys(graph.observed))
        model.graph.output.extend(
            known[name] for name in self._names if name not in there and name not in self._inputs_of(model)
        )
        path = directory / f"{graph.name}.ranges.onnx"
        path.write_bytes(model.SerializeToString())
        self.rows = RowGraph(open_session(path, SessionSettings()), cache, tables)
        path.unlink()
        self.ranges: dict[str, tuple[float, float]] = {}

    @staticmethod
    def _inputs_of(model: onnx.ModelProto) -> set[str]:
        return {value.name for value in model.graph.input}

    def note(self, count: int) -> None:
        """Widen the ranges by the first `count` rows of the last run. Raises ModelError for what is not finite."""
        for name in self._names:
            values = self.rows.outputs[name] if name in self.rows.outputs else self.rows.inputs[name]
            some = values[:count] if len(values) == self.rows.count else values
            low, high = float(some.min()), float(some.max())
            if not np.isfinite([low, high]).all():
                raise ModelError(f"calibration: the values {name} are not finite; export with --precision fp32")
            before = self.ranges.get(name, (low, high))
            self.ranges[name] = (min(before[0], low), max(before[1], high))


def range_target(graph: GraphWriter, work: Path, texts: Sequence[Sequence[int]]) -> tuple[Ranges, list[Floats]]:
    """Ranges of a target's activations over token sequences, and the taps [T, M*E] of each (none without a tap)."""
    cache = _cache_for(graph)
    ranging = Ranging(graph, work, cache, Tables.load(work, "target"))
    rows, found = ranging.rows, list[Floats]()
    for ids in texts:
        cache.truncate(0)
        taps = []
        for start in range(0, len(ids), rows.count):
            block = ids[start : start + rows.count]
            count = len(block)
            places = cache.length + np.arange(count)
            rows.run(block, places, np.tri(count, dtype=np.bool_), length=cache.length, at=cache.length)
            ranging.note(count)
            if "taps" in rows.outputs:
                taps.append(rows.outputs["taps"][:count].copy())
            cache.store(rows, range(count), cache.length)
            cache.length += count
        if taps:
            found.append(np.concatenate(taps))
    return ranging.ranges, found


def range_draft(
    entry: GraphWriter, level: GraphWriter, work: Path, texts: Sequence[Sequence[int]], taps: Sequence[Floats]
) -> Ranges:
    """Ranges of a draft's activations over entries, and over one node after each entry on the draft's own state."""
    cache, tables = _cache_for(entry), Tables.load(work, "draft")
    entries, nodes = Ranging(entry, work, cache, tables), Ranging(level, work, cache, tables)
    for ids, states in zip(texts, taps, strict=True):
        cache.truncate(0)
        for start in range(0, len(ids) - 2, entries.rows.count):
            count = min(entries.rows.count, len(ids) - 2 - start)
            length, places = cache.length, cache.length + np.arange(count)
            sees = np.tri(count, dtype=np.bool_)
            entries.rows.inputs["taps"][:count] = states[start : start + count]
            entries.rows.run(ids[start + 1 : start + 1 + count], places, sees, length=length, at=length)
            entries.note(count)
            cache.store(entries.rows, range(count), length)
            nodes.rows.inputs["state"][:count] = entries.rows.outputs["next_state"][:count]
            beside = np.concatenate([sees, np.eye(count, dtype=np.bool_)], axis=1)
            following = ids[start + 2 : start + 2 + count]
            if length + 2 * count <= cache.capacity:
                nodes.rows.run(following, places + 1, beside, length=length, at=length + count)
                nodes.note(count)
            cache.length += count
    merged = dict(entries.ranges)
    for name, (low, high) in nodes.ranges.items():
        before = merged.get(name, (low, high))
        merged[name] = (min(before[0], low), max(before[1], high))
    return merged


def _cache_for(graph: GraphWriter) -> StaticCache:
    """An empty cache as the graph takes it."""
    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in graph.model().graph.input
    }
    _, kv_heads, head_width, slots = shapes["past.0.key"]
    blocks = sum(name.endswith(".key") for name in shapes)
    return StaticCache(blocks=blocks, kv_heads=kv_heads, head_width=head_width, slots=slots)
