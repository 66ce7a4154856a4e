"""Distillation: shards, their resume, loops, answers files, vocabulary."""

import gzip
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from elsi_edge.artifacts import FINAL_NORM, AnswerRequest, LayerSelection, PromptRow, TargetRecord, TargetStates
from elsi_edge.draft.answers import AnswerLog, read_answers
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.distill import distill
from elsi_edge.draft.jobs import given_answer
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.shards import ANSWERS, ShardManifest, require_made_for, verify_shards
from elsi_edge.draft.vocab import choose_vocab, target_to_draft
from elsi_edge.draft.workers import Sequential
from elsi_edge.errors import DataError, PromptError, SelectionError, StorageError, UsageError
from elsi_edge.loops import loop_start
from tests import draft_toy as toy

SETTINGS = DistillSettings(max_tokens=20, shard_tokens=60, temperatures=(0.0,))


def run(out: Path, runner: toy.ToyRunner | None = None, count: int = 12, **kwargs: object) -> ShardManifest:
    arguments: dict[str, object] = {"selection": toy.selection(), "settings": SETTINGS} | kwargs
    return distill(runner or toy.ToyRunner(), toy.ToyCodec(), toy.prompts(count), out=out, **arguments)  # type: ignore[arg-type]


def test_a_shard_holds_what_the_target_said(tmp_path: Path) -> None:
    runner = toy.ToyRunner()
    manifest = run(tmp_path, runner, selection=toy.selection(1, 3))
    assert manifest.rows == 12 and len(manifest.shards) > 2
    assert manifest.required_ids == (toy.EOS, toy.START, toy.ASSISTANT)
    tensors = load_file(tmp_path / manifest.shards[0].file)
    first, stop = tensors["row_offsets"][:2]
    ids, mask = tensors["token_ids"][first:stop], tensors["answer_mask"][first:stop].astype(bool)
    assert ids[0] == toy.START and mask.sum() == 20 and not mask[:5].any()
    np.testing.assert_allclose(tensors["states.3"][first:stop], runner.table[3][ids], rtol=1e-3)
    # Record i is the distribution of the i-th answer token, so its best id is that token.
    assert tensors["top_ids"][:20, 0].tolist()[1:] == ids[mask].tolist()[1:]
    best = 8.0 - np.log(np.exp(8.0) + toy.V - 1)
    np.testing.assert_allclose(tensors["top_log_probs"][:20, 0], best, rtol=1e-2)
    np.testing.assert_allclose(tensors["log_sum_exp"], 8.0 - best, rtol=1e-5)


def test_states_beyond_float16_are_scaled(tmp_path: Path) -> None:
    runner = toy.ToyRunner(scale=1e6)
    run(tmp_path, runner)
    data = ShardSet(tmp_path, max_length=100)
    batch = data.batch(data.rows[:1], 2)
    tokens = load_file(tmp_path / data.manifest.shards[0].file)["token_ids"]
    np.testing.assert_allclose(batch.taps.numpy(), runner.table[2][tokens[: len(batch.taps)]], rtol=2e-3)


def test_states_that_are_not_finite_name_the_row(tmp_path: Path) -> None:
    runner = toy.ToyRunner()
    runner.table[2, 5] = np.inf
    with pytest.raises(DataError, match=r"row 'p\d+@0': the target's states or logits are not finite"):
        run(tmp_path, runner, settings=DistillSettings(max_tokens=41, temperatures=(0.0,)))


def test_interrupt_and_resume_lose_and_double_nothing(tmp_path: Path) -> None:
    runner = toy.ToyRunner()
    runner.fail_after = 7
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", runner)
    assert ShardManifest.load(tmp_path / "a").rows == 7
    resumed, straight = run(tmp_path / "a"), run(tmp_path / "b")
    keys = [key for shard in resumed.shards for key in shard.rows]
    assert keys == [key for shard in straight.shards for key in shard.rows]
    assert resumed.counts == straight.counts
    assert (tmp_path / "a" / ANSWERS).read_text() == (tmp_path / "b" / ANSWERS).read_text()


