"""Distillation: prompts to answers of the target, answers to shards of its states and next-token distributions."""

import contextlib
import hashlib
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from elsi_edge.artifacts import (
    AnswerRequest,
    BatchTargetRunner,
    LayerSelection,
    PromptRow,
    TargetRecord,
    TargetRunner,
)
from elsi_edge.draft.answers import Answer, AnswerLog
from elsi_edge.draft.collect import Collector
from elsi_edge.draft.jobs import ChatEncoder, Job, encode_named, make_jobs
from elsi_edge.draft.report import Reporter, Silent
from elsi_edge.draft.settings import DistillSettings
from elsi_edge.draft.shards import ANSWERS, MANIFEST, DistilledRow, ShardManifest, remove_unlisted
from elsi_edge.draft.workers import as_batch_runner, outcomes
from elsi_edge.errors import DataError, SelectionError, UsageError
from elsi_edge.fsio import require_free, storage_errors
from elsi_edge.loops import loop_start
from elsi_edge.prompts import prompts_sha256

# Settings that older manifests do not name, and what they were.
_UNTOLD: Mapping[str, Any] = {"keep_answers": False, "final_norm": False}


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What became of a job."""

    key: str
    row: DistilledRow | None = None
    dropped: str = ""  # why there is no row
    cut: int | None = None  # tokens cut where a loop starts


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

    With `answers` nothing is generated: they are joined to `rows` by id; with `settings.keep_answers` the prompts' own
    are taken. The ids of every answer stay in `answers.jsonl`. A row that loops is cut or left out (see `loops`), one
    that is too long or has no answer is left out; all are counted. It stops before `out` is larger than
    `settings.max_bytes`, and says so. A runner that answers in batches is called from its number of workers.
    Raises DataError (`out` holds shards of something else; no answer has a prompt), SelectionError, StorageError,
    UsageError when there is too little memory.
    """
    if selection.blocks != runner.shape.blocks or selection.width not in (0, runner.shape.width):
        raise SelectionError(
            f"the selection is for {selection.blocks} blocks of width {selection.width}, the target has "
            f"{runner.shape.blocks} of width {runner.shape.width}; calibrate this target"
        )
    many, say = as_batch_runner(runner), reporter or Silent()
    jobs = make_jobs(rows, codec, settings, answers)
    manifest = open_shards(many, codec, rows, selection, settings, out, model)
    done = {key for shard in manifest.shards for key in shard.rows} | set(manifest.dropped)
    left = [job for job in jobs if job.key not in done]
    needed = _bytes_needed(left, len(manifest.read_taps), runner.shape.width, settings)
    require_free(out, min(needed, settings.max_bytes or needed), "distillation")
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    say.advance(len(jobs) - len(left))
    worker = _Worker(many, codec, settings, out, manifest, left)
    collector = Collector(out, manifest, settings)
    try:
        with contextlib.closing(worker.run()) as made:
            for each in made:
                if not collector.take(each.key, each.row, each.dropped, each.cut):
                    say.note(collector.stopped)
                    break
                say.advance(1)
    finally:  # an interrupt or a bad row loses nothing that is whole
        collector.close()
    return collector.manifest


