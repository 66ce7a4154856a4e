"""Distillation: shards, their resume, loops, answers files, vocabulary."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from elsi_edge.draft.answers import AnswerLog, read_answers
from elsi_edge.draft.data import ShardSet
from elsi_edge.draft.distill import distill
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.shards import ANSWERS, ShardManifest, verify_shards
from elsi_edge.draft.vocab import choose_vocab, target_to_draft
from elsi_edge.errors import DataError, SelectionError, StorageError
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
    from elsi_edge.artifacts import LayerSelection

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
