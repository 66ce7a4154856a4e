"""Training on planted data: it learns, it resumes exactly, it stops cleanly; and the draft directory it writes."""

import itertools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from elsi_edge.artifacts import LayerSelection
from elsi_edge.draft.checkpoint import CONFIG, WEIGHTS, load_draft
from elsi_edge.draft.data import ShardSet, epoch_batches
from elsi_edge.draft.distill import distill
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.settings import DistillSettings, TrainSettings
from elsi_edge.draft.source import initialise, read_source
from elsi_edge.draft.train import LOG, train
from elsi_edge.errors import ConfigError, DataError, DraftError, SelectionError
from tests import draft_toy as toy

FAST = {
    "draft_vocab": 48,
    "batch_tokens": 128,
    "evaluate_every": 50,
    "threads": 1,
    "log_every": 1,
    "arithmetic": "fp32",
}


def settings(**values: object) -> TrainSettings:
    return TrainSettings(**{**FAST, "steps": 6, **values})  # type: ignore[arg-type]


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(name="shards", scope="module")
def _shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    options = DistillSettings(max_tokens=24, shard_tokens=300, temperatures=(0.0,))
    distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(60), toy.selection(1, 3), options, out, model="toy")
    return out


def read_log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def test_it_learns_the_planted_rule(shards: Path, model: Path, tmp_path: Path) -> None:
    config = train(shards, model, tmp_path, settings(steps=150, lr=1e-2, arithmetic="bf16"))
    losses = [entry["loss"] for entry in read_log(tmp_path) if "loss" in entry]
    taus = [entry["tau_chain4"] for entry in read_log(tmp_path) if "tau_chain4" in entry]
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])
    assert taus[0] < 2.0 and taus[-1] > 3.5
    agreement = config.training["evaluation"]["agreement"]
    assert len(agreement) == 4 and min(agreement[:3]) > 0.8
    assert config.vocab_coverage == 1.0
    # What is on disk computes what was evaluated: replay a held-out conversation through the saved weights.
    draft = load_draft(tmp_path)
    net = DraftNetwork(draft.config, read_source(model, toy.SHAPE).embeddings)
    net.load_state_dict({name: torch.from_numpy(value) for name, value in draft.tensors.items()}, strict=True)
    runner, ids = toy.ToyRunner(), [toy.START, 3, toy.ASSISTANT, 5, 12, 19, 26]
    taps = torch.from_numpy(np.concatenate(list(runner.states(ids, (1, 3)).states), axis=-1))
    with torch.no_grad():
        logits, _ = net.forward_step(net.project(taps[:-1])[None], torch.tensor([ids[1:]]), torch.arange(6)[None])
    assert draft.draft_to_target_ids[int(logits[0, -1].argmax())] == toy.following(26)


