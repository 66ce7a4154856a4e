"""Answers in batches: the same tokens as alone, whoever the company; the record that distillation takes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elsi_edge.artifacts import FINAL_NORM, AnswerRequest
from elsi_edge.bundle import Bundle, BundleManifest, BundleWriter
from elsi_edge.errors import BundleError
from elsi_edge.runtime import batch as batching
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.batch import top_candidates
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.target_runner import BundleRunner, rank_rows

MakeBundle = Callable[..., Path]


def open_runner(bundle: Path) -> BundleRunner:
    return BundleRunner(Bundle.load(bundle), SessionSettings(threads=1))


@pytest.fixture
def runner(tiny_bundle: MakeBundle) -> BundleRunner:
    return open_runner(tiny_bundle("fp32", plain=True))


def requests(count: int, *, longest: int = 40, max_tokens: int = 24) -> list[AnswerRequest]:
    """Prompts of several lengths, greedy and sampled by turns, limits of their own."""
    draw = np.random.default_rng(count)
    return [
        AnswerRequest(
            key=f"r{index}",
            prompt_ids=tuple(map(int, draw.integers(6, 250, draw.integers(1, longest)))),
            max_tokens=int(draw.integers(1, max_tokens + 1)),
            temperature=(0.0, 0.8)[index % 2],
            top_k=(0, 20, 0, 0)[index % 4],
            seed=index,
        )
        for index in range(count)
    ]


def alone(runner: BundleRunner, request: AnswerRequest) -> list[int]:
    return runner.answer(
        request.prompt_ids,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        seed=request.seed,
    )


def together(runner: BundleRunner, asked: list[AnswerRequest], batch: int) -> dict[str, list[int]]:
    found = [(r.key, ids) for r, ids in runner.answer_batch(iter(asked), batch=batch, stop=lambda: False)]
    assert len(found) == len(asked)
    return dict(found)


@pytest.mark.parametrize("batch", [1, 2, 5, 40])
def test_an_answer_does_not_depend_on_its_company(runner: BundleRunner, batch: int) -> None:
    asked = requests(17)
    found = together(runner, asked, batch)
    assert {len(ids) for ids in found.values()} > {1}
    for request in asked:
        assert found[request.key] == alone(runner, request), request.key


def test_the_cache_grows_under_live_answers(runner: BundleRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 8 tokens: every answer crosses several, and a long prompt comes in beside short ones."""
    monkeypatch.setattr(batching, "PAGE", 8)
    monkeypatch.setattr(batching, "PREFILL_ROWS", 16)
    asked = sorted(requests(9, longest=90, max_tokens=60), key=lambda request: len(request.prompt_ids))
    found = together(runner, asked, 3)
    for request in asked:
        assert found[request.key] == alone(runner, request), request.key