def test_after_a_kill_between_shard_and_manifest(tmp_path: Path) -> None:
    """The state that kill -9 leaves: a shard that is not listed, half a line of answers."""
    straight = run(tmp_path)
    listed = (tmp_path / "manifest.json").read_text()
    value = json.loads(listed)
    orphan = value["shards"].pop()
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    (tmp_path / orphan["file"]).write_bytes(b"half")
    with (tmp_path / ANSWERS).open("a") as handle:
        handle.write('{"id": "p1')
    resumed = run(tmp_path)
    assert [s.sha256 for s in resumed.shards] == [s.sha256 for s in straight.shards]
    verify_shards(tmp_path, resumed)
    assert len(AnswerLog(tmp_path / ANSWERS).known) == 12


def test_more_prompts_later(tmp_path: Path) -> None:
    few = run(tmp_path, settings=DistillSettings(max_tokens=20, temperatures=(0.0,), count=5))
    more = run(tmp_path, settings=DistillSettings(max_tokens=20, temperatures=(0.0,)))
    assert (few.rows, more.rows) == (5, 12)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"runner": toy.ToyRunner("other")}, "target fingerprint toy"),
        ({"selection": toy.selection(3)}, "shards of tap 2, this run records tap 3"),
        ({"settings": DistillSettings(max_tokens=21, shard_tokens=60, temperatures=(0.0,))}, "max_tokens = 20"),
        ({"count": 13}, "prompts sha256"),
    ],
)
def test_shards_of_something_else_are_not_continued(tmp_path: Path, change: dict[str, object], names: str) -> None:
    run(tmp_path)
    with pytest.raises(DataError, match=names):
        run(tmp_path, **change)  # type: ignore[arg-type]


def test_a_selection_of_another_target_is_refused(tmp_path: Path) -> None:
    wrong = LayerSelection(taps=(2,), method="explicit", blocks=30, width=toy.E)
    with pytest.raises(SelectionError, match="30 blocks"):
        run(tmp_path, selection=wrong)


def test_too_little_disk_is_said_before_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elsi_edge.fsio._free_bytes", lambda _: 100)
    runner = toy.ToyRunner()
    with pytest.raises(StorageError, match="distillation needs"):
        run(tmp_path, runner)
    assert runner.calls == 0


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_an_altered_shard_is_named(tmp_path: Path, damage: str) -> None:
    manifest = run(tmp_path)
    path = tmp_path / manifest.shards[1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data[:-10] if damage == "cut" else data))
    with pytest.raises(DataError, match="shard-00001"):
        ShardSet(tmp_path, max_length=100)


def test_given_answers_are_joined_by_id(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl.gz"
    rows = [
        {"id": "p3", "temperature": 0.8, "finish": "length", "answer_ids": [1, 2, 3, 4]},
        {"id": "absent", "temperature": 0.0, "finish": "stop", "answer_ids": [1]},
        {"id": "p1", "temperature": 0.0, "finish": "stop", "answer_ids": [5, 6, toy.EOS]},
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    manifest = run(tmp_path / "out", answers=read_answers(path))
    assert manifest.shards[0].rows == ("p3@0.8", "p1@0")
    kept = [json.loads(line) for line in (tmp_path / "out" / ANSWERS).read_text().splitlines()]
    assert [row["answer_ids"] for row in kept] == [[1, 2, 3, 4], [5, 6, toy.EOS]]
    with pytest.raises(DataError, match="none of the 1 answers"):
        run(tmp_path / "none", answers=[answer for answer in read_answers(path) if answer.id == "absent"])


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": 3}', '{"id": "a", "answer_ids": ["x"]}', '{"id": "p", "answer_ids": [1]}']
)
def test_a_broken_answers_file_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "p", "temperature": 0, "answer_ids": [1]}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_answers(path)


def test_a_truncated_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = "".join(f'{{"id": "p{i}", "answer_ids": [{i}]}}\n' for i in range(50))
    path.write_bytes(gzip.compress(lines.encode())[:-12])
    with pytest.raises(DataError, match="cut short"):
        read_answers(path)


