"""The native matrix product beside MatMulNBits, and beside the machine's limits: ms by rows, in the form of a table.

    python -m tests.figures.native_matrix [--shape chain|1b] [--bits 4] [--offsets] [--threads 2] [--peak FILE]

With --offsets the native blocks of 4 bits have some, as exports write them; MatMulNBits has none in either case.
`chain` is 16 chained 2048 x 2048 matrices; `1b` one block of a model of a billion parameters, several times over.
The two are timed in turns, round after round; medians, and the spread between the quartiles.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from elsi_edge.runtime import native_ops

Widths = Sequence[tuple[int, int]]  # (inputs, columns), chained by cutting or repeating what comes out
SHAPES: dict[str, Widths] = {
    "chain": ((2048, 2048),) * 16,
    "1b": ((2048, 3072), (2048, 2048), (2048, 8192), (2048, 8192), (8192, 2048)) * 4,
}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)


def opened(widths: Widths, bits: int, threads: int, *, native: bool, offsets: bool) -> ort.InferenceSession:
    """A session over all matrices; every one reads the same input, cut to its width."""
    draw = np.random.default_rng(0)
    nodes, tensors = [], []
    for index, (inputs, columns) in enumerate(widths):
        packed = draw.integers(0, 256, (columns, inputs // 32, 4 * bits), dtype=np.uint8)
        scales = draw.uniform(-0.02, 0.02, (columns, inputs // 32)).astype(np.float32)
        tensors += [numpy_helper.from_array(packed, f"w{index}"), numpy_helper.from_array(scales, f"s{index}")]
        kind, domain = ("MatMulBlocks", native_ops.DOMAIN) if native else ("MatMulNBits", "com.microsoft")
        extra = {} if native else {"accuracy_level": 4}
        names = [f"x{inputs}", f"w{index}", f"s{index}"]
        if native and offsets:
            groups = -(-inputs // 1024)
            values = draw.integers(0, 256, (columns, groups, 32), dtype=np.uint8)
            steps = draw.uniform(0, 1e-4, (columns, groups)).astype(np.float32)
            tensors += [numpy_helper.from_array(values, f"o{index}"), numpy_helper.from_array(steps, f"t{index}")]
            names += [f"o{index}", f"t{index}"]
        node = helper.make_node(
            kind, names, [f"y{index}"], domain=domain, K=inputs, N=columns, bits=bits, block_size=32, **extra
        )
        nodes.append(node)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(f"x{k}", TensorProto.FLOAT, ["T", k]) for k in sorted({k for k, _ in widths})],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["T", n]) for i, (_, n) in enumerate(widths)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or one pool spins while the other works
    if native:
        native_ops.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Measure and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="chain")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--offsets", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--peak", type=Path, help="what native_peak printed")
    options = parser.parse_args()
    widths = SHAPES[options.shape]
    runs = {
        name: opened(widths, options.bits, options.threads, native=name == "native", offsets=options.offsets)
        for name in ("stock", "native")
    }
    draw = np.random.default_rng(1)
    feeds = {
        rows: {f"x{k}": draw.standard_normal((rows, k)).astype(np.float32) for k in {k for k, _ in widths}}
        for rows in options.rows
    }
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in runs for rows in options.rows}
    until = time.monotonic() + options.seconds
    while time.monotonic() < until or len(times["native", options.rows[-1]]) < 3:
        for rows in options.rows:
            for name, run in runs.items():
                start = time.perf_counter()
                run.run(None, feeds[rows])
                times[name, rows].append(1e3 * (time.perf_counter() - start))
    report(options, times, sum(k * n for k, n in widths))


def report(options: argparse.Namespace, times: dict[tuple[str, int], list[float]], values: int) -> None:
    """The table, then everything as one JSON line."""
    peak = json.loads(options.peak.read_text()) if options.peak else None
    lines = []
    for rows in options.rows:
        stock, native = (median(times[name, rows]) for name in ("stock", "native"))
        low, _, high = quantiles(times["native", rows], n=4)
        ratio = median(b / a for a, b in zip(times["stock", rows], times["native", rows], strict=True))
        line = {"rows": rows, "stock_ms": stock, "native_ms": native, "quartiles": [low, high], "ratio": ratio}
        if peak:
            memory = values * (options.bits / 8 + (2 + options.offsets) / 32) / peak["copy_gb_s"] / 1e6
            compute = values * rows / peak["vpdpbusd_gmac_s"] / 1e6
            line |= {"limit_ms": max(memory, compute), "of_limit": max(memory, compute) / native}
        lines.append(line)
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))  # noqa: T201
    print(json.dumps({"shape": options.shape, "bits": options.bits, "threads": options.threads, "rows": lines}))  # noqa: T201


if __name__ == "__main__":
    main()