class StopAt:
    """A reporter that ends the run after some steps: as Ctrl-C does, or as hard as a kill."""

    def __init__(self, step: int, how: str) -> None:
        self.left, self.how = step, how

    def advance(self, _: float) -> None:
        self.left -= 1
        if self.left == 0 and self.how == "kill":
            raise RuntimeError("killed")
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, _: str) -> None: ...


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_resume_is_exact(shards: Path, model: Path, tmp_path: Path, how: str) -> None:
    """Stopped inside an epoch, then continued: bit for bit the weights of a run that was never stopped."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(shards, model, whole, settings(steps=31))
    often = settings(steps=31, checkpoint_minutes=1e-9)
    with pytest.raises(KeyboardInterrupt if how == "interrupt" else RuntimeError):
        train(shards, model, parts, often, reporter=StopAt(17, how))
    done = 17 if how == "interrupt" else 16
    assert [path.name for path in parts.glob("checkpoint-*")] == [f"checkpoint-{done:08d}"]
    train(shards, model, parts, often)
    one, other = load_draft(whole), load_draft(parts)
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor, other.tensors[name])
    same = [[entry["loss"] for entry in read_log(out) if "loss" in entry] for out in (whole, parts)]
    assert len(same[0]) == 31 and same[0] == same[1]


def test_a_run_stopped_after_every_step_goes_on(shards: Path, model: Path, tmp_path: Path) -> None:
    """After the last batch of an epoch too, where nothing of it is left to train on."""
    often = settings(steps=12, batch_tokens=400, checkpoint_minutes=1e-9)
    whole = train(shards, model, tmp_path / "whole", often)
    for _ in range(1, 12):
        with pytest.raises(KeyboardInterrupt):
            train(shards, model, tmp_path / "parts", often, reporter=StopAt(1, "interrupt"))
    parts = train(shards, model, tmp_path / "parts", often)
    assert parts.training["tensors_sha256"] == whole.training["tensors_sha256"]


def test_a_finished_run_trains_no_more(shards: Path, model: Path, tmp_path: Path) -> None:
    first = train(shards, model, tmp_path, settings())
    again = train(shards, model, tmp_path, settings())
    assert again.training["tensors_sha256"] == first.training["tensors_sha256"]
    longer = train(shards, model, tmp_path, settings(steps=8))
    assert longer.training["settings"]["steps"] == 8
    fresh = train(shards, model, tmp_path, settings(lr=1e-2), fresh=True)
    assert fresh.training["settings"]["steps"] == 6


def test_a_run_of_other_settings_is_not_continued(shards: Path, model: Path, tmp_path: Path) -> None:
    train(shards, model, tmp_path, settings())
    with pytest.raises(DraftError, match=r"lr = 0\.002, this one has 0\.01"):
        train(shards, model, tmp_path, settings(lr=1e-2))
    (next(tmp_path.glob("checkpoint-*")) / "optimiser.safetensors").write_bytes(b"short")
    with pytest.raises(DraftError, match="cut short or altered"):
        train(shards, model, tmp_path, settings())


def test_budget_in_minutes(shards: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule follows the clock: warmup, peak and floor are all reached, however fast the machine is."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.01 * next(ticks))
    monkeypatch.setattr("elsi_edge.draft.trainer.time", clock)
    config = train(shards, model, tmp_path, settings(steps=None, minutes=0.05))
    rates = [entry["lr"] for entry in read_log(tmp_path) if "lr" in entry]
    assert config.training["settings"]["steps"] == len(rates) > 20
    assert rates[0] < max(rates) > 9e-4 and rates[-1] < 0.1 * max(rates)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    shards: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(shards, model, tmp_path, settings(steps=3))
    before = load_draft(tmp_path).config
    monkeypatch.setattr("elsi_edge.draft.trainer.batch_loss", lambda *_: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(DraftError, match=r"loss became nan at step 4, on rows of shard-0000\d\.safetensors"):
        train(shards, model, tmp_path, settings())
    assert load_draft(tmp_path).config == before
    monkeypatch.undo()
    train(shards, model, tmp_path, settings())


def test_rows_without_answer_tokens(shards: Path, tmp_path: Path, model: Path) -> None:
    """Prompts of 5 tokens: a limit of 8 leaves 3 answer tokens a row, a limit of 5 none anywhere."""
    kept = ShardSet(shards, max_length=8)
    assert len(kept.rows) == 60 and all(row.bases == 3 for row in kept.rows)
    with pytest.raises(DataError, match=r"no row has answer tokens within 5 tokens \(60 rows dropped\)"):
        train(shards, model, tmp_path, settings(max_length=5))


def test_shards_of_another_target_are_refused(shards: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="made with the target toy, the model given is other"):
        train(shards, model, tmp_path, settings(), target_fingerprint="other")
    with pytest.raises(SelectionError, match="not tap 2"):
        train(shards, model, tmp_path, settings(taps=(2,)))


def test_one_of_several_recorded_taps(shards: Path, model: Path, tmp_path: Path) -> None:
    config = train(shards, model, tmp_path, settings(taps=(3,)))
    assert config.selection.taps == (3,) and config.m == 1
    assert load_draft(tmp_path).tensors["projection.weight"].shape == (toy.E, toy.E)


def test_the_state_after_the_final_norm(model: Path, tmp_path: Path) -> None:
    last = LayerSelection(taps=(toy.BLOCKS,), method="eagle2", state="final-norm", blocks=toy.BLOCKS, width=toy.E)
    options = DistillSettings(max_tokens=24, temperatures=(0.0,))
    distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(10), last, options, tmp_path / "s")
    config = train(tmp_path / "s", model, tmp_path / "d", settings(steps=2))
    assert config.selection.state == "final-norm"


def test_one_row_is_too_few(model: Path, tmp_path: Path) -> None:
    options = DistillSettings(max_tokens=24, temperatures=(0.0,))
    distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(1), toy.selection(), options, tmp_path / "s")
    with pytest.raises(DataError, match="1 usable row"):
        train(tmp_path / "s", model, tmp_path / "d", settings())


def test_batches_cover_an_epoch_once_and_differ_between_epochs(shards: Path) -> None:
    rows = ShardSet(shards, max_length=100).rows
    epochs = [epoch_batches(rows, budget=128, seed=3, epoch=epoch) for epoch in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert sorted(row.key for batch in epochs[0] for row in batch) == sorted(row.key for row in rows)
    assert all(sum(row.length for row in batch) <= 128 for batch in epochs[0])
    assert [len(batch) for batch in epoch_batches(rows[:3], budget=1, seed=0, epoch=0)] == [1, 1, 1]


def test_a_vocabulary_that_covers_little_counts_misses(shards: Path, model: Path, tmp_path: Path) -> None:
    config = train(shards, model, tmp_path, settings(steps=80, lr=1e-2, draft_vocab=25))
    agreement = config.training["evaluation"]["agreement"]
    assert 0.4 < config.vocab_coverage < 0.75
    assert agreement[0] < config.vocab_coverage + 0.1
    ids = load_draft(tmp_path).draft_to_target_ids.tolist()
    assert {toy.EOS, toy.START, toy.ASSISTANT} <= set(ids) and len(set(ids)) == 25


def test_warm_start_takes_the_last_block(shards: Path, model: Path) -> None:
    source = read_source(model, toy.SHAPE)
    from elsi_edge.draft.source import draft_config

    config = draft_config(toy.SHAPE, selection=toy.selection(1, 3), draft_vocab_size=10)
    net = DraftNetwork(config, source.embeddings)
    ids = torch.arange(5, 15)
    assert initialise(net, source, ids, seed=0) == []
    torch.testing.assert_close(net.qkv.weight[:, toy.E :], torch.cat([source.block[name] for name in ("q", "k", "v")]))
    torch.testing.assert_close(net.head.weight.detach(), source.head[5:15])
    taps = torch.randn(3, 2 * toy.E)
    torch.testing.assert_close(net.project(taps), taps[:, toy.E :])
    del source.block["gate"]
    assert initialise(net, source, ids, seed=0) == ["gate: the target's last block has none where Llama keeps it"]


def test_settings_out_of_range() -> None:
    for values in ({"unroll": 0}, {"lr": 0.0}, {"steps": 0}, {"ema": 2.0}, {"max_length": 2}, {"draft_vocab": 0}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            settings(**values)
    with pytest.raises(ConfigError, match="needs a budget"):
        TrainSettings()


# --- the draft directory -------------------------------------------------------------------------------------------


@pytest.fixture(name="draft")
def _draft(shards: Path, model: Path, tmp_path: Path) -> Path:
    train(shards, model, tmp_path / "draft", settings(steps=1))
    return tmp_path / "draft"


def rewrite(draft: Path, **changes: object) -> None:
    value = json.loads((draft / CONFIG).read_text())
    (draft / CONFIG).write_text(json.dumps({**value, **changes}))


def test_a_draft_comes_back_whole(draft: Path) -> None:
    loaded = load_draft(draft)
    assert loaded.config.draft_vocab_size == 48 == len(loaded.draft_to_target_ids)
    assert {str(tensor.dtype) for tensor in loaded.tensors.values()} == {"float32"}
    card = (draft / "README.md").read_text()
    assert "taps 1, 3" in card and "licence" in card and "step 4" in card


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_draft_is_one_line(draft: Path, damage: str) -> None:
    path = draft / WEIGHTS
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data[: len(data) // 3] if damage == "cut" else data))
    if damage == "gone":
        path.unlink()
    with pytest.raises(DraftError) as error:
        load_draft(draft)
    assert "\n" not in str(error.value) and WEIGHTS in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_width": 25}, r"'gate.weight' is \[24, 16\], the configuration says \[25, 16\]"),
        ({"draft_to_target_sha256": "0" * 64}, "not the map"),
        ({"target_vocab_size": 50}, "must ascend within 0..49"),
        ({"vocab_coverage": 3.0}, "vocab_coverage is 3.0"),
        ({"format_version": 2}, "format version 2"),
        ({"format": "x"}, "not a draft's configuration"),
        ({"surplus": 1}, "unknown key 'surplus'"),
        ({"kv_heads": 3}, "cannot share"),
    ],
)
def test_a_configuration_that_disagrees_is_one_line(draft: Path, changes: dict[str, object], message: str) -> None:
    rewrite(draft, **changes)
    with pytest.raises(DraftError, match=message):
        load_draft(draft)


def test_a_directory_without_a_draft(tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="holds no draft"):
        load_draft(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(DraftError, match="not JSON"):
        load_draft(tmp_path)


def test_loading_a_draft_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import elsi_edge.draft.checkpoint"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_sitting_reports_its_own_share(shards: Path, model: Path, tmp_path: Path) -> None:
    class Sum(StopAt):
        done = 0.0

        def advance(self, share: float) -> None:
            self.done += share
            super().advance(share)

    first, second = Sum(4, "interrupt"), Sum(100, "interrupt")
    with pytest.raises(KeyboardInterrupt):
        train(shards, model, tmp_path, settings(steps=8), reporter=first)
    train(shards, model, tmp_path, settings(steps=8), reporter=second)
    assert first.done == pytest.approx(0.5) and second.done == pytest.approx(1.0)
