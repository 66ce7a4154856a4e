"""The native paths outside ONNX Runtime: on this CPU, and the Arm ones cross-compiled and run under emulation.

Debian has what the second needs: g++-aarch64-linux-gnu and qemu-user. It says that the arithmetic is right, nothing of
its speed on hardware.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Emulated CPU -> the paths that it must run.
ARM_CPUS = {
    "max": ("neon-i8mm", "neon-dot", "portable"),
    "neoverse-n1": ("neon-dot", "portable"),
    "cortex-a57": ("portable",),
}


def compiled(compiler: str, out: Path, *extra: str) -> Path:
    """The program of native_paths.cpp over all sources but ONNX Runtime's entry and the operators."""
    names = ("matrix", "store", "path", "op", "portable", "avx2", "avx512", "neon")
    sources = [str(ROOT / f"runtime/native/{name}.cpp") for name in names]
    flags = ("-std=c++17", "-O2", "-w", "-ffp-contract=off", "-fno-math-errno", *extra)
    main = str(ROOT / "tests/native_paths.cpp")
    subprocess.run([compiler, *flags, main, *sources, "-o", str(out)], check=True, timeout=300)
    return out


def ran(command: list[str]) -> set[str]:
    """The paths that the program says are right."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split(":")[0] for line in done.stdout.splitlines() if line.endswith(": ok")}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_paths_of_this_cpu(tmp_path: Path) -> None:
    assert "portable" in ran([str(compiled("g++", tmp_path / "paths"))])


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(ARM_COMPILER) is None or shutil.which(EMULATOR) is None, reason=f"no {ARM_COMPILER} or {EMULATOR}"
)
def test_arm_paths_under_emulation(tmp_path: Path) -> None:
    program = compiled(ARM_COMPILER, tmp_path / "paths", "-static")
    for cpu, wanted in ARM_CPUS.items():
        assert ran([EMULATOR, "-cpu", cpu, str(program)]) == set(wanted), cpu