def test_an_end_token_frees_the_slot_and_the_context_ends_an_answer(
    runner: BundleRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(8, max_tokens=30)
    full = {request.key: alone(runner, request) for request in asked}
    ends = frozenset(ids[len(ids) // 2] for ids in full.values())
    monkeypatch.setattr(runner, "_eos", ends)
    found = together(runner, asked, 3)
    for key, ids in full.items():
        stop = next(place for place, token in enumerate(ids) if token in ends)
        assert found[key] == ids[: stop + 1]
    monkeypatch.setattr(runner, "_eos", frozenset())
    monkeypatch.setattr(runner, "_context", 45)
    long = AnswerRequest(key="x", prompt_ids=(7,) * 40, max_tokens=99, temperature=0, top_k=0, seed=0)
    assert len(together(runner, [long, *asked[:1]], 2)["x"]) == 5


def test_slots_are_filled_as_they_come_free_and_stop_is_heeded(runner: BundleRunner) -> None:
    drawn: list[str] = []

    def source() -> Iterator[AnswerRequest]:
        for request in requests(10):
            drawn.append(request.key)
            yield request

    done: list[list[int]] = []
    for _, ids in runner.answer_batch(source(), batch=4, stop=lambda: len(done) >= 3):
        done.append(ids)
        assert len(drawn) <= 4 + len(done)
    assert 3 <= len(done) < 10


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_quantised_rows_do_not_see_each_other(tiny_bundle: MakeBundle, precision: str) -> None:
    """The int4 and int8 kernels give a row the same bits beside any others: batches of 2 and 8 agree entirely."""
    runner = open_runner(tiny_bundle(precision, plain=True))
    asked = requests(8)
    assert together(runner, asked, 2) == together(runner, asked, 8)


def test_an_older_bundle_is_told_what_to_do(tiny_bundle: MakeBundle, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    source = tiny_bundle("fp32", plain=True)
    for path in source.iterdir():
        (old / path.name).write_bytes(path.read_bytes())
    manifest = Bundle.load(source).manifest
    graphs = {role: name for role, name in manifest.graphs.items() if role != "target-batch"}
    BundleWriter(old).finish(BundleManifest(**{**manifest.__dict__, "graphs": graphs}))
    runner = open_runner(old)
    assert together(runner, requests(2), 1)
    with pytest.raises(BundleError, match=r"no target-batch graph.*--plain-only --force, or give --batch 1"):
        together(runner, requests(2), 2)


def test_a_complete_bundle_is_refused_before_any_work(tiny_bundle: MakeBundle) -> None:
    with pytest.raises(BundleError, match="no target-states graph"):
        open_runner(tiny_bundle("fp32"))


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_record_is_what_states_and_logits_say(tiny_bundle: MakeBundle, precision: str) -> None:
    runner = open_runner(tiny_bundle(precision, plain=True))
    ids, prompt = list(range(10, 70)), 21
    record = runner.record(ids, (0, 2, FINAL_NORM), prompt_tokens=prompt, keep_top=12)
    whole = runner.states(ids, (0, 2, FINAL_NORM))
    np.testing.assert_array_equal(record.states, whole.states)
    logits = torch.from_numpy(whole.logits[prompt - 1 : -1])
    top, best = torch.topk(logits, 12, dim=-1)
    np.testing.assert_allclose(record.top_logits, top.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(record.log_sum_exp, torch.logsumexp(logits, -1).numpy(), rtol=1e-6)
    assert (record.top_ids[:, 0] == best[:, 0].numpy()).all()
    assert record.top_ids.shape == (39, 12)
    assert not np.allclose(record.states[1], record.states[2])  # before the final norm, and after it


def test_memory_is_counted_by_cache_and_logits(runner: BundleRunner) -> None:
    per_token = runner.shape.kv_bytes_per_token()
    few, many = (runner.memory_needed(batch=batch, tokens=256) for batch in (8, 16))
    assert many - few == 8 * (256 * per_token + runner.shape.vocab_size * 4)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 700),
    st.integers(0, 80),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3, 10_000]),
)
def test_candidates_hold_the_largest(width: int, count: int, seed: int, levels: int) -> None:
    """Few levels make ties: all that tie with the last one kept are there, in order of their ids."""
    logits = np.random.default_rng(seed).integers(0, levels, width).astype(np.float32)
    ids = top_candidates(logits, count)
    assert (np.diff(ids) > 0).all()
    if 0 < count < width:
        least = np.sort(logits)[::-1][count - 1]
        assert set(np.flatnonzero(logits >= least)) <= set(ids.tolist())
    else:
        assert len(ids) == width


def test_ranking_breaks_ties_by_the_lower_id_and_survives_large_values() -> None:
    logits = np.array([[1.0, 3.0, 3.0, -5.0], [70_000.0, 0.0, 69_999.0, 0.0]], np.float32)
    ids, top, log_sum_exp = rank_rows(logits, 3)
    assert ids.tolist() == [[1, 2, 0], [0, 2, 1]]
    np.testing.assert_allclose(log_sum_exp, torch.logsumexp(torch.from_numpy(logits), -1).numpy(), rtol=1e-6)
    assert top[1].tolist() == [70_000.0, 69_999.0, 0.0]
    assert np.isnan(rank_rows(np.array([[1.0, np.nan, 0.0]], np.float32), 2)[2]).all()


@pytest.mark.skipif(not native_ops.report().available, reason="the native operators were not built")
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_many_sequences_and_all_taps_use_the_native_products(tiny_bundle: MakeBundle, precision: str) -> None:
    """Half of the time that the stock products take; the states are the same but for an activation's rounding."""
    bundle = Bundle.load(tiny_bundle(precision, plain=True))
    kinds = {
        role: {node.op_type for node in onnx.load(bundle.graph(role), load_external_data=False).graph.node}
        for role in ("target-states-native", "target-batch-native")
    }
    for found in kinds.values():
        assert "NormMatMulBlocks" in found and "GroupQueryAttention" in found and "MatMulNBits" not in found
    stock, native = (BundleRunner(bundle, SessionSettings(threads=1, native=on)) for on in (False, True))
    ids = list(range(10, 70))
    taps = (0, 1, bundle.manifest.shape.blocks, FINAL_NORM)
    wanted, got = stock.states(ids, taps), native.states(ids, taps)
    np.testing.assert_array_equal(got.states[0], wanted.states[0])
    assert np.abs(got.states - wanted.states).max() < 0.05 * np.abs(wanted.states).max()
    assert not np.array_equal(got.states, wanted.states)  # other kernels did run
    assert together(native, requests(8), 2) == together(native, requests(8), 8)
