"""Shapes, vocabularies, optimisers and schedules that a draft can be trained with; what is refused; its curves."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elsi_edge.draft import curves
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.draft.data import Row, ShardSet
from elsi_edge.draft.network import DraftNetwork
from elsi_edge.draft.optimiser import learning_rate, orthogonalised
from elsi_edge.draft.packing import pack, pack_part
from elsi_edge.draft.shapes import measure_size
from elsi_edge.draft.sharing import deal
from elsi_edge.draft.source import draft_config, initialise, mapped, read_source
from elsi_edge.draft.train import train
from elsi_edge.draft.unroll import PackedBatch, unroll
from elsi_edge.draft.vocab import choose_vocab, target_weights
from elsi_edge.errors import ConfigError, DataError, DraftError, ProviderError
from tests import draft_toy as toy
from tests.test_draft_train import StopAt, _model, _shards, read_log, settings

__all__ = ["_model", "_shards"]  # fixtures


def learned(shards: Path, model: Path, out: Path, **changes: Any) -> tuple[float, ...]:
    """Agreement by step after a short training on the planted rule."""
    asked = settings(**{"steps": 80, "lr": 1e-2, "evaluate_every": 1000, "replay_tokens": 0, **changes})
    config = train(shards, model, out, asked)
    saved = load_draft(out)
    assert saved.config == config
    return tuple(config.training["evaluation"]["agreement"])


# --- structure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 2},
        {"heads": 2, "kv_heads": 1, "head_width": 16, "mlp_width": 8},
        {"width": 32},
        {"head": "tied"},
        {"vocab_by": "mass"},
        {"optimiser": "muon", "schedule": "wsd"},
        {"unroll_start": 1, "step_weights": (1.0, 0.5, 0.5)},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_every_kind_of_draft_learns(shards: Path, model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    found = learned(shards, model, tmp_path, **changes)
    assert found[0] > (0.4 if "head" in changes else 0.6), found  # the toy's own head has nothing to do with the rule
    assert found[2] > (0.2 if "head" in changes else 0.3), found


def test_a_tied_head_is_the_targets(shards: Path, model: Path, tmp_path: Path) -> None:
    train(shards, model, tmp_path, settings(head="tied", draft_vocab=30))
    draft, rows = load_draft(tmp_path), read_source(model, toy.SHAPE).head
    np.testing.assert_array_equal(
        draft.tensors["head.weight"], rows.numpy()[draft.draft_to_target_ids].astype(np.float16).astype(np.float32)
    )
    size = draft.config.training["size"]
    assert size["parameters"] - size["parameters_trained"] == size["parameters_head"] == 30 * toy.E


def test_two_blocks_unroll_as_they_draft_with_a_cache() -> None:
    """The second block sees the first one's output of every entry, prompts included."""
    from elsi_edge.draft.network import DraftCache

    config = draft_config(toy.SHAPE, replace(settings(), depth=2), selection=toy.selection(), draft_vocab_size=20)
    torch.manual_seed(0)
    net = DraftNetwork(config, torch.randn(toy.V, toy.E))
    batch = packed(np.random.default_rng(0), [(6, 5), (3, 4)])
    states = unroll(net, batch, 2)
    slot = 0
    for start, stop, count in zip(batch.entry_bounds, batch.entry_bounds[1:], (5, 4), strict=False):
        for base in batch.bases[slot : slot + count].tolist():
            cache, own = DraftCache(), slice(start, base + 1)
            _, out = net.forward_step(
                net.project(batch.taps[own])[None], batch.next_tokens[None, own], batch.positions[None, own], cache
            )
            torch.testing.assert_close(states[0][slot], out[0, -1], rtol=1e-4, atol=1e-5)
            token, place = batch.step_tokens[1, slot].view(1, 1), (batch.positions[base] + 1).view(1, 1)
            _, out = net.forward_step(out[:, -1:], token, place, cache)
            torch.testing.assert_close(states[1][slot], out[0, -1], rtol=1e-4, atol=1e-5)
            slot += 1
        assert stop > start


