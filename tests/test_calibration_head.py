"""Entropies and argmaxes made from a bounded number of rows, and the models for which only whole logits are right."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elsi_edge.calibration import capture, head
from tests.test_calibration_families import FAMILIES, WIDE, gap, one_thread, tiny, weights_of

torch = pytest.importorskip("torch")

__all__ = ["one_thread"]  # a fixture, for every test here too
LONG = [int(id_) for id_ in np.random.default_rng(3).integers(0, 120, 300)]


def exact(logits: Any) -> Any:
    """Entropy in float64."""
    log_p = torch.log_softmax(logits.double(), dim=-1)
    return -torch.where(log_p.isfinite(), log_p.exp() * log_p, 0.0).sum(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_entropy_of_logits(dtype: Any, spread: float) -> None:
    torch.manual_seed(0)
    logits = (spread * torch.randn(7, 200_000)).to(dtype)  # more than fits in one part
    found = head.predictions(logits)
    assert found.entropy.dtype == torch.float32 and found.argmax.dtype == torch.int64
    assert gap(found.entropy.numpy(), exact(logits).numpy()) < 2e-5
    np.testing.assert_array_equal(found.argmax.numpy(), logits.double().argmax(-1).numpy())


def test_entropy_of_masked_tied_and_certain_logits() -> None:
    logits = torch.full((3, 50), -torch.inf)
    logits[0, [4, 9]] = 3.0  # two equals, the rest masked
    logits[1] = torch.linspace(0.0, -4000.0, 50)  # sure
    logits[2, :] = 1e30
    found = head.predictions(logits)
    np.testing.assert_allclose(found.entropy.numpy(), [np.log(2.0), 0.0, np.log(50.0)], atol=1e-6)
    assert found.argmax.tolist() == [4, 0, 0]


class Watched:
    """Records how many rows the output head of a model is asked for at a time."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        model.get_output_embeddings().register_forward_pre_hook(
            lambda module, args: self.rows.append(args[0].numel() // args[0].shape[-1])
        )


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many rows at a time with a vocabulary of 120."""
    monkeypatch.setattr(head, "LOGITS_ELEMENTS", 120 * 16 + 7)
    yield 16


def test_no_more_rows_than_allowed_however_long_the_prompt(few_rows: int) -> None:
    forward, config, _ = FAMILIES["llama"]
    config = {**config, "max_position_embeddings": 512}
    model = tiny("llama", config)
    watched = Watched(model)
    found = {p.index: p for p in capture.capture(model, [LONG, LONG[:40], LONG[:50]], batch_tokens=128)}
    assert max(watched.rows) == few_rows  # and not 300, the prompt's, or 100, the batch's
    wanted = forward(LONG, config, weights_of(model))
    assert gap(found[0].entropy, wanted.entropy) < 3e-4
    assert gap(found[0].states, wanted.taps) < 3e-4
    np.testing.assert_array_equal(found[0].argmax, wanted.argmax)
    np.testing.assert_allclose(found[1].entropy, wanted.entropy[:40], atol=3e-4)


class _Odd:
    """Mixed into a model: what it does with logits depends on where they stand, so rows alone do not show it."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        logits = super().forward(input_ids=input_ids, **options).logits  # type: ignore[misc]
        return SimpleNamespace(logits=logits * (1.0 + 0.1 * torch.arange(logits.shape[1]))[None, :, None])


def test_whole_logits_where_rows_alone_are_not_right(few_rows: int) -> None:
    model = tiny("llama", FAMILIES["llama"][1])
    model.__class__ = type("Odd", (_Odd, type(model)), {})
    assert head.open_head(model, LONG) is None
    watched = Watched(model)
    prompts = [LONG[:5], LONG[5:12], LONG[20:40]]
    for prompt in capture.capture(model, prompts):
        with torch.inference_mode():
            wanted = exact(model(input_ids=torch.tensor([prompts[prompt.index]])).logits[0])
        assert gap(prompt.entropy, wanted.numpy()) < 3e-4
    assert max(watched.rows) <= 20  # one prompt's, and batches within the bound


def test_a_body_that_is_not_apart_gives_whole_logits() -> None:
    model = tiny("gpt2", FAMILIES["gpt2"][1])
    wanted = {p.index: p for p in capture.capture(model, [LONG[:9], LONG[:4]])}
    body = model.transformer

    class Bare(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Neither a base model nor outputs by name."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.lm_head = body, model.lm_head

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(self, input_ids: Any, use_cache: bool) -> Any:
            return SimpleNamespace(logits=self.lm_head(self.body(input_ids=input_ids, use_cache=use_cache)[0]))

    assert head.open_head(Bare(), [1, 2, 3]) is None
    for found in capture.capture(Bare(), [LONG[:9], LONG[:4]]):
        np.testing.assert_allclose(found.entropy, wanted[found.index].entropy, atol=1e-5)
        np.testing.assert_array_equal(found.argmax, wanted[found.index].argmax)
        np.testing.assert_array_equal(found.states, wanted[found.index].states)


def test_the_model_is_left_as_it_was() -> None:
    """Also between prompts: a caller may run it there."""
    model = tiny("llama", {**WIDE, "head_dim": 16})
    ids = torch.tensor([LONG[:6]])
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    for _ in capture.capture(model, [LONG[:9], LONG[:4]]):
        assert not torch.is_inference_mode_enabled()
        assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in model.modules())
        assert model(input_ids=ids).logits.requires_grad
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, before)
