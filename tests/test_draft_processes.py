"""Several processes under `accelerate launch` train the draft that one trains, hang on no uneven rows, and resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.draft.distill import distill
from elsi_edge.draft.settings import DistillSettings, TrainSettings
from elsi_edge.draft.train import train
from tests import draft_toy as toy

# Trains one draft after the other, with settings given as JSON by the name of the output.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.train import train
from elsi_edge.processes import processes
for out, values in json.loads(sys.argv[1]).items():
    train(Path(values.pop("shards")), Path("model"), Path(out), TrainSettings(**values))
processes().end()  # as the command does
# A thread of the group that is still there may free a tensor while the interpreter closes, which aborts the process.
names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").glob("*")]
assert not [name for name in names if "gloo" in name], names
"""
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
QUIET = ["--mixed_precision", "no", "--dynamo_backend", "no"]
ROOT = Path(__file__).parents[1]


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("processes")
    toy.write_model(place / "model")
    (place / "run.py").write_text(SCRIPT)
    for name, rows in (("many", 60), ("five", 5)):
        options = DistillSettings(max_tokens=24, shard_tokens=300, temperatures=(0.0,))
        distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(rows), toy.selection(1, 3), options, place / name)
    return place


MANY = {"shards": "many", "arithmetic": "fp32", "draft_vocab": 48, "log_every": 1, "batch_tokens": 128}
FIVE = {**MANY, "shards": "five", "batch_tokens": 60, "steps": 7}


def one_process(place: Path, **jobs: dict[str, Any]) -> None:
    for out, asked in jobs.items():
        values = {name: value for name, value in asked.items() if name != "shards"}
        train(place / asked["shards"], place / "model", place / out, TrainSettings(**values, threads=1))


def two_processes(place: Path, **jobs: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, *LAUNCH, *QUIET, "run.py", json.dumps(jobs)],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def losses(place: Path, out: str) -> list[float]:
    lines = (place / out / "log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def test_two_processes_follow_one(place: Path) -> None:
    """Twenty steps in fp32 with one global batch, gathered in another order: 1e-5 relative, losses and weights.

    With five rows, two of them held out, in batches of two, one process has nothing to do at the end of an epoch.
    """
    one_process(place, one={**MANY, "steps": 20}, five1=FIVE)
    two_processes(place, two={**MANY, "steps": 20}, five2=FIVE)
    assert len(losses(place, "one")) == 20 and len(losses(place, "five1")) == 7
    np.testing.assert_allclose(losses(place, "one"), losses(place, "two"), rtol=1e-5)
    np.testing.assert_allclose(losses(place, "five1"), losses(place, "five2"), rtol=1e-5)
    before, after = (load_draft(place / name) for name in ("one", "two"))
    for name, tensor in before.tensors.items():  # stored as float16
        assert np.linalg.norm(tensor - after.tensors[name]) < 1e-4 * np.linalg.norm(tensor), name
    mine, its = (draft.config.training["evaluation"] for draft in (before, after))
    assert mine["positions"] == its["positions"] and mine["replayed"] == its["replayed"]
    np.testing.assert_allclose(mine["agreement"], its["agreement"], atol=0.01)
    # What one began two continue, and the other way round: the batches are the same.
    two_processes(place, one={**MANY, "steps": 24})
    one_process(place, two={**MANY, "steps": 24})
    assert len(losses(place, "one")) == 24
    np.testing.assert_allclose(losses(place, "one"), losses(place, "two"), rtol=2e-5)