def test_loops_are_cut_where_they_start() -> None:
    good = list(range(60))
    assert loop_start(good) is None
    looping = good + [1000, 1001, 1002] * 60
    start = loop_start(looping)
    assert start is not None and 50 <= start <= 70
    assert loop_start([1, 2, 3] * 80) == 0
    assert loop_start([]) is None and loop_start([1, 2]) is None


def test_looping_answers_are_counted(tmp_path: Path) -> None:
    manifest = run(tmp_path, settings=DistillSettings(max_tokens=200, temperatures=(0.0,)))  # the toy repeats after 40
    assert manifest.counts["rows cut where a loop starts"] == 12
    assert manifest.answer_tokens == 12 * 200 - manifest.counts["tokens cut"] > 12 * 16


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    manifest = run(tmp_path, settings=DistillSettings(max_length=6, temperatures=(0.0,)))
    assert manifest.rows == 0
    assert manifest.counts == {"rows left out: prompt too long": 12}


def counts(**seen: int) -> np.ndarray:
    values = np.zeros(304, dtype=np.int64)
    for token, count in seen.items():
        values[int(token[1:])] = count
    return values


def test_vocabulary_rule() -> None:
    answers, prompt = counts(t250=5, t7=9, t9=5), counts(t100=3)
    vocab = choose_vocab(answers, prompt, (303, 40), 8)
    # Required, then answers by count and id, then prompts, then the lowest ids.
    assert vocab.draft_to_target_ids.tolist() == sorted([303, 40, 7, 9, 250, 100, 0, 1])
    assert vocab.coverage == 1.0 and vocab.draft_to_target_ids.dtype == np.int64
    small = choose_vocab(answers, prompt, (303,), 2)
    assert small.draft_to_target_ids.tolist() == [7, 303]
    assert small.coverage == pytest.approx(9 / 19)
    inverse = target_to_draft(small.draft_to_target_ids, 304)
    assert (inverse[7], inverse[303], inverse[9]) == (0, 1, -1)


def test_vocabulary_is_capped_and_needs_room_for_required_ids() -> None:
    assert (
        choose_vocab(counts(t1=1), counts(), (303, 999), 8192).size == 304
    )  # an id without a row of logits is left out
    with pytest.raises(DataError, match="cannot hold the 2"):
        choose_vocab(counts(t1=1), counts(), (303, 2), 1)


# --- several workers ------------------------------------------------------------------------------------------------


