"""What reading a prompt costs with the native operators, paired with the stock graph: ms by its length, in turns.

python -m tests.figures.prefill BUNDLE... --out FILE [--repeats 12] [--threads 2]
"""

import argparse
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.target import Target
from tests.figures.common import save

_LENGTHS = (16, 38, 64, 128, 256, 512, 1024)
_PAUSE = 0.02  # seconds after which the other session's pool no longer spins


def read(target: Target, ids: list[int]) -> float:
    """Milliseconds of one prompt."""
    target.keep(0)
    time.sleep(_PAUSE)
    start = time.perf_counter()
    target.prefill(ids)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Measure every bundle named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    figures: dict[str, Any] = {"threads": options.threads}
    for path in options.bundles:
        sessions = [Session.open(path, SessionSettings(threads=options.threads, native=n)) for n in (True, False)]
        native, stock = (session.engine(exact=True).target for session in sessions)
        lines = []
        for length in _LENGTHS:
            ids = np.random.default_rng(length).integers(100, 2000, length).tolist()
            read(native, ids), read(stock, ids)  # the first is cold
            pairs = [(read(native, ids), read(stock, ids)) for _ in range(options.repeats)]
            ratios = [theirs / ours for ours, theirs in pairs]
            lines.append(
                {
                    "tokens": length,
                    "native_ms": median(ours for ours, _ in pairs),
                    "stock_ms": median(theirs for _, theirs in pairs),
                    "times": median(ratios),
                    "quartiles": quantiles(ratios, n=4)[::2],
                }
            )
        figures[sessions[0].precision] = lines
    save(options.out, figures)


if __name__ == "__main__":
    main()
