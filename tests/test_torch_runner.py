"""The torch engine of distillation: left padding changes nothing, states are those of the taps, nothing is ignored."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from elsi_edge.artifacts import FINAL_NORM, AnswerRequest, BatchTargetRunner
from elsi_edge.cli.torch_runner import open_torch_runner
from elsi_edge.draft.shards import ShardManifest
from elsi_edge.models import resolve
from elsi_edge.runtime.target_runner import open_target_runner
from elsi_edge.text import TextCodec
from tests.cli_run import Run
from tests.conftest import TinyModel
from tests.test_runtime_batch import requests

MakeBundle = Callable[..., Path]


@pytest.fixture
def runner(tiny_model: TinyModel) -> BatchTargetRunner:
    return open_torch_runner(resolve(str(tiny_model.model)), frozenset({2, 5}), device="cpu", threads=1)


def together(runner: BatchTargetRunner, asked: list[AnswerRequest], batch: int) -> dict[str, list[int]]:
    found = [(r.key, ids) for r, ids in runner.answer_batch(iter(asked), batch=batch, stop=lambda: False)]
    assert len(found) == len(asked)
    return dict(found)


@pytest.mark.parametrize("batch", [1, 4])
def test_it_answers_as_the_onnx_graph_does(runner: BatchTargetRunner, tiny_bundle: MakeBundle, batch: int) -> None:
    """fp32 on both sides, the same seeds: prompts of several lengths, greedy and sampled, equal token for token."""
    onnx = open_target_runner(tiny_bundle("fp32", plain=True), 1)
    asked = requests(10)
    assert together(runner, asked, batch) == together(onnx, asked, 4)


def test_it_records_as_the_onnx_graph_does(runner: BatchTargetRunner, tiny_bundle: MakeBundle) -> None:
    onnx = open_target_runner(tiny_bundle("fp32", plain=True), 1)
    ids, taps = list(range(10, 60)), (0, 1, 2, FINAL_NORM)
    got, wanted = (each.record(ids, taps, prompt_tokens=20, keep_top=9) for each in (runner, onnx))
    np.testing.assert_allclose(got.states, wanted.states, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got.top_logits, wanted.top_logits, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(got.log_sum_exp, wanted.log_sum_exp, rtol=1e-5)
    assert (got.top_ids[:, 0] == wanted.top_ids[:, 0]).all() and got.top_ids.shape == (30, 9)
    whole = runner.states(ids, taps)
    np.testing.assert_array_equal(whole.states, got.states)
    assert whole.logits.shape == (50, runner.shape.vocab_size)


def test_it_stops_when_told(runner: BatchTargetRunner) -> None:
    done: list[str] = []
    for request, _ in runner.answer_batch(iter(requests(12)), batch=3, stop=lambda: len(done) >= 2):
        done.append(request.key)
    assert 2 <= len(done) < 6


def test_distill_with_either_engine(run: Run, tiny_model: TinyModel, tiny_bundle: MakeBundle) -> None:
    Path("p.txt").write_text("a b c\nthe cat\nred hat\n")
    common = ("distill", tiny_model.model, "--prompts", "p.txt", "--max-tokens", 9, "--taps", "1,final-norm")
    done = run(*common, "--engine", "torch", "--device", "cpu", "--threads", 1, "--out", "t", "--json")
    assert done.code == 0, done.err
    assert done.json["states"] == ["1", "final-norm"] and done.json["rows"] == 3
    bundle = tiny_bundle("fp32", plain=True)
    done = run(*common, "--bundle", bundle, "--threads", 2, "--batch", 2, "--max-disk", "1MB", "--out", "o")
    assert done.code == 0, done.err
    assert "tap 1 and the state after the final norm" in done.out
    torch_made, onnx_made = (ShardManifest.load(Path(name)) for name in ("t", "o"))
    assert torch_made.settings["arithmetic"] == "torch-float32" and onnx_made.settings["arithmetic"] == "onnx-fp32"
    assert torch_made.answer_tokens == onnx_made.answer_tokens
    done = run(*common, "--bundle", bundle, "--out", "t")
    assert done.code == 1 and "arithmetic = torch-float32, this run has onnx-fp32" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "gpu"), "neither onnx nor torch"),
        (("--device", "cpu"), "--device cpu belongs to --engine torch"),
        (("--engine", "torch", "--bundle", "x"), "--bundle x belongs to --engine onnx"),
        (("--engine", "torch", "--device", "warp"), "--device 'warp' is not a device"),
        (("--engine", "torch", "--device", "meta"), "cpu and cuda are supported"),
        (("--max-disk", "2XB"), "--max-disk '2XB' is not a size"),
        (("--max-disk", "nan"), "--max-disk 'nan' is not a size"),
        (("--keep-answers",), "--keep-answers needs conversations"),
        (("--batch", "0"), "--batch"),
    ],
)
def test_options_that_contradict_are_refused(
    run: Run, tiny_model: TinyModel, options: tuple[str, ...], said: str
) -> None:
    done = run("distill", tiny_model.model, "--taps", "1", *options)
    assert done.code == 2 and said in done.err, done.err


def test_a_cuda_device_that_is_not_there(run: Run, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = run("distill", tiny_model.model, "--taps", "1", "--engine", "torch", "--device", "cuda")
    assert done.code == 2 and "this torch sees 0 CUDA devices" in done.err


def test_conversations_with_their_answers(
    run: Run, tiny_model: TinyModel, tiny_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("c.jsonl").write_text(
        '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a red hat"}]}\n'
        '{"data": ["the cat", "sat there"]}\n'
    )
    command = (
        "distill", tiny_model.model, "--prompts", "c.jsonl", "--keep-answers", "--taps", "1",
        "--bundle", tiny_bundle("fp32", plain=True), "--out", "s", "--json",
    )  # fmt: skip
    done = run(*command)
    assert done.code == 1 and "does not write the answer right after the prompt" in done.err  # no end token in a turn
    monkeypatch.setattr(TextCodec, "eos_ids", frozenset({2, 4, 5}))
    done = run(*command)
    assert done.code == 0, done.err
    assert done.json["rows"] == 2
    lines = [json.loads(line) for line in Path("s/answers.jsonl").read_text().splitlines()]
    assert [line["finish"] for line in lines] == ["given", "given"]
    codec = TextCodec.open(tiny_bundle("fp32", plain=True))
    assert codec.decode(lines[0]["answer_ids"][:-1]) == "a red hat" and lines[0]["answer_ids"][-1] == 4
