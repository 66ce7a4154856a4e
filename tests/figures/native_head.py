"""What a head that finds the likeliest tokens saves, over one that writes logits for numpy to look through.

    python -m tests.figures.native_head BUNDLE... --prompts FILE --out FILE [--past 256] [--repeats 400]

Verifications of random tokens on one session, with the native operators, in turns: the likeliest tokens alone, and
logits of all rows of which two are looked through, as a round of two accepted tokens does. ms, medians; ratios are
medians of the pairs' own.
"""

import time
from statistics import median, quantiles

import numpy as np

from elsi_edge.bundle import Bundle
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.target import OrtTarget
from elsi_edge.runtime.tree import Tree
from tests.figures.common import arguments, save

_LOOKED_AT = 2
_ROWS = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure every bundle named."""
    options = arguments(__doc__ or "", past=256, repeats=400)
    figures = {}
    for path in options.bundles:
        bundle = Bundle.load(path)
        session = native_ops.open_native(bundle.graph("target-native"), SessionSettings())
        target = OrtTarget(session, shape=bundle.manifest.shape, tap_width=bundle.manifest.tap_width)
        ids = np.random.default_rng(0).integers(100, bundle.manifest.shape.vocab_size, options.past + 64).tolist()
        target.prefill(ids[: options.past])
        found = {}
        for rows in _ROWS:
            tree = Tree.chain(ids[options.past + 1 : options.past + rows])
            times: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * options.repeats):
                greedy = turn % 4 in (0, 3)
                start = time.perf_counter()
                step = target.verify(ids[options.past], tree, greedy=greedy)
                if not greedy:
                    for row in step.logits[:_LOOKED_AT]:
                        int(np.argmax(row))
                times[greedy].append(1e3 * (time.perf_counter() - start))
            ratios = [one / other for one, other in zip(times[True], times[False], strict=True)]
            found[rows] = {
                "likeliest_ms": median(times[True]),
                "logits_ms": median(times[False]),
                "ratio": median(ratios),
                "quartiles": quantiles(ratios, n=4),
            }
        figures[bundle.manifest.precision] = found
    save(options.out, {"past": options.past, "rows": figures})


if __name__ == "__main__":
    main()
