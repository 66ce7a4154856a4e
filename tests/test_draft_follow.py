"""Training while shards are still being written: what joins, what stays as it was chosen, exact resume."""

from pathlib import Path

import numpy as np
import pytest

from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.distill import distill
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.train import train
from elsi_edge.errors import DataError
from tests import draft_toy as toy
from tests.test_draft_train import StopAt, _model, settings

__all__ = ["_model"]  # a fixture


def write_shards(directory: Path, count: int) -> None:
    """Distill, or go on to, `count` prompts."""
    asked = DistillSettings(max_tokens=24, shard_tokens=300, temperatures=(0.0,), count=count)
    distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(120), toy.selection(2), asked, directory, model="toy")


class GrowAt(StopAt):
    """A reporter that goes on with the distillation after so many steps, and may stop the run later."""

    def __init__(self, shards: Path, *, grow: int, stop: int = 10_000) -> None:
        super().__init__(stop, "interrupt")
        self.shards, self.grow, self.notes = shards, grow, list[str]()

    def advance(self, share: float) -> None:
        self.grow -= 1
        if self.grow == 0:
            write_shards(self.shards, 90)
        super().advance(share)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_new_shards_join_at_an_epochs_end(model: Path, tmp_path: Path) -> None:
    """More rows are trained on; the held-out ones and the vocabulary stay; interrupted after that, it ends the same."""
    asked = settings(steps=60, follow=True, replay_tokens=0)
    results = []
    for name, stop in (("whole", 10_000), ("parts", 45)):
        shards, out = tmp_path / f"shards-{name}", tmp_path / name
        write_shards(shards, 40)
        _, held_out = ShardSet(shards, max_length=100).split()
        reporter = GrowAt(shards, grow=3, stop=stop)
        if name == "whole":
            train(shards, model, out, asked, reporter=reporter)
        else:
            with pytest.raises(KeyboardInterrupt):
                train(shards, model, out, asked, reporter=reporter)
            write_shards(shards, 120)  # what came after the epoch began has to wait for its end
            train(shards, model, out, asked)
        assert any("conversations joined" in note for note in reporter.notes)
        results.append(load_draft(out))
        assert results[-1].config.training["data"]["held_out"] == len(held_out)
    first = results[0].config.training["data"]
    assert first["conversations"] == 90 - len(held_out)
    assert results[0].config.draft_to_target_sha256 == results[1].config.draft_to_target_sha256
    assert results[1].config.training["data"]["conversations"] >= first["conversations"]


def test_without_follow_a_run_keeps_to_its_shards(model: Path, tmp_path: Path) -> None:
    """Shards that were added meanwhile change nothing: the run continues bit for bit."""
    shards, whole, parts = tmp_path / "shards", tmp_path / "whole", tmp_path / "parts"
    write_shards(shards, 40)
    asked = settings(steps=31)
    train(shards, model, whole, asked)
    with pytest.raises(KeyboardInterrupt):
        train(shards, model, parts, asked, reporter=StopAt(17, "interrupt"))
    write_shards(shards, 90)
    train(shards, model, parts, asked)
    one, other = load_draft(whole).tensors, load_draft(parts).tensors
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_shards_made_anew_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 40)
    data = ShardSet(tmp_path / "a", max_length=100)
    manifest = tmp_path / "a" / "manifest.json"
    other = DistillSettings(max_tokens=20, shard_tokens=300, temperatures=(0.0,))
    distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(60), toy.selection(2), other, tmp_path / "b", model="toy")
    manifest.write_bytes((tmp_path / "b" / "manifest.json").read_bytes())
    with pytest.raises(DataError, match="made anew while it was read"):
        data.grow()