class _Worker:
    """Makes rows, on as many threads as the runner has workers."""

    def __init__(
        self,
        runner: BatchTargetRunner,
        codec: ChatEncoder,
        settings: DistillSettings,
        out: Path,
        manifest: ShardManifest,
        jobs: Sequence[Job],
    ) -> None:
        self.runner, self.codec, self.settings, self.out = runner, codec, settings, out
        self.manifest, self.jobs = manifest, jobs
        self.log = AnswerLog(out / ANSWERS)
        self.prompts = [encode_named(codec, job.prompt) for job in jobs]
        self._writing = threading.Lock()

    def run(self) -> Generator[_Made, None, None]:
        """What becomes of the jobs."""
        known, requests = [], {}
        longest = 0
        for index, (job, prompt_ids) in enumerate(zip(self.jobs, self.prompts, strict=True)):
            room = self._room(prompt_ids)
            if room < 2 or job.given is not None or job.key in self.log.known:
                known.append(index)
                longest = max(longest, min(len(prompt_ids), self.settings.max_length))
                continue
            requests[index] = AnswerRequest(
                key=job.key,
                prompt_ids=tuple(prompt_ids),
                max_tokens=min(self.settings.max_tokens, room),
                temperature=job.temperature,
                top_k=self.settings.top_k if job.temperature > 0 else 0,
                seed=_row_seed(self.settings.seed, job.key),
            )
            longest = max(longest, len(prompt_ids) + requests[index].max_tokens)
        batch = min(self.settings.batch, max(len(requests), 1))
        require_memory(self.runner.memory_needed(batch=batch, tokens=longest), batch, longest)
        return outcomes(self.runner, self, known, requests, batch=self.settings.batch)

    def answered(self, index: int, answer_ids: list[int]) -> _Made:
        """Keep an answer that the target gave, and record it."""
        job = self.jobs[index]
        answer = Answer(
            id=job.prompt.id,
            temperature=job.temperature,
            finish="stop" if answer_ids and answer_ids[-1] in self.codec.eos_ids else "length",
            answer_ids=tuple(answer_ids),
            decoder="exact" if self.settings.batch == 1 else "batch",
        )
        return self._row(index, answer)

    def known(self, index: int) -> _Made:
        """Record an answer that is there already."""
        job = self.jobs[index]
        answer = self.log.known.get(job.key, job.given)
        if answer is None or self._room(self.prompts[index]) < 2:
            return _Made(key=job.key, dropped="prompt too long")
        return self._row(index, answer)

    def _room(self, prompt_ids: list[int]) -> int:
        return min(self.settings.max_length, self.runner.shape.context) - len(prompt_ids)

    def _row(self, index: int, answer: Answer) -> _Made:
        job, prompt_ids = self.jobs[index], self.prompts[index]
        self._keep(job, answer)
        answer_ids = list(answer.answer_ids)
        start = loop_start(answer_ids)
        if start == 0:
            return _Made(key=job.key, dropped="loops from its start")
        cut = None if start is None else len(answer_ids) - start
        answer_ids = answer_ids[:start][: self._room(prompt_ids)]
        if len(prompt_ids) + len(answer_ids) < 3 or not answer_ids:
            return _Made(key=job.key, dropped="no answer", cut=cut)
        return _Made(key=job.key, row=self._record(job.key, prompt_ids, answer_ids), cut=cut)

    def _keep(self, job: Job, answer: Answer) -> None:
        """Append an answer to the log, which the manifest says whose it is, before it takes longer work."""
        wrong = [token for token in answer.answer_ids if token >= self.runner.shape.vocab_size]
        if wrong:
            raise DataError(
                f"the answer to {job.prompt.id!r} has the token id {wrong[0]}, the target's vocabulary is "
                f"{self.runner.shape.vocab_size}; these answers are another model's"
            )
        with self._writing:
            if not (self.out / MANIFEST).is_file():
                self.manifest.save(self.out)
            self.log.add(answer, _row_seed(self.settings.seed, job.key))

    def _record(self, key: str, prompt_ids: list[int], answer_ids: list[int]) -> DistilledRow:
        token_ids = prompt_ids + answer_ids
        taps, shape = self.manifest.read_taps, self.runner.shape
        record = self.runner.record(token_ids, taps, prompt_tokens=len(prompt_ids), keep_top=self.settings.keep_top)
        _check_record(record, key, (len(taps), len(token_ids), shape.width), len(answer_ids))
        return DistilledRow(
            key=key,
            token_ids=np.array(token_ids, dtype=np.int32),
            answer_mask=np.arange(len(token_ids)) >= len(prompt_ids),
            states=record.states,
            top_ids=record.top_ids,
            top_log_probs=record.top_logits - record.log_sum_exp[:, None],
            log_sum_exp=record.log_sum_exp,
        )


def open_shards(
    runner: BatchTargetRunner,
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
        settings=settings.identity() | ({"arithmetic": runner.arithmetic} if runner.arithmetic else {}),
        final_norm=settings.final_norm and selection.state != "final-norm",
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
        before = found.settings.get(name, _UNTOLD.get(name, value))
        if before != value:
            raise DataError(
                f"{out} holds shards made with {name} = {before}, this run has {value}; "
                "use the same, or choose another --out"
            )
    remove_unlisted(out, found)
    return found


def _check_record(record: TargetRecord, key: str, states: tuple[int, int, int], answers: int) -> None:
    if record.states.shape != states or len(record.log_sum_exp) != answers:
        raise DataError(
            f"row {key!r}: the target gave states {list(record.states.shape)} and {len(record.log_sum_exp)} "
            f"distributions, expected {list(states)} and {answers}"
        )
    # A logit that is not a number, or infinite, makes its row's log-sum-exp so.
    if not np.isfinite(record.log_sum_exp).all() or not np.isfinite(record.states).all():
        raise DataError(f"row {key!r}: the target's states or logits are not finite; leave that row out")


def require_memory(needed: int, batch: int, tokens: int) -> None:
    """Raise UsageError when `needed` bytes for `batch` answers of `tokens` tokens are more than what is free."""
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{batch} answers of up to {tokens} tokens at a time need {needed / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free; lower --batch or --max-tokens"
        )


def _bytes_needed(jobs: Sequence[Job], m: int, width: int, settings: DistillSettings) -> int:
    """Disk that the shards of these jobs can take, from above: a token has at most one character of prompt."""
    answer_tokens = sum(len(job.given.answer_ids) if job.given else settings.max_tokens for job in jobs)
    prompt_tokens = sum(min(len(job.prompt.turns[0]) // 2 + 64, settings.max_length) for job in jobs)
    per_token = m * width * 2 + 5  # bytes: float16 states, id and mask
    return (answer_tokens + prompt_tokens) * per_token + answer_tokens * (settings.keep_top * 6 + 4 + 12)


def _row_seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:4], "little") >> 1
