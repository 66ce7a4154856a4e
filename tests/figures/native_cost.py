"""What verifying costs with the native graph, paired with the stock one: ms by rows, in turns, cache in place.

    python -m tests.figures.native_cost BUNDLE --native GRAPH [--past 256] [--seconds 40] [--rows 1 2 4 8]

GRAPH is what `elsi_edge.export.native_graph` wrote, beside the bundle's weights or a link to them.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import onnxruntime as ort

from elsi_edge.bundle import Bundle
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_graph, session_options
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree


def opened(bundle: Bundle, path: Path, settings: SessionSettings, *, native: bool) -> OrtTarget:
    """A target over one graph of the bundle."""
    options = session_options(settings)
    if native:
        native_ops.register(options)
    session: ort.InferenceSession = open_graph(path, options, settings)
    return OrtTarget(session, shape=bundle.manifest.shape, tap_width=bundle.manifest.tap_width)


def main() -> None:
    """Measure and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--native", type=Path, required=True)
    parser.add_argument("--role", default="target-chain")
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 2, 3, 4, 6, 8, 12, 16, 32))
    options = parser.parse_args()
    bundle, settings = Bundle.load(options.bundle), SessionSettings(threads=options.threads)
    targets = {
        "stock": opened(bundle, bundle.graph(options.role), settings, native=False),
        "native": opened(bundle, options.native, settings, native=True),
    }
    draw = np.random.default_rng(0)
    ids = draw.integers(100, bundle.manifest.shape.vocab_size, options.past + 64).tolist()
    for target in targets.values():
        target.prefill(ids[: options.past])
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in targets for rows in options.rows}
    until = time.monotonic() + options.seconds
    while time.monotonic() < until or len(times["native", options.rows[-1]]) < 4:
        for rows in options.rows:
            tree = Tree.chain(ids[options.past + 1 : options.past + rows])
            for name, target in targets.items():
                start = time.perf_counter()
                target.verify(ids[options.past], tree, greedy=True)
                times[name, rows].append(1e3 * (time.perf_counter() - start))
    medians = {key: median(values) for key, values in times.items()}
    lines = []
    for rows in options.rows:
        ratio = median(b / a for a, b in zip(times["stock", rows], times["native", rows], strict=True))
        line = {
            "rows": rows,
            "stock_ms": medians["stock", rows],
            "native_ms": medians["native", rows],
            "native_best_ms": min(times["native", rows]),
            "stock_best_ms": min(times["stock", rows]),
            "ratio": ratio,
            "of_native_one": medians["native", rows] / medians["native", 1],
            "of_stock_one": medians["native", rows] / medians["stock", 1],
            "quartiles": quantiles(times["native", rows], n=4),
        }
        lines.append(line)
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()), flush=True)  # noqa: T201
    print(json.dumps({"past": options.past, "threads": options.threads, "rows": lines}))  # noqa: T201


if __name__ == "__main__":
    main()
