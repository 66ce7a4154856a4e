"""The native tree attention beside GroupQueryAttention: ms a call by rows and context, caches in place, in turns.

python -m tests.figures.native_attention [--heads 9] [--kv-heads 3] [--width 64] [--seconds 15] [--threads 2]
"""

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort

from tests import one_attention

CASES = ((1, 256), (8, 256), (1, 4096), (8, 4096))  # (rows, context)


def opened(options: argparse.Namespace, *, native: bool) -> ort.InferenceSession:
    """A session over one attention."""
    numbers: dict[str, Any] = {"num_heads": options.heads, "kv_num_heads": options.kv_heads}
    session = ort.SessionOptions()
    session.intra_op_num_threads = options.threads
    if native:
        return one_attention.open_native(session, window=-1, scale=0.0, softcap=0.0, **numbers)
    return one_attention.open_stock(session, **numbers)


def bound(run: ort.InferenceSession, options: argparse.Namespace, rows: int, past: int) -> tuple[Any, list[Any]]:
    """A binding with caches of `past` tokens in place, and what it must keep alive."""
    draw, width = np.random.default_rng(0), options.width
    caches = [draw.standard_normal((1, options.kv_heads, past + rows, width)).astype(np.float32) for _ in range(2)]
    every = options.heads + 2 * options.kv_heads
    angles = draw.uniform(0, 6, (past + rows, width // 2))
    feed: dict[str, Any] = {
        "qkv": draw.standard_normal((1, rows, every * width)).astype(np.float32),
        "past_key": caches[0],
        "past_value": caches[1],
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "cached": np.array([past], np.int32),
        "parents": np.arange(-1, rows - 1),
        "seqlens_k": np.array([past + rows - 1], np.int32),
        "total": np.array(past + rows, np.int32),
        "y": np.empty((1, rows, options.heads * width), np.float32),
    }
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    binding = run.io_binding()
    for value in run.get_inputs():
        binding.bind_ortvalue_input(value.name, values[value.name])
    for name, source in (("y", "y"), ("key", "past_key"), ("value", "past_value")):
        binding.bind_ortvalue_output(name, values[source])
    return binding, [feed, values]


def main() -> None:
    """Measure and print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("heads", 9), ("kv-heads", 3), ("width", 64), ("threads", 2), ("seconds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    runs = {name: opened(options, native=name == "native") for name in ("stock", "native")}
    bindings = {(n, case): bound(run, options, *case) for n, run in runs.items() for case in CASES}
    times: dict[Any, list[float]] = {key: [] for key in bindings}
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        for case in CASES:
            for name, run in runs.items():
                for turn in range(8):
                    start = time.perf_counter()
                    run.run_with_iobinding(bindings[name, case][0])
                    if turn:  # the first finds the other's caches warm
                        times[name, case].append(1e6 * (time.perf_counter() - start))
    for rows, past in CASES:
        stock, native = (times[name, (rows, past)] for name in ("stock", "native"))
        ratio = median(b / a for a, b in zip(stock, native, strict=True))
        line = {"rows": rows, "past": past, "stock_us": median(stock), "native_us": median(native), "ratio": ratio}
        print(json.dumps({key: round(value, 2) for key, value in line.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