class BatchRunner(toy.ToyRunner):
    """The toy as three workers that answer in batches and finish in another order than they began."""

    workers = 3
    arithmetic = "toy"

    def __init__(self, fail: Callable[[int], None] = lambda call: None, memory: int = 0) -> None:
        super().__init__()
        self.fail, self.memory = fail, memory
        self.threads: set[int] = set()
        self._count = threading.Lock()

    def answer_batch(
        self, requests: Iterator[AnswerRequest], *, batch: int, stop: Callable[[], bool]
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        while group := list(itertools.islice(requests, batch)):
            for request in group[::-1]:
                if stop():
                    return
                self.threads.add(threading.get_ident())
                time.sleep(0.002)  # as ONNX Runtime, it lets the other threads go on
                yield request, list(next(Sequential(self).answer_batch(iter([request]), batch=1, stop=stop))[1])

    def record(
        self, token_ids: Sequence[int], taps: Sequence[int], *, prompt_tokens: int, keep_top: int
    ) -> TargetRecord:
        with self._count:
            self.calls += 1
            call = self.calls
        self.fail(call)
        return Sequential(toy.ToyRunner()).record(token_ids, taps, prompt_tokens=prompt_tokens, keep_top=keep_top)

    def memory_needed(self, *, batch: int, tokens: int) -> int:
        return self.memory


MANY = replace(SETTINGS, temperatures=(0.0, 0.8), batch=6)


def keys(manifest: ShardManifest) -> list[str]:
    return [key for shard in manifest.shards for key in shard.rows]


def test_several_workers_write_what_one_writes(tmp_path: Path) -> None:
    runner = BatchRunner()
    many = run(tmp_path / "many", runner, count=40, settings=MANY)
    one = run(tmp_path / "one", count=40, settings=MANY)
    assert [shard.sha256 for shard in many.shards] == [shard.sha256 for shard in one.shards]
    assert keys(many) == keys(one) and len(runner.threads) > 1
    logs = [(tmp_path / name / ANSWERS).read_text().splitlines() for name in ("many", "one")]
    assert sorted(logs[0]) == sorted(logs[1])  # seeds included
    lines = [json.loads(line) for line in logs[0]]
    assert {line["decoder"] for line in lines} == {"batch"} and len({line["seed"] for line in lines}) == 40


def test_a_worker_that_fails_ends_the_run_and_keeps_what_is_whole(tmp_path: Path) -> None:
    def fail(call: int) -> None:
        if call == 17:
            raise DataError("row 17 is bad")

    before = threading.active_count()
    with pytest.raises(DataError, match="row 17 is bad"):
        run(tmp_path, BatchRunner(fail), count=40, settings=MANY)
    assert threading.active_count() == before
    found = ShardManifest.load(tmp_path)
    verify_shards(tmp_path, found)
    assert 0 < found.rows < 40
    resumed = run(tmp_path, BatchRunner(), count=40, settings=MANY)
    assert sorted(keys(resumed)) == sorted(keys(run(tmp_path / "b", count=40, settings=MANY)))


def test_an_interrupt_stops_the_workers(tmp_path: Path) -> None:
    class Interrupted:
        rows = 0

        def advance(self, amount: float) -> None:
            self.rows += int(amount)
            if self.rows == 9:
                raise KeyboardInterrupt

        def note(self, text: str) -> None: ...

    runner, before = BatchRunner(), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, runner, count=400, settings=MANY, reporter=Interrupted())
    assert threading.active_count() == before and runner.calls < 200
    assert ShardManifest.load(tmp_path).rows == 9


KILLED = """
import os, signal, sys
from pathlib import Path
from tests import draft_toy as toy
from tests.test_draft_distill import MANY, BatchRunner, run

def fail(call: int) -> None:
    if call == 23:
        os.kill(os.getpid(), signal.SIGKILL)

run(Path(sys.argv[1]), BatchRunner(fail), count=40, settings=MANY)
"""


def test_kill_9_loses_doubles_and_tears_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")], cwd=Path(__file__).parents[1])
    assert done.returncode == -9
    found = ShardManifest.load(tmp_path / "a")
    known = set(AnswerLog(tmp_path / "a" / ANSWERS).known)
    assert 0 < found.rows < 40 and known >= set(keys(found))
    resumed = run(tmp_path / "a", BatchRunner(), count=40, settings=MANY)
    straight = run(tmp_path / "b", count=40, settings=MANY)
    verify_shards(tmp_path / "a", resumed)
    assert sorted(keys(resumed)) == sorted(keys(straight)) and len(set(keys(resumed))) == 40
    first, second = (sorted((tmp_path / name / ANSWERS).read_text().splitlines()) for name in ("a", "b"))
    assert first == second
    for key, row in contents(tmp_path / "a").items():
        for one, other in zip(row, contents(tmp_path / "b")[key], strict=True):
            np.testing.assert_array_equal(one, other)


def contents(directory: Path) -> dict[str, tuple[np.ndarray, ...]]:
    """Tokens, states and best ids of every row."""
    rows: dict[str, tuple[np.ndarray, ...]] = {}
    for shard in ShardManifest.load(directory).shards:
        tensors = load_file(directory / shard.file)
        ends, records = tensors["row_offsets"], tensors["answer_offsets"]
        for place, key in enumerate(shard.rows):
            span, own = slice(*ends[place : place + 2]), slice(*records[place : place + 2])
            rows[key] = (tensors["token_ids"][span], tensors["states.2"][span], tensors["top_ids"][own])
    return rows


