#!/usr/bin/env bash
# Runs bundles on aarch64 without such a machine: a Debian arm64 root under qemu's user-mode emulation, the base install
# in it, and one prompt on both sides. Correctness only: emulated times say nothing.
#
#   bash tests/figures/arm_emulated.sh BUNDLE...
#
# As root, on Debian 12 with: mmdebstrap qemu-user-static g++-aarch64-linux-gnu, and Python 3.11 with pip and elsi-edge.
# Some minutes a bundle. Variables: ROOT (kept between runs), PYTHON, CPU (as qemu names it), TOKENS, NODES, ROWS_SECONDS,
# ONLY (stock or native kernels), SKIP_CLI.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
ROOT=${ROOT:-$(mktemp -d)/root}
PYTHON=${PYTHON:-python3.11}
CPU=${CPU:-neoverse-n1}
TOKENS=${TOKENS:-8}
NODES=${NODES:-4}
ROWS_SECONDS=${ROWS_SECONDS:-60}
ONLY=${ONLY:+--only $ONLY}
work=$(dirname "$ROOT")/arm-work
mkdir -p "$work"

# 1. The root: packages are unpacked and not configured, so that nothing is emulated yet.
if [ ! -x "$ROOT/usr/bin/python3" ]; then
  mmdebstrap --mode=root --variant=extract --architectures=arm64 \
    --include=python3-minimal,libpython3-stdlib,libstdc++6,libgomp1 bookworm "$ROOT"
  mkdir -p "$ROOT"/{proc,sys,dev,opt}
  cp "$(command -v qemu-aarch64-static)" "$ROOT/usr/bin/"
fi

# 2. elsi-edge as a wheel for aarch64, its operators cross-compiled, and the base dependencies as aarch64 wheels. pip runs
# here: it only chooses and unpacks.
if [ ! -d "$ROOT/opt/site" ]; then
  rm -rf "$work/source" "$work/wheels"
  mkdir -p "$work/source"
  git -C "$here" archive HEAD | tar -x -C "$work/source"
  _PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
    LDSHARED="aarch64-linux-gnu-gcc -shared" LDCXXSHARED="aarch64-linux-gnu-g++ -shared" \
    "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "$work/source"
  "$PYTHON" -m pip install --quiet --no-compile --target "$work/site" --constraint "$here/constraints.txt" \
    --only-binary=:all: --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --platform linux_aarch64 "$work"/wheels/*.whl
  mv "$work/site" "$ROOT/opt/site"
fi

# 3. ONNX Runtime reads /proc/cpuinfo when it is imported and crashes on an x86 one. This says what qemu emulates.
features="fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
for n in 0 1; do
  printf 'processor\t: %s\nBogoMIPS\t: 50.00\nFeatures\t: %s\n' "$n" "$features"
  printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
done > "$ROOT/opt/cpuinfo"
cp "$here/tests/figures/arm_tokens.py" "$ROOT/opt/"

# The mounts live in a namespace of their own and go with it. Bundles are bound to /mnt, read by both sides.
emulated() { # BUNDLE COMMAND...
  unshare --mount bash -c '
    set -eu
    root=$1 cpu=$2 bundle=$3
    shift 3
    mkdir -p "$root/mnt"
    for part in proc sys dev; do mount --rbind "/$part" "$root/$part"; done
    mount --bind "$root/opt/cpuinfo" "$root/proc/cpuinfo"
    mount --bind "$bundle" "$root/mnt"
    exec chroot "$root" /usr/bin/qemu-aarch64-static -cpu "$cpu" -E PYTHONPATH=/opt/site -E HOME=/tmp \
      -E ELSI_EDGE_HOME=/tmp/elsi-home /usr/bin/python3 "$@"
  ' emulated "$ROOT" "$CPU" "$@"
}

# 4. The command line itself, then both sides.
status=0
for bundle in "$@"; do
  bundle=$(cd "$bundle" && pwd)
  if [ -z "${SKIP_CLI:-}" ]; then
    emulated "$bundle" -m elsi_edge doctor
    emulated "$bundle" -m elsi_edge generate /mnt "Name a river." --max-tokens 4 --threads 2
  fi
  # shellcheck disable=SC2086 # ONLY is two words or none
  "$PYTHON" "$here/tests/figures/arm_tokens.py" "$bundle" --tokens "$TOKENS" --nodes "$NODES" $ONLY --out "$work/host.json"
  # shellcheck disable=SC2086
  emulated "$bundle" /opt/arm_tokens.py /mnt --tokens "$TOKENS" --nodes "$NODES" $ONLY \
    --rows-seconds "$ROWS_SECONDS" --out /tmp/arm.json
  cp "$ROOT/tmp/arm.json" "$work/$(basename "$bundle").json"
  "$PYTHON" "$here/tests/figures/arm_tokens.py" --compare "$work/host.json" "$ROOT/tmp/arm.json" || status=1
done
exit "$status"
