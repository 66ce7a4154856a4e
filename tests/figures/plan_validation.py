"""What `elsi-edge plan` predicts for a model that it has not seen, beside what the model takes: errors in percent.

    python -m tests.figures.plan_validation WORK --smollm2 BUNDLE --out FILE [--device DEVICE_FILE] [--like llama-1b]
        [--precisions int4 int8] [--rows 1 2 4 8 16] [--past 256] [--seconds 40] [--threads 2]

The device file is measured first, with SmolLM2's bundle alone, unless one is given; then random weights of another
shape are exported through `elsi-edge export` (for llama-1b about 10 GB of disk and 14 GB of memory on the way), and
calls of its target are timed, stock and native kernels in turn. What is under WORK already is taken as it is.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from elsi_edge.bundle import Bundle
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.device import Device, Kernels, load_device
from elsi_edge.runtime.engines import BundleEngines
from elsi_edge.runtime.measure import time_verify
from elsi_edge.runtime.measure_device import DeviceSettings, measure_device
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.plan import CostModel
from elsi_edge.runtime.plan_sizes import target_bytes
from tests.figures import random_model
from tests.figures.common import save


def exported(work: Path, like: str, precision: str) -> Bundle:
    """The plain bundle of the random model, made in processes of their own so that their memory is given back."""
    model, bundle = work / like, work / f"{like}-{precision}"
    if not bundle.is_dir():
        if not (model / "tokenizer.json").is_file():
            random_model.write(model, random_model.config(like))
            random_model.copy_tokenizer(model)
        command = [sys.executable, "-m", "elsi_edge", "export", str(model), "--plain-only", "--precision", precision]
        subprocess.run([*command, "--out", str(bundle), "--work", str(work)], check=True)
    return Bundle.load(bundle)


def compare(
    bundle: Bundle, device: Device, settings: SessionSettings, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measured and predicted milliseconds by kernels and rows."""
    manifest, found = bundle.manifest, []
    tokens = [7 + i * 31 % (manifest.shape.vocab_size - 7) for i in range(options.past + max(options.rows) + 1)]
    for kernels in get_args(Kernels):
        native = kernels == "native"
        if kernels not in device.curves.get(manifest.precision, {}):
            continue
        if native and not native_ops.path_for(manifest.graphs, settings):
            continue
        target = BundleEngines(bundle, replace(settings, native=native))[True].target
        until = time.perf_counter() + options.seconds
        measured = time_verify(target, tokens, options.past, options.rows, until=until)
        model = CostModel(manifest.shape, device, manifest.precision, kernels)
        for rows, ms in measured.items():
            call = model.call(rows, options.past)
            line = {"precision": manifest.precision, "kernels": kernels, "rows": rows, "measured_ms": ms}
            parts = {
                "products_ms": call.matrices_ms,
                "attention_ms": call.attention_ms,
                "operators_ms": call.operators_ms,
            }
            line |= {"predicted_ms": call.ms, "error_percent": 100.0 * (call.ms / ms - 1.0), **parts}
            print(  # noqa: T201 - a script's result
                f"{manifest.precision} {kernels} rows {rows}: measured {ms:.2f} ms, predicted {call.ms:.2f} "
                f"({line['error_percent']:+.1f} %)"
            )
            found.append(line)
    return found


def main() -> None:
    """Measure the device, export, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--smollm2", type=Path, help="bundle that the device is measured with")
    parser.add_argument("--device", help="a device file, in place of measuring")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--like", choices=sorted(random_model.SHAPES), default="llama-1b")
    parser.add_argument("--precisions", nargs="+", default=["int4", "int8"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=40.0, help="for each precision and kernels")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if (options.smollm2 is None) == (options.device is None):
        parser.error("give --smollm2 to measure the device, or --device")
    bundles = [exported(options.work, options.like, precision) for precision in options.precisions]
    settings = SessionSettings(threads=options.threads, tuning=False)
    if options.device is None:
        how = DeviceSettings(seconds=2 * options.seconds)
        device = measure_device(Bundle.load(options.smollm2), settings, how)
        device.save(options.out.with_suffix(".device.json"))
    else:
        device = load_device(options.device)
    figures: list[dict[str, Any]] = []
    sizes = {}
    for bundle in bundles:
        figures += compare(bundle, device, settings, options)
        manifest = bundle.manifest
        predicted = sum(target_bytes(manifest.shape, manifest.precision, manifest.context).values())
        actual = manifest.files["target.weights"].bytes
        sizes[manifest.precision] = {
            "predicted": predicted,
            "actual": actual,
            "error_percent": 100 * (predicted / actual - 1),
        }
    worst = max((abs(line["error_percent"]) for line in figures), default=0.0)
    save(
        options.out,
        {"like": options.like, "past": options.past, "worst_percent": worst, "sizes": sizes, "calls": figures},
    )


if __name__ == "__main__":
    main()