def test_too_little_memory_is_said_before_starting(tmp_path: Path) -> None:
    runner = BatchRunner(memory=2**60)
    with pytest.raises(UsageError, match=r"6 answers of up to \d+ tokens at a time need .* lower --batch"):
        run(tmp_path / "x", runner, settings=MANY)
    assert runner.calls == 0


# --- what is recorded, and how much ---------------------------------------------------------------------------------


class NormRunner(toy.ToyRunner):
    """The toy with a state after the final norm: ten times tap 4."""

    def states(self, token_ids: Sequence[int], taps: Sequence[int]) -> TargetStates:
        result = super().states(token_ids, [4 if tap == FINAL_NORM else tap for tap in taps])
        scale = np.array([10.0 if tap == FINAL_NORM else 1.0 for tap in taps], np.float32)
        return TargetStates(states=result.states * scale[:, None, None], logits=result.logits)


def test_several_taps_are_recorded_and_read_one_by_one(tmp_path: Path) -> None:
    runner = NormRunner()
    run(tmp_path, runner, selection=toy.selection(1, 3), settings=replace(SETTINGS, final_norm=True))
    tokens = load_file(tmp_path / "shard-00000.safetensors")["token_ids"]
    tables = {(): (1, 3), (3,): (3,), (1, 3): (1, 3), (FINAL_NORM,): (4,)}
    for taps, places in tables.items():
        data = ShardSet(tmp_path, taps=taps, max_length=100)
        batch = data.batch(data.rows[:1], 2)
        wanted = np.concatenate([runner.table[place][tokens[: len(batch.taps)]] for place in places], axis=-1)
        np.testing.assert_allclose(batch.taps.numpy(), wanted * (10 if FINAL_NORM in taps else 1), rtol=2e-3)
        assert data.selection.m == len(places)
        assert data.selection.state == ("final-norm" if FINAL_NORM in taps else "residual")
    with pytest.raises(SelectionError, match=r"taps 1, 3 and the state after the final norm, not tap 2"):
        ShardSet(tmp_path, taps=(2,), max_length=100)
    with pytest.raises(SelectionError, match="trained on alone"):
        ShardSet(tmp_path, taps=(3, FINAL_NORM), max_length=100)
    with pytest.raises(DataError, match="final_norm = True, this run has False"):
        run(tmp_path, runner, selection=toy.selection(1, 3))


def test_the_selection_of_eagle2_records_the_state_after_the_norm(tmp_path: Path) -> None:
    selection = LayerSelection(taps=(4,), state="final-norm", method="eagle2", blocks=toy.BLOCKS, width=toy.E)
    runner = NormRunner()
    manifest = run(tmp_path, runner, selection=selection)
    tensors = load_file(tmp_path / manifest.shards[0].file)
    np.testing.assert_allclose(
        tensors["states.final-norm"], runner.table[4][tensors["token_ids"]] * 10, rtol=2e-3, atol=1e-4
    )
    assert ShardSet(tmp_path, max_length=100).selection == manifest.selection


def test_a_state_of_70_000_survives(tmp_path: Path) -> None:
    """Beyond float16 by a little, in one coordinate of one token, with everything else small beside it."""
    runner = toy.ToyRunner()
    runner.table[2, 5, 3] = 70_000.0
    run(tmp_path, runner, settings=DistillSettings(max_tokens=39, temperatures=(0.0,)))
    data = ShardSet(tmp_path, max_length=100)
    tokens = load_file(tmp_path / data.manifest.shards[0].file)["token_ids"]
    assert (tokens == 5).any()
    for row in data.rows:
        batch = data.batch([row], 2)
        wanted = runner.table[2][tokens[row.start : row.start + len(batch.taps)]]
        np.testing.assert_allclose(batch.taps.numpy(), wanted, rtol=1e-3, atol=2e-7)


