"""Distillation: prompts to answers of the target, answers to shards of its states and next-token distributions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from elsi_edge.artifacts import LayerSelection, PromptRow, TargetRunner, TargetStates
from elsi_edge.draft.answers import Answer, AnswerLog, row_key
from elsi_edge.draft.report import Reporter, Silent
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.shards import ANSWERS, MANIFEST, DistilledRow, ShardManifest, remove_unlisted, write_shard
from elsi_edge.errors import DataError, SelectionError
from elsi_edge.fsio import require_free, storage_errors
from elsi_edge.loops import loop_start
from elsi_edge.prompts import prompts_sha256


class ChatEncoder(Protocol):
    """The part of `TextCodec` that distillation uses."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def encode_raw(self, text: str) -> list[int]: ...

    @property
    def has_template(self) -> bool: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def template_sha256(self) -> str: ...

    @property
    def tokenizer_sha256(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One row to make."""

    prompt: PromptRow
    temperature: float
    given: Answer | None

    @property
    def key(self) -> str:
        return row_key(self.prompt.id, self.temperature)


def distill(
    runner: TargetRunner,
    codec: ChatEncoder,
    rows: Sequence[PromptRow],
    selection: LayerSelection,
    settings: DistillSettings,
    out: Path,
    *,
    model: str = "",
    answers: Sequence[Answer] | None = None,
    reporter: Reporter | None = None,
) -> ShardManifest:
    """Answer prompts (first turns), record states and distributions, write shards to `out`; continues what is there.

    With `answers` nothing is generated: they are joined to `rows` by id. The ids of every answer stay in
    `answers.jsonl`. A row that loops is cut or left out (see `loops`), one that is too long or has no answer is left
    out; all are counted.
    Raises DataError (`out` holds shards of something else; no answer has a prompt), SelectionError, StorageError.
    """
    if selection.blocks != runner.shape.blocks or selection.width not in (0, runner.shape.width):
        raise SelectionError(
            f"the selection is for {selection.blocks} blocks of width {selection.width}, the target has "
            f"{runner.shape.blocks} of width {runner.shape.width}; calibrate this target"
        )
    jobs = _jobs(rows, settings, answers)
    manifest = _open(runner, codec, rows, selection, settings, out, model)
    done = {key for shard in manifest.shards for key in shard.rows} | set(manifest.dropped)
    left = [job for job in jobs if job.key not in done]
    require_free(out, _bytes_needed(left, selection.m, runner.shape.width, settings), "distillation")
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    worker = _Worker(runner, codec, settings, out, manifest, reporter or Silent())
    worker.reporter.advance(len(jobs) - len(left))
    try:
        for job in left:
            worker.take(job)
            worker.reporter.advance(1)
    finally:  # an interrupt or a bad row loses nothing that is whole
        worker.close()
    return worker.manifest


class _Worker:
    """Makes rows, collects them, and closes a shard when it is full."""

    def __init__(
        self,
        runner: TargetRunner,
        codec: ChatEncoder,
        settings: DistillSettings,
        out: Path,
        manifest: ShardManifest,
        reporter: Reporter,
    ) -> None:
        self.runner, self.codec, self.settings, self.out = runner, codec, settings, out
        self.manifest, self.reporter = manifest, reporter
        self.log = AnswerLog(out / ANSWERS)
        self.rows: list[DistilledRow] = []
        self.dropped: dict[str, str] = {}
        self.counts = dict(manifest.counts)

    def take(self, job: _Job) -> None:
        """Make one row, or note why it is left out."""
        prompt_ids = encode_prompt(self.codec, job.prompt)
        room = min(self.settings.max_length, self.runner.shape.context) - len(prompt_ids)
        if room < 2:
            self._drop(job, "prompt too long")
            return
        answer_ids = list(self._answer(job, prompt_ids, room))
        start = loop_start(answer_ids)
        if start == 0:
            self._drop(job, "loops from its start")
            return
        if start is not None:
            self._count("rows cut where a loop starts", 1)
            self._count("tokens cut", len(answer_ids) - start)
            answer_ids = answer_ids[:start]
        answer_ids = answer_ids[:room]
        if len(prompt_ids) + len(answer_ids) < 3 or not answer_ids:
            self._drop(job, "no answer")
            return
        self.rows.append(self._record(job.key, prompt_ids, answer_ids))
        if sum(len(row.token_ids) for row in self.rows) >= self.settings.shard_tokens:
            self.close()

    def close(self) -> None:
        """Write what was collected as a shard and list it, with the rows left out so far."""
        if not (self.rows or self.dropped or any(self.out.iterdir())):
            self.out.rmdir()  # nothing came of it: a first row that failed leaves no trace
            return
        entries = list(self.manifest.shards)
        if self.rows:
            file = f"shard-{len(entries):05d}.safetensors"
            entries.append(write_shard(self.out, file, self.rows, self.manifest.selection.taps))
        dropped = {**self.manifest.dropped, **self.dropped}
        self.manifest = replace(self.manifest, shards=tuple(entries), dropped=dropped, counts=dict(self.counts))
        self.manifest.save(self.out)
        self.rows, self.dropped = [], {}

    def _answer(self, job: _Job, prompt_ids: list[int], room: int) -> tuple[int, ...]:
        seed = _row_seed(self.settings.seed, job.key)
        answer = self.log.known.get(job.key, job.given)
        if answer is None:
            ids = self.runner.answer(
                prompt_ids,
                max_tokens=min(self.settings.max_tokens, room),
                temperature=job.temperature,
                top_k=self.settings.top_k if job.temperature > 0 else 0,
                seed=seed,
            )
            finish = "stop" if ids and ids[-1] in self.codec.eos_ids else "length"
            answer = Answer(
                id=job.prompt.id, temperature=job.temperature, finish=finish, answer_ids=tuple(map(int, ids))
            )
        wrong = [token for token in answer.answer_ids if token >= self.runner.shape.vocab_size]
        if wrong:
            raise DataError(
                f"the answer to {job.prompt.id!r} has the token id {wrong[0]}, the target's vocabulary is "
                f"{self.runner.shape.vocab_size}; these answers are another model's"
            )
        if not (self.out / MANIFEST).is_file():
            self.manifest.save(self.out)  # says whose answers these are, should the process be killed
        self.log.add(answer, seed)
        return answer.answer_ids

    def _record(self, key: str, prompt_ids: list[int], answer_ids: list[int]) -> DistilledRow:
        token_ids = np.array(prompt_ids + answer_ids, dtype=np.int32)
        mask = np.arange(len(token_ids)) >= len(prompt_ids)
        taps = self.manifest.selection.taps
        result = self.runner.states(token_ids.tolist(), taps)
        _check_states(result, key, (len(taps), len(token_ids), self.runner.shape.width), self.runner.shape.vocab_size)
        # The row of logits before an answer token is what predicts it. shape: [A, V]
        logits = torch.from_numpy(np.ascontiguousarray(result.logits[len(prompt_ids) - 1 : -1]))
        top, ids = torch.topk(logits, min(self.settings.keep_top, logits.shape[1]), dim=-1)
        log_sum_exp = torch.logsumexp(logits, dim=-1)
        return DistilledRow(
            key=key,
            token_ids=token_ids,
            answer_mask=mask,
            states=result.states,
            top_ids=ids.to(torch.int32).numpy(),
            top_log_probs=(top - log_sum_exp[:, None]).numpy(),
            log_sum_exp=log_sum_exp.numpy(),
        )

    def _drop(self, job: _Job, reason: str) -> None:
        self.dropped[job.key] = reason
        self._count(f"rows left out: {reason}", 1)

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


def encode_prompt(codec: ChatEncoder, prompt: PromptRow) -> list[int]:
    """Token ids of a prompt's first turn, through the chat template where the target has one."""
    turn = prompt.turns[0]
    return codec.encode_chat([{"role": "user", "content": turn}]) if codec.has_template else codec.encode_raw(turn)


def _jobs(rows: Sequence[PromptRow], settings: DistillSettings, answers: Sequence[Answer] | None) -> list[_Job]:
    if answers is None:
        temperatures = settings.temperatures
        jobs = [
            _Job(prompt=row, temperature=temperatures[index % len(temperatures)], given=None)
            for index, row in enumerate(rows)
        ]
        return jobs[: settings.count]
    prompts = {row.id: row for row in rows}
    jobs = [
        _Job(prompt=prompts[answer.id], temperature=answer.temperature, given=answer)
        for answer in answers
        if answer.id in prompts
    ]
    if not jobs:
        raise DataError(
            f"none of the {len(answers)} answers belongs to one of the {len(rows)} prompts "
            f"(first answer id {answers[0].id!r}); give the prompts that were answered with --prompts"
        )
    return jobs[: settings.count]


def _open(
    runner: TargetRunner,
    codec: ChatEncoder,
    rows: Sequence[PromptRow],
    selection: LayerSelection,
    settings: DistillSettings,
    out: Path,
    model: str,
) -> ShardManifest:
    """The manifest to continue, or a new one. Raises DataError naming what differs from the one found."""
    wrapper = codec.encode_chat([{"role": "user", "content": "a"}]) if codec.has_template else []
    fresh = ShardManifest(
        model=model,
        shape=runner.shape,
        selection=selection,
        target_fingerprint=runner.fingerprint,
        tokenizer_sha256=codec.tokenizer_sha256,
        template_sha256=codec.template_sha256,
        prompts_sha256=prompts_sha256(rows),
        required_ids=tuple(sorted(codec.eos_ids | set(wrapper))),
        settings=settings.identity(),
    )
    if not (out / MANIFEST).is_file():
        if (out / ANSWERS).exists():
            raise DataError(f"{out} holds {ANSWERS} but no {MANIFEST} that says whose they are; choose another --out")
        return fresh
    found = ShardManifest.load(out)
    for what in ("target_fingerprint", "tokenizer_sha256", "template_sha256", "prompts_sha256"):
        before, now = getattr(found, what), getattr(fresh, what)
        if before != now:
            raise DataError(
                f"{out} holds shards with {what.replace('_', ' ')} {before[:12]}, this run has {now[:12]}; "
                "choose another --out"
            )
    if not found.selection.same_taps(selection):
        raise DataError(
            f"{out} holds shards of {found.selection.describe()}, this run records {selection.describe()}; "
            "choose another --out"
        )
    for name, value in fresh.settings.items():
        if found.settings.get(name) != value:
            raise DataError(
                f"{out} holds shards made with {name} = {found.settings.get(name)}, this run has {value}; "
                "use the same, or choose another --out"
            )
    remove_unlisted(out, found)
    return found


def _check_states(result: TargetStates, key: str, expected: tuple[int, int, int], vocab_size: int) -> None:
    logits = (expected[1], vocab_size)
    if result.states.shape != expected or result.logits.shape != logits:
        raise DataError(
            f"row {key!r}: the target gave states {list(result.states.shape)} and logits {list(result.logits.shape)}, "
            f"expected {list(expected)} and {list(logits)}"
        )
    if not np.isfinite(result.logits).all() or not np.isfinite(result.states).all():
        raise DataError(f"row {key!r}: the target's states or logits are not finite; leave that row out")


def _bytes_needed(jobs: Sequence[_Job], m: int, width: int, settings: DistillSettings) -> int:
    """Disk that the shards of these jobs can take, from above: a token has at most one character of prompt."""
    answer_tokens = sum(len(job.given.answer_ids) if job.given else settings.max_tokens for job in jobs)
    prompt_tokens = sum(min(len(job.prompt.turns[0]) // 2 + 64, settings.max_length) for job in jobs)
    per_token = m * width * 2 + 5  # bytes: float16 states, id and mask
    return (answer_tokens + prompt_tokens) * per_token + answer_tokens * (settings.keep_top * 6 + 4 + 12)


def _row_seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:4], "little") >> 1
