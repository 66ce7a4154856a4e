"""Where a call of the native graph goes, by operator: ONNX Runtime's own profile, median ms a call.

python -m tests.figures.native_profile BUNDLE --native GRAPH [--rows 1 8] [--past 256]
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np

from elsi_edge.bundle import Bundle
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_graph, session_options
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree

_CALLS = 40


def main() -> None:
    """Profile and print one line a number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--native", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8))
    parser.add_argument("--past", type=int, default=256)
    options = parser.parse_args()
    bundle, settings = Bundle.load(options.bundle), SessionSettings(threads=2)
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as directory:
            opened = session_options(settings)
            opened.enable_profiling, opened.profile_file_prefix = True, f"{directory}/profile"
            native_ops.register(opened)
            session = open_graph(options.native, opened, settings)
            target = OrtTarget(session, shape=bundle.manifest.shape, tap_width=bundle.manifest.tap_width)
            draw = np.random.default_rng(0)
            ids = draw.integers(100, bundle.manifest.shape.vocab_size, options.past + rows).tolist()
            target.prefill(ids[: options.past])
            walls = []
            for _ in range(_CALLS):
                start = time.perf_counter()
                target.verify(ids[options.past], Tree.chain(ids[options.past + 1 :]))
                walls.append(1e3 * (time.perf_counter() - start))
            events = json.loads(Path(session.end_profiling()).read_text())
        times: dict[str, list[float]] = defaultdict(list)  # of each node, over the calls
        kinds = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                times[event["name"]].append(event["dur"] / 1e3)
                name = event["args"]["op_name"]
                kinds[event["name"]] = f"{name} (lm_head)" if "lm_head" in event["name"] else name
        sums: dict[str, float] = defaultdict(float)
        for node, values in times.items():
            sums[kinds[node]] += median(values[-_CALLS:])
        line = {"rows": rows, "wall_ms": median(walls), **dict(sorted(sums.items(), key=lambda item: -item[1]))}
        print(json.dumps({k: round(v, 3) for k, v in line.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
