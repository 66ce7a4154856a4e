"""What one machine answers, for comparing two architectures: tokens and exactness, nothing about speed.

`python tests/figures/arm_tokens.py BUNDLE --out FILE` continues one text plain and speculatively with the stock kernels
and, where they run, with the native operators; `--compare FILE FILE` says what is equal. It needs the base install
and this one file alone, so it runs on a device. `arm_emulated.sh` calls it on both sides.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "The Rhine is a river in"  # raw and short: emulation takes a second a token


def main() -> int:
    """Run one side, or compare two; 1 where something is different that must be equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=12, help="of the answer")
    parser.add_argument("--nodes", type=int, default=4, help="drafted nodes of a round")
    parser.add_argument("--only", choices=("stock", "native"), help="these kernels alone")
    parser.add_argument("--rows-seconds", type=float, default=60.0, help="for testing rows for exactness, each kind")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("HOST", "OTHER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*(json.loads(path.read_text()) for path in options.compare))
    found = measure(options)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What this machine says of a bundle."""
    import onnxruntime

    from elsi_edge.bundle import read_manifest
    from elsi_edge.errors import ElsiError
    from elsi_edge.runtime import native_ops
    from elsi_edge.runtime.one_node import require_sound_kernel

    manifest = read_manifest(options.bundle)
    bits = {"int4": 4, "int8": 8}.get(manifest.precision)
    sound = "not quantised"
    if bits is not None:
        try:
            require_sound_kernel(bits)
            sound = "yes"
        except ElsiError as error:
            sound = str(error)
    kernels = [] if options.only == "native" else ["stock"]
    if options.only != "stock" and native_ops.path_for(manifest.graphs, _settings(native=True)):
        kernels.append("native")
    return {
        "architecture": platform.machine(),
        "onnxruntime": onnxruntime.__version__,
        "native_path": native_ops.report().path or native_ops.report().why_not,
        "model": manifest.model,
        "precision": manifest.precision,
        "kernel_sound": sound,
        "answers": {name: answer(options, native=name == "native") for name in kernels},
    }


def answer(options: argparse.Namespace, *, native: bool) -> dict[str, Any]:
    """One prompt, plain and speculative, and rows a step that are exact."""
    from elsi_edge import GenerateOptions, Session
    from elsi_edge.runtime.measure import exact_rows, exact_tree_rows

    session = Session.open(options.bundle, _settings(native=native))
    plain = session.generate(PROMPT, GenerateOptions(plain=True, raw=True, max_tokens=options.tokens))
    fast = session.generate(PROMPT, GenerateOptions(draft_nodes=options.nodes, raw=True, max_tokens=options.tokens))
    _say(f"{'native' if native else 'stock'}: {plain.text!r}, {fast.mode}, tau {fast.tau:.2f}")
    past, target = 4, session.engine(exact=True).target
    text = [*session.encode(PROMPT, GenerateOptions(raw=True)), *plain.token_ids]
    until = time.perf_counter() + options.rows_seconds
    if session.exact_trees:
        most = min(16, len(text) - past)
        good, tried = exact_tree_rows(target, text, past, most=most, until=until)
    else:
        good, tried = exact_rows(target, text, past, bits=session.precision != "fp32", until=until)
    _say(f"exact up to {good} rows a step, tried {list(tried)}")
    return {
        "plain": list(plain.token_ids),
        "speculative": list(fast.token_ids),
        "text": plain.text,
        "mode": fast.mode,
        "tau": fast.tau,
        "exact": fast.exact,
        "exact_rows": good,
        "exact_rows_tried": list(tried),
        "trees": session.exact_trees,
    }


def compare(host: dict[str, Any], other: dict[str, Any]) -> int:
    """Print what is equal. At fp32 the tokens must be; at int4 and int8 other kernels round otherwise."""
    fault = False
    for side in (host, other):
        _say(f"{side['architecture']}, {side['precision']}, kernel sound: {side['kernel_sound']}")
        for name, one in side["answers"].items():
            same = one["plain"] == one["speculative"]
            fault |= not same
            kind = "trees" if one["trees"] else "chains"
            _say(
                f"  {name}: speculative ({one['mode']}, tau {one['tau']:.2f}) equals plain: {_yes(same)}; "
                f"exact rows a step ({kind}): {one['exact_rows']} of {one['exact_rows_tried']}"
            )
    for name in host["answers"]:
        if name in other["answers"]:
            ours, theirs = host["answers"][name]["plain"], other["answers"][name]["plain"]
            first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            fault |= ours != theirs and host["precision"] == "fp32"
            where = "" if first is None else f", from token {first + 1} of {len(ours)}"
            _say(f"both sides, {name}: the same tokens: {_yes(ours == theirs)}{where}")
    return int(fault)


def _settings(*, native: bool) -> Any:
    from elsi_edge import SessionSettings

    return SessionSettings(threads=2, native=native, tuning=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