def packed(draw: np.random.Generator, sizes: list[tuple[int, int]]) -> PackedBatch:
    parts, records = [], []
    for prompt, answer in sizes:
        tokens = draw.integers(0, toy.V, prompt + answer)
        taps = torch.from_numpy(draw.standard_normal((prompt + answer, toy.E)).astype(np.float32))
        parts.append(pack_part(tokens, np.arange(prompt + answer) >= prompt, taps, 2))
        records.append(torch.zeros(answer, 1, dtype=torch.long))
    zeros = [record.float() for record in records]
    return pack(parts, target_ids=records, target_log_probs=zeros, tokens=0, row_ids=(), shards=())


def test_size_by_hand() -> None:
    config = draft_config(toy.SHAPE, settings(), selection=toy.selection(1, 3), draft_vocab_size=32)
    size = measure_size(config)
    matrices = 2 * 16 * 16 + 32 * 32 + 16 * 16 + 3 * 16 * 24 + 32 * 16
    assert size["parameters"] == matrices + 4 * 16 and size["parameters_projection"] == 512
    assert size["int4_bytes"] == matrices * 5 // 8 + 4 * 4 * 16 and size["int4_bytes_projection"] == 320
    net = DraftNetwork(config)
    assert sum(weight.numel() for weight in net.parameters()) == size["parameters"]


def test_a_narrow_draft_starts_from_the_targets_head(model: Path) -> None:
    """As wide as the target but told otherwise, its scores would be the target's own: checked at full rank."""
    source = read_source(model, toy.SHAPE)
    config = draft_config(toy.SHAPE, settings(width=32), selection=toy.selection(), draft_vocab_size=toy.V)
    net = DraftNetwork(config, source.embeddings)
    assert "its head alone" in initialise(net, source, torch.arange(toy.V), seed=0)[0]
    states = torch.randn(5, toy.E)
    assert source.final_norm is not None
    torch.testing.assert_close(
        net.head(net.project(states)).detach(), (states * source.final_norm) @ source.head.T, rtol=1e-3, atol=1e-4
    )


def test_sizes_that_do_not_fit(shards: Path, model: Path, tmp_path: Path) -> None:
    misfits: list[tuple[dict[str, Any], str]] = [
        ({"heads": 3, "kv_heads": 2}, "3 heads cannot share 2"),
        ({"head_width": 10}, "multiples of 16"),
        ({"width": 40}, "blocks of 32"),
    ]
    for changes, words in misfits:
        with pytest.raises(ConfigError, match=words):
            train(shards, model, tmp_path, settings(**changes))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"step_weights": (1.0,)}, "must be 3 numbers"),
        ({"unroll_start": 4}, "unroll_start is 4"),
        ({"depth": 3}, "depth is 3"),
        ({"optimiser": "sgd"}, "adamw or muon"),
        ({"patience": -1}, "patience"),
    ]
    for changes, words in wrong:
        with pytest.raises(ConfigError, match=words):
            settings(**changes)
    with pytest.raises(ProviderError, match="--device nonsense"):
        train(shards, model, tmp_path, settings(device="nonsense"))


# --- vocabulary ----------------------------------------------------------------------------------------------------


def test_vocabulary_by_probability() -> None:
    answers, prompts = np.array([5, 0, 0, 1, 0, 0]), np.array([0, 0, 3, 0, 0, 0])
    weight = np.array([0.0, 4.0, 0.0, 0.0, 2.0, 0.0])
    by_count = choose_vocab(answers, prompts, [5], 3)
    by_weight = choose_vocab(answers, prompts, [5], 4, weight=weight)
    assert by_count.draft_to_target_ids.tolist() == [0, 3, 5] and by_count.coverage == 1.0
    assert by_weight.draft_to_target_ids.tolist() == [1, 2, 4, 5]  # the required one, by weight, then the prompts'
    assert by_weight.coverage == 0.0


def test_weights_of_the_target(shards: Path) -> None:
    data = ShardSet(shards, max_length=100)
    argmax, mass = target_weights(shards, data.manifest)
    assert argmax.sum() == data.manifest.answer_tokens and argmax[40:].sum() == 0
    assert 0.9 * argmax.sum() < mass.sum() <= argmax.sum() * 1.001


