"""Quantisation-aware training: the grid is export's, gradients are those of the rounded weights, none stays rounded."""

from pathlib import Path

import numpy as np
import pytest
import torch

from elsi_edge.artifacts import BITS, BLOCK, Precision
from elsi_edge.draft.checkpoint import load_draft
from elsi_edge.draft.distill import distill
from elsi_edge.draft.rounding import round_blocks, rounded
from elsi_edge.draft.settings import DistillSettings, TrainSettings
from elsi_edge.draft.train import train
from elsi_edge.errors import ConfigError
from elsi_edge.export import rounding as export_rounding
from tests import draft_toy as toy


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [64, 100, 16])
def test_the_grid_is_exports(bits: int, width: int) -> None:
    weight = np.random.default_rng(width).standard_normal((40, width)).astype(np.float32)
    weight[3] = 0.0  # blocks without a scale
    weight[4] = np.abs(weight[4])
    packed, scales = export_rounding.quantise(weight, bits, "nearest")
    levels = np.stack([packed & 15, packed >> 4], -1).reshape(40, -1) if bits == 4 else packed.reshape(40, -1)
    steps = np.repeat(scales.reshape(40, -1), BLOCK, axis=1)
    expected = ((levels.astype(np.float32) - (1 << bits - 1)) * steps)[:, :width]
    found = round_blocks(torch.from_numpy(weight), bits).numpy()
    # A weight half-way between two levels may land on either.
    assert (np.abs(found - expected) > 1e-6).mean() < 1e-3
    np.testing.assert_allclose(found, expected, atol=1.01 * float(np.abs(steps).max()))


def test_gradients_are_those_of_the_rounded_weights() -> None:
    torch.manual_seed(0)
    layer, given = torch.nn.Linear(64, 8), torch.randn(5, 64)
    exact, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    plain = torch.nn.Linear(64, 8)
    with torch.no_grad():
        plain.weight.copy_(round_blocks(exact, 4))
        plain.bias.copy_(bias)
    with rounded(layer, "int4"):
        loss = layer(given).square().sum()
        loss.backward()
    plain(given).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)  # type: ignore[arg-type]
    assert torch.equal(layer.weight, exact) and torch.equal(layer.bias, bias)
    assert not torch.equal(plain.weight, exact)


def test_weights_are_put_back_after_an_error() -> None:
    layer = torch.nn.Linear(64, 8)
    exact = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="stopped"), rounded(layer, "int8"):
        raise RuntimeError("stopped")
    assert torch.equal(layer.weight, exact)


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("qat")
    toy.write_model(place / "model")
    options = DistillSettings(max_tokens=24, shard_tokens=300, temperatures=(0.0,))
    distill(toy.ToyRunner(), toy.ToyCodec(), toy.prompts(60), toy.selection(2), options, place / "shards", model="toy")
    return place


def run(place: Path, name: str, qat: Precision, **changes: object) -> Path:
    values = {"lr": 1e-2, "ema": 0.9, "draft_vocab": 48, "batch_tokens": 128, "evaluate_every": 1000}
    settings = TrainSettings(**{**values, "threads": 1, "arithmetic": "fp32", **changes}, qat=qat)  # type: ignore[arg-type]
    train(place / "shards", place / "model", place / name, settings)
    return place / name


def test_a_draft_trained_for_int4_is_judged_at_int4_and_saved_exact(place: Path) -> None:
    draft = load_draft(run(place, "int4", "int4", steps=150))
    assert draft.config.training["settings"]["qat"] == "int4"
    assert draft.config.training["evaluation"]["agreement"][0] > 0.8
    weight = torch.from_numpy(draft.tensors["head.weight"])
    assert not torch.allclose(weight, round_blocks(weight, BITS["int4"]))


def test_rounding_changes_what_is_trained(place: Path) -> None:
    exact, aware = (load_draft(run(place, f"short-{qat}", qat, steps=3)) for qat in ("fp32", "int4"))
    assert not np.array_equal(exact.tensors["head.weight"], aware.tensors["head.weight"])


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="qat is 'int2', it must be int4 or int8 or fp32"):
        TrainSettings(steps=1, qat="int2")  # type: ignore[arg-type]
