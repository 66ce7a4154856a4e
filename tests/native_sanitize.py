"""Run the native operators' tests on a library built with the address and undefined-behaviour sanitizers.

python -m tests.native_sanitize
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TESTS = tuple(
    f"tests/test_native_{name}.py" for name in ("matrix", "shift", "norm", "head", "attention", "block", "fuzz")
)
_FLAGS = ("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
_SANITIZE = "-fsanitize=address,undefined"
_RUN = (
    "from elsi_edge.runtime import native_ops; native_ops.LIBRARY = {library!r}; import pytest; "
    "raise SystemExit(pytest.main({tests!r}))"
)


def main() -> int:
    """The tests' exit status."""
    with tempfile.TemporaryDirectory() as directory:
        library = str(Path(directory) / "sanitized.so")
        sources = [str(path) for path in (ROOT / "runtime/native").glob("*.cpp")]
        stop = "-fno-sanitize-recover=undefined"
        subprocess.run(
            ["g++", *_FLAGS, _SANITIZE, stop, "-Wno-maybe-uninitialized", *sources, "-o", library], check=True
        )
        runtime = [
            subprocess.run(
                ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so", "libstdc++.so")
        ]
        # Python and ONNX Runtime keep memory until the process ends: leaks are not looked for.
        environment = os.environ | {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0"}
        code = _RUN.format(library=library, tests=["-q", "-x", "-p", "no:cacheprovider", *_TESTS])
        return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