# --- optimiser and schedule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 16), (16, 40)])
def test_orthogonalised(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(matrix)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert float((found * (left @ right)).sum() / (found.norm() * (left @ right).norm())) > 0.95


def test_learning_rates() -> None:
    wsd = settings(schedule="wsd", decay=0.25, warmup=0.1, lr=1.0, floor=0.1)
    rates = [learning_rate(wsd, share) for share in (0.05, 0.1, 0.5, 0.75, 0.875, 1.0)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.55, 0.1])
    cosine = replace(wsd, schedule="cosine")
    assert [learning_rate(cosine, s) for s in (0.1, 0.55, 1.0)] == pytest.approx([1.0, 0.55, 0.1])


def test_unroll_grows_early() -> None:
    grown = settings(unroll=3, unroll_start=1, unroll_ramp=0.3)
    assert [grown.unrolled(share) for share in (0.0, 0.09, 0.1, 0.19, 0.2, 0.3, 1.0)] == [1, 1, 2, 2, 3, 3, 3]
    assert settings(unroll_start=0).unrolled(0.0) == 3
    assert settings().unrolled(0.0) == 1  # the default
    assert grown.weights(2) == pytest.approx([1 / 1.8, 0.8 / 1.8])


def test_pieces_add_up(shards: Path, model: Path, tmp_path: Path) -> None:
    """A batch computed in three pieces is the batch: short answers weigh no less for their company."""
    logs = []
    for pieces in (1, 3):
        train(shards, model, tmp_path / str(pieces), settings(accumulate=pieces, steps=5, replay_tokens=0))
        logs.append([(e["loss"], e["grad_norm"]) for e in read_log(tmp_path / str(pieces)) if "loss" in e])
    np.testing.assert_allclose(logs[0], logs[1], rtol=1e-5)


def test_deal() -> None:
    lengths = [5, 100, 7, 50, 45, 3, 2]
    rows = [Row(key=str(n), shard=0, start=0, length=n, record=0, records=1, bases=1) for n in lengths]
    parts = deal(rows, 2)
    assert sorted(row.length for part in parts for row in part) == sorted(lengths)
    assert abs(sum(r.length for r in parts[0]) - sum(r.length for r in parts[1])) <= 10
    assert deal(rows, 1) == [rows] and [len(part) for part in deal(rows[:1], 3)] == [1, 0, 0]


@pytest.mark.parametrize("optimiser", ["muon"])
def test_resume_is_exact_with(shards: Path, model: Path, tmp_path: Path, optimiser: str) -> None:
    asked = settings(steps=9, optimiser=optimiser, unroll_start=1, replay_tokens=0)
    train(shards, model, tmp_path / "whole", asked)
    with pytest.raises(KeyboardInterrupt):
        train(shards, model, tmp_path / "parts", asked, reporter=StopAt(4, "interrupt"))
    train(shards, model, tmp_path / "parts", asked)
    one, other = (load_draft(tmp_path / name).tensors for name in ("whole", "parts"))
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])
    with pytest.raises(DraftError, match="optimiser = muon, this one has adamw"):
        train(shards, model, tmp_path / "parts", replace(asked, optimiser="adamw"))


# --- starting from another draft -----------------------------------------------------------------------------------


def test_init_from_another_draft(shards: Path, model: Path, tmp_path: Path) -> None:
    """Trained once, then continued with another vocabulary: it knows what it knew, and says what it started from."""
    before = learned(shards, model, tmp_path / "a")
    first = load_draft(tmp_path / "a")
    asked = settings(steps=1, lr=1e-9, draft_vocab=40, replay_tokens=0)
    config = train(shards, model, tmp_path / "b", asked, init=tmp_path / "a")
    assert config.training["evaluation"]["agreement"][0] > before[0] - 0.1
    assert config.training["settings"]["init"] == first.config.training["tensors_sha256"]
    with pytest.raises(DraftError, match="holds a run with init"):
        train(shards, model, tmp_path / "b", asked)
    rewritten = json.loads((tmp_path / "a" / "draft.json").read_text()) | {"target_fingerprint": "else"}
    (tmp_path / "a" / "draft.json").write_text(json.dumps(rewritten))
    with pytest.raises(DraftError, match="--init is a draft for the target else"):
        train(shards, model, tmp_path / "c", asked, init=tmp_path / "a")