def test_a_disk_budget_is_kept_and_can_be_raised(tmp_path: Path) -> None:
    class Notes:
        said: list[str]

        def __init__(self) -> None:
            self.said = []

        def advance(self, amount: float) -> None: ...

        def note(self, text: str) -> None:
            self.said.append(text)

    notes, limit = Notes(), 45_000
    few = run(tmp_path / "a", count=40, settings=replace(SETTINGS, max_bytes=limit), reporter=notes)
    size = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert 0 < few.rows < 40 and size <= limit
    assert len(notes.said) == 1 and "disk budget of 0.0 MB" in notes.said[0] and "--max-disk" in notes.said[0]
    again = run(tmp_path / "a", count=40, settings=replace(SETTINGS, max_bytes=limit))
    assert keys(again) == keys(few)
    whole = run(tmp_path / "a", count=40)
    assert keys(whole) == keys(run(tmp_path / "b", count=40))


# --- conversations that bring their answers -------------------------------------------------------------------------


class TurnCodec(toy.ToyCodec):
    """The toy's codec for whole conversations: an answered turn ends with `EOS`."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = super().encode_chat(messages)
        for message in messages[1:]:
            ids += [*self.encode_raw(message["content"]), toy.EOS, toy.ASSISTANT]
        return ids


def test_given_answers_are_recorded_as_the_template_writes_them(tmp_path: Path) -> None:
    rows = [PromptRow(id="a", turns=("1 2",), answer="30 31 32"), PromptRow(id="b", turns=("3",))]
    settings = replace(SETTINGS, keep_answers=True)
    manifest = distill(toy.ToyRunner(), TurnCodec(), rows, toy.selection(), settings, tmp_path)
    tensors = load_file(tmp_path / manifest.shards[0].file)
    assert tensors["token_ids"].tolist() == [toy.START, 1, 2, toy.ASSISTANT, 30, 31, 32, toy.EOS]
    assert tensors["answer_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert keys(manifest) == ["a@0"]
    assert json.loads((tmp_path / ANSWERS).read_text())["finish"] == "given"
    with pytest.raises(DataError, match="keep_answers = True, this run has False"):
        distill(toy.ToyRunner(), TurnCodec(), rows, toy.selection(), SETTINGS, tmp_path)
    with pytest.raises(DataError, match="none of the 1 prompts has an answer"):
        distill(toy.ToyRunner(), TurnCodec(), rows[1:], toy.selection(), settings, tmp_path / "b")
    with pytest.raises(DataError, match="row 'a': the chat template does not write the answer"):
        given_answer(toy.ToyCodec(), rows[0])


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    class Refusing(toy.ToyCodec):
        def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
            if "13" in messages[0]["content"]:
                raise PromptError("the chat template refuses this")
            return super().encode_chat(messages)

    rows = [PromptRow(id="ok", turns=("1",)), PromptRow(id="bad", turns=("13",))]
    with pytest.raises(DataError, match="row 'bad': the chat template refuses this"):
        distill(toy.ToyRunner(), Refusing(), rows, toy.selection(), SETTINGS, tmp_path)


def test_shards_of_another_model_are_named_for_training(tmp_path: Path) -> None:
    manifest = run(tmp_path)
    require_made_for(tmp_path, manifest, target_fingerprint="toy", tokenizer_sha256="tokenizer")
    for asked, what in (
        ({"target_fingerprint": "else"}, "target fingerprint toy, the model given has else"),
        ({"tokenizer_sha256": "else"}, "tokenizer tokenizer, the"),
        ({"template_sha256": "else"}, "chat template template, the"),
    ):
        with pytest.raises(DataError, match=what):
            require_made_for(tmp_path, manifest, **asked)


def test_shards_of_another_arithmetic_are_not_continued(tmp_path: Path) -> None:
    run(tmp_path, BatchRunner(), settings=MANY)
    other = BatchRunner()
    other.arithmetic = "torch-float32"
    with pytest.raises(DataError, match=r"arithmetic = toy, this run has torch-float32"):
        run(tmp_path, other, settings=MANY)
    run(tmp_path, settings=MANY)  # a runner that does not say is as good as the one before
