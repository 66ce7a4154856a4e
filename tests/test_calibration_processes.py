"""Several processes under `accelerate launch` share the prompts and come to what one comes to."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_calibration_cli import ROWS, SMALL
from tests.tiny_text import llama_weights, write_model_dir

pytest.importorskip("torch")

# Runs the command, and leaves in a file which prompts this process ran.
SCRIPT = """
import json, os, sys
from pathlib import Path
from elsi_edge.calibration import capture
from elsi_edge.cli import main
seen, real = [], capture.capture
def noted(*args, **options):
    for prompt in real(*args, **options):
        seen.append(prompt.index)
        yield prompt
capture.capture = noted
try:
    main(sys.argv[1:])
finally:
    Path(f"seen-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tame = {
        name: (np.ones_like(w) if w.ndim == 1 else w / np.sqrt(w.shape[1])).astype(np.float32)
        for name, w in llama_weights(SMALL, seed=4).items()
    }
    write_model_dir(tmp_path / "tiny", config=SMALL, weights=tame)
    rows = [{"id": row.id, "turns": list(row.turns)} for row in ROWS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.py").write_text(SCRIPT)
    return tmp_path


def run(place: Path, *launcher: str, work: str) -> tuple[dict[str, Any], str]:
    command = [*launcher, "run.py", "calibrate", "tiny", "--prompts", "prompts.jsonl", "--no-probe", "--json"]
    done = subprocess.run(
        [*command, "--threads", "1", "--work", work],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1  # one process alone writes the result
    return json.loads(lines[0]), done.stderr


def test_two_processes_equal_one(place: Path) -> None:
    one, _ = run(place, sys.executable, work="one")
    assert sorted(set(json.loads((place / "seen-0.json").read_text()))) == list(range(len(ROWS)))
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    quiet = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    two, stderr = run(place, sys.executable, *launch, *quiet, work="two")
    shares = [json.loads((place / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    assert all(shares) and not set(shares[0]) & set(shares[1])
    assert sorted(shares[0] + shares[1]) == list(range(len(ROWS)))
    assert stderr.count("Next: ") == 1
    for key in ("taps", "tokens", "compartments", "prompts_sha256"):
        assert one[key] == two[key], key
    np.testing.assert_allclose(one["entropy"], two["entropy"], atol=2e-6)
    np.testing.assert_allclose(one["entropy_interval"], two["entropy_interval"], atol=2e-4)
    assert one["joint_entropy"] == pytest.approx(two["joint_entropy"], abs=2e-6)
    assert one["variance"]["order"] == pytest.approx(two["variance"]["order"], abs=1e-5)