def test_rows_of_new_tokens_follow_those_that_were_trained() -> None:
    """A head that training turned: rows that were not there turn with it; of three rows nothing is concluded."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    turn, offset = torch.eye(16) + 0.2 * draw(16, 16), 0.5 * draw(16)
    before, rows = draw(400, 16), draw(50, 16)
    torch.testing.assert_close(mapped(rows, before, before @ turn + offset), rows @ turn + offset, atol=0.02, rtol=0.02)
    torch.testing.assert_close(mapped(rows, before[:3], before[:3]), rows)


# --- stopping, curves ----------------------------------------------------------------------------------------------


def test_early_stop_and_curves(shards: Path, model: Path, tmp_path: Path) -> None:
    """A learning rate that cannot move anything: it stops, stays stopped, and draws what it measured."""
    asked = settings(steps=500, lr=1e-12, warmup=0.0, evaluate_every=2, patience=3, ema=0.0)
    config = train(shards, model, tmp_path, asked)
    assert config.training["settings"]["steps"] == 6
    evaluations = [entry for entry in read_log(tmp_path) if "agreement" in entry]
    assert [entry["step"] for entry in evaluations] == [0, 2, 4, 6]
    taus: Any = evaluations[0]["tau"]
    assert set(taus) == {"chain-2", "chain-4", "tree-30", "tree-60"}
    assert (tmp_path / curves.CURVES).read_bytes()[:4] == b"\x89PNG"
    again = train(shards, model, tmp_path, asked)
    assert again.training["settings"]["steps"] == 6 and len(read_log(tmp_path)) == 6 + 4


def test_early_stop_writes_the_best_draft(shards: Path, model: Path, tmp_path: Path) -> None:
    """A learning rate that destroys what it starts from: the draft written is the one from before, resumed or not."""
    learned(shards, model, tmp_path / "a")
    asked = settings(steps=500, lr=0.3, warmup=0.0, evaluate_every=1, patience=2, ema=0.0, replay_tokens=0)
    config = train(shards, model, tmp_path / "b", asked, init=tmp_path / "a")
    evaluations = [entry for entry in read_log(tmp_path / "b") if "agreement" in entry]
    assert config.training["evaluation"]["agreement"] == evaluations[0]["agreement"] != evaluations[-1]["agreement"]
    before = load_draft(tmp_path / "a").tensors
    for again in (False, True):
        if again:
            train(shards, model, tmp_path / "b", asked, init=tmp_path / "a")
        after = load_draft(tmp_path / "b").tensors
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_curves_without_measurements(tmp_path: Path) -> None:
    assert curves.draw(tmp_path) is None
    (tmp_path / curves.LOG).write_text('{"step": 1, "minutes": 1, "loss": 2.0}\n{"step": 2, "min')
    assert curves.read_log(tmp_path) == [{"step": 1, "minutes": 1, "loss": 2.0}]
    assert curves.draw(tmp_path) == tmp_path / curves.CURVES


def test_batches_without_answers_are_no_steps(
    shards: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = ShardSet.batch, iter(range(10_000))

    def blank(self: ShardSet, rows: list[Row], steps: int) -> PackedBatch:
        batch = real(self, rows, steps)
        none = steps == 3 and (always or next(calls) % 2 == 0)
        return replace(batch, step_targets=torch.full_like(batch.step_targets, -1)) if none else batch

    always = False
    monkeypatch.setattr(ShardSet, "batch", blank)
    config = train(shards, model, tmp_path / "some", settings(steps=4, replay_tokens=0, unroll_start=0))
    assert config.training["data"]["batches_without_answer_tokens"] == 4 and config.training["settings"]["steps"] == 4
    assert all(math.isfinite(entry["loss"]) for entry in read_log(tmp_path / "some") if "loss" in entry)
    always = True
    with pytest.raises(DataError, match=r"none of .* batches had an answer token"):
        train(shards, model, tmp_path / "none", settings(steps=4, replay_tokens=0, unroll_start=0))
