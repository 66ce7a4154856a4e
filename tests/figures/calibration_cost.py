"""What the statistics of `calibrate` add to a bare forward pass, paired.

    python -m tests.figures.calibration_cost --out docs/figures/calibration_cost.json

Alternates bare forward passes over the batches that `calibrate` runs with whole calibrations of the built-in model on
the 256 calibration prompts. The statistics are everything that a calibration does beside its forward pass, the choice
included; loading the model and the probe's second pass are apart.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elsi_edge.calibration import CalibrationSettings, analyse, capture
from elsi_edge.calibration.rendering import Rendered, render
from elsi_edge.calibration.stages import batches_of
from elsi_edge.machine import cores
from elsi_edge.models import BUILTIN, resolve
from elsi_edge.prompts import builtin_calibration_prompts
from tests.figures.common import save


def bare(target: Any, rendered: Rendered, batches: Sequence[Sequence[int]]) -> float:
    """Seconds of the model's own forward pass with its logits, over padded batches."""
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            longest = max(len(rendered.ids[i]) for i in batch)
            rows = [[*rendered.ids[i], *[0] * (longest - len(rendered.ids[i]))] for i in batch]
            target(input_ids=torch.tensor(rows), use_cache=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=256)
    arguments = parser.parse_args()
    model, rows = resolve(BUILTIN), builtin_calibration_prompts()[: arguments.prompts]
    settings, threads = CalibrationSettings(), cores().usable
    rendered = render(model, rows, skip=settings.skip)
    batches = batches_of(rendered, settings)
    target = capture.load_target(model.directory)
    pairs: list[dict[str, Any]] = []
    with capture.torch_threads(threads):
        bare(target, rendered, batches[:2])
        for _ in range(arguments.repeats):
            before = bare(target, rendered, batches)
            cost = dict(analyse(model, rows, settings, threads=threads).cost)
            after = bare(target, rendered, batches)
            forward = (before + after) / 2
            added = (cost["pass"] + cost["choose"]) / forward - 1.0
            pairs.append({"bare_s": [before, after], "calibrate_s": cost, "added": added})
            found = sorted(float(pair["added"]) for pair in pairs)
            save(
                arguments.out,
                {
                    "prompts": len(rows),
                    "tokens": sum(rendered.lengths),
                    "pairs": pairs,
                    "added_median": statistics.median(found),
                    "added_range": [found[0], found[-1]],
                },
            )


if __name__ == "__main__":
    main()
