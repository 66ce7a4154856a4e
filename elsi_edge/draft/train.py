"""Training a draft: unrolled steps, soft cross-entropy on the draft vocabulary, a moving average, exact resume."""

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elsi_edge.artifacts import DraftConfig, LayerSelection
from elsi_edge.draft.checkpoint import save_draft
from elsi_edge.draft.data import Row, ShardSet, epoch_batches
from elsi_edge.draft.evaluate import CHAIN, Evaluation, evaluate
from elsi_edge.draft.loss import batch_loss
from elsi_edge.draft.network import DraftNetwork, rms_norm
from elsi_edge.draft.optimiser import MovingAverage, learning_rate, make_optimiser, optimiser_tensors, restore_optimiser
from elsi_edge.draft.report import Reporter, Silent
from elsi_edge.draft.resume import TrainState, clear, copy_weights, load_state, require_same_run, save_state
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.source import SourceWeights, draft_config, initialise, read_source
from elsi_edge.draft.unroll import PackedBatch
from elsi_edge.draft.vocab import DraftVocab, choose_vocab, target_to_draft
from elsi_edge.errors import DataError, DraftError
from elsi_edge.fsio import require_free, require_writable, storage_errors, write_text
from elsi_edge.stopping import stop_requests

LOG = "log.jsonl"
_ROOM = 400e6  # bytes: two checkpoints of a small draft while one replaces the other


def train(
    shards: Path,
    model_directory: Path,
    out: Path,
    settings: TrainSettings,
    *,
    reporter: Reporter | None = None,
    target_fingerprint: str = "",
    fresh: bool = False,
) -> DraftConfig:
    """Train a draft on a shard directory and write it to `out`; continues the run that `out` holds unless `fresh`.

    `target_fingerprint` is that of the model in `model_directory`, compared with the shards' when given. After SIGINT
    or SIGTERM the step is finished, everything is saved, and KeyboardInterrupt is raised. Raises DataError (shards that
    are altered, of another target, or without answer tokens), DraftError (a loss that is not finite, a checkpoint of
    another run), StorageError.
    """
    data = ShardSet(shards, taps=settings.taps, max_length=settings.max_length)
    made_from = data.manifest.target_fingerprint
    if target_fingerprint and target_fingerprint != made_from:
        raise DataError(
            f"{shards} was made with the target {made_from[:12]}, the model given is {target_fingerprint[:12]}; "
            "give the same model, or distill again"
        )
    require_free(out, int(_ROOM), "training")
    require_writable(out / LOG)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if fresh:
        clear(out)
    source = read_source(model_directory, data.manifest.shape)
    with stop_requests() as stopped:
        return Trainer(data, source, out, settings, reporter or Silent()).run(stopped)


class Trainer:
    """One training run: the network, its optimiser and where it stands."""

    def __init__(
        self, data: ShardSet, source: SourceWeights, out: Path, settings: TrainSettings, reporter: Reporter
    ) -> None:
        self.data, self.out, self.settings, self.reporter = data, out, settings, reporter
        self.dtype = torch.bfloat16 if settings.arithmetic == "bf16" else torch.float32
        self.train_rows, held_out = data.split()
        answers, prompts = data.token_counts()
        self.vocab: DraftVocab = choose_vocab(answers, prompts, data.manifest.required_ids, settings.draft_vocab)
        self.ids = torch.from_numpy(self.vocab.draft_to_target_ids)
        self.inverse = torch.from_numpy(target_to_draft(self.vocab.draft_to_target_ids, len(answers)))
        self.selection = _selection(data)
        self.final_norm = source.final_norm
        manifest = data.manifest
        self.config = draft_config(
            manifest.shape,
            selection=self.selection,
            draft_vocab_size=self.vocab.size,
            target_fingerprint=manifest.target_fingerprint,
            tokenizer_sha256=manifest.tokenizer_sha256,
            template_sha256=manifest.template_sha256,
            draft_to_target_sha256=self.vocab.sha256,
            vocab_coverage=self.vocab.coverage,
        )
        self.network = DraftNetwork(self.config, source.embeddings)
        refusals = initialise(self.network, source if settings.warm_start else None, self.ids, settings.seed)
        if refusals:
            reporter.note(f"not taken from the target: {'; '.join(refusals)}")
        self.network.head.weight.requires_grad_(settings.train_head)
        self.optimiser = make_optimiser(self.network, settings)
        self.average = MovingAverage(self.network, settings.ema)
        self.step = self.epoch = self.next_batch = self.tokens = 0
        self.seconds = 0.0  # of earlier sittings
        self.evaluation: Evaluation | None = None
        self._held_out = [self._prepare(data.batch(rows, CHAIN)) for rows in self._held_out_rows(held_out)]
        self._resume()

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self, stopped: threading.Event) -> DraftConfig:
        """Train until the budget is used; save, evaluate and log on the way."""
        self._started = saved = time.monotonic()
        if self.step == 0:
            self._evaluate()
        while not self._finished():
            for rows in self._remaining_batches():
                before = self._progress()
                self._train_step(rows, before)
                self.reporter.advance(max(0.0, min(1.0, self._progress()) - before))
                if self.step % self.settings.evaluate_every == 0:
                    self._evaluate()
                if time.monotonic() - saved >= 60 * self.settings.checkpoint_minutes:
                    self._save()
                    saved = time.monotonic()
                if stopped.is_set():
                    self._save()
                    raise KeyboardInterrupt
                if self._finished():
                    break
        if self.evaluation is None or self.step % self.settings.evaluate_every:
            self._evaluate()
        return self._save()

    def _remaining_batches(self) -> Iterator[list[Row]]:
        """The rest of this epoch, then step to the next one."""
        settings = self.settings
        batches = epoch_batches(self.train_rows, budget=settings.batch_tokens, seed=settings.seed, epoch=self.epoch)
        while self.next_batch < len(batches):
            self.next_batch += 1
            yield batches[self.next_batch - 1]
        self.epoch, self.next_batch = self.epoch + 1, 0

    def _train_step(self, rows: list[Row], progress: float) -> None:
        settings = self.settings
        started = time.monotonic()
        batch = self._prepare(self.data.batch(rows, settings.unroll))
        rate = learning_rate(settings, progress)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = batch_loss(self.network, batch, self.inverse, settings, self.dtype)
        value = float(loss.detach())
        self._require_finite(value, "loss", batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip, foreach=True))
        self._require_finite(norm, "gradient", batch)
        self.optimiser.step()
        self.step += 1
        self.tokens += batch.tokens
        self.average.update(self.network, self.step)
        if self.step % settings.log_every == 0:
            seconds = time.monotonic() - started
            self._log(
                loss=value, lr=rate, grad_norm=norm, tokens=self.tokens, epoch=self.epoch,
                tokens_per_s=batch.tokens / seconds, answers_per_s=len(batch.bases) / seconds,
            )  # fmt: skip

    def _require_finite(self, value: float, what: str, batch: PackedBatch) -> None:
        if not math.isfinite(value):
            raise DraftError(
                f"the {what} became {value} at step {self.step + 1}, on rows of {', '.join(batch.shards)}; "
                f"the last checkpoint in {self.out} is kept: check that data, or continue with a lower --lr"
            )

    # --- budget -----------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._started

    def _progress(self) -> float:
        """Share of the budget used. By steps alone it is free of the clock: a resumed run repeats exactly."""
        shares = [0.0]
        if self.settings.steps is not None:
            shares.append(self.step / self.settings.steps)
        if self.settings.minutes is not None:
            shares.append(self._elapsed() / (60 * self.settings.minutes))
        return max(shares)

    def _finished(self) -> bool:
        return self._progress() >= 1.0

    # --- data, evaluation, files --------------------------------------------------------------------------------

    def _held_out_rows(self, held_out: list[Row]) -> list[list[Row]]:
        batches = epoch_batches(held_out, budget=self.settings.batch_tokens, seed=0, epoch=0)
        kept: list[list[Row]] = []
        tokens = 0
        for rows in batches:
            if kept and tokens >= self.settings.evaluate_tokens:
                break
            kept.append(rows)
            tokens += sum(row.length for row in rows)
        return kept

    def _prepare(self, batch: PackedBatch) -> PackedBatch:
        """Apply the target's final norm where the selection asks for the state after it."""
        if self.selection.state == "residual":
            return batch
        if self.final_norm is None:
            raise DraftError("the selection asks for the state after the final norm, which this target does not have")
        return replace(batch, taps=rms_norm(batch.taps, self.final_norm, self.config.norm_eps))

    def _evaluate(self) -> None:
        trained = {name: weight.detach().clone() for name, weight in self.network.named_parameters()}
        copy_weights(self.network, self.average.weights)
        self.evaluation = evaluate(self.network, self._held_out, self.ids, self.dtype)
        copy_weights(self.network, trained)
        result = self.evaluation
        self._log(agreement=list(result.agreement), tau_chain4=result.tau_chain4, positions=result.positions)
        steps = " ".join(f"{value:.3f}" for value in result.agreement)
        self.reporter.note(f"step {self.step}: agreement {steps}, tau (chain of {CHAIN}) {result.tau_chain4:.3f}")

    def _log(self, **values: Any) -> None:
        entry = {"step": self.step, "minutes": round(self._elapsed() / 60, 3), **values}
        with storage_errors(self.out / LOG):
            self.out.mkdir(parents=True, exist_ok=True)
            with (self.out / LOG).open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(entry) + "\n")

    def _save(self) -> DraftConfig:
        """Write the checkpoint and the draft of the moving average."""
        state = TrainState(
            step=self.step,
            epoch=self.epoch,
            batch=self.next_batch,
            tokens=self.tokens,
            seconds=self._elapsed(),
            identity=self._identity(),
            weights={name: weight.detach() for name, weight in self.network.named_parameters()},
            average=self.average.weights,
            optimiser=optimiser_tensors(self.network, self.optimiser),
        )
        save_state(self.out, state)
        config = replace(self.config, training=self._provenance())
        tensors = {name: weight.numpy() for name, weight in self.average.weights.items()}
        return save_draft(self.out, config, tensors, self.vocab.draft_to_target_ids)

    def _resume(self) -> None:
        state = load_state(self.out)
        if state is None:
            (self.out / LOG).unlink(missing_ok=True)
            return
        require_same_run(state, self._identity(), self.out)
        copy_weights(self.network, state.weights)
        self.average.weights = state.average
        restore_optimiser(self.network, self.optimiser, state.optimiser)
        self.step, self.epoch, self.next_batch = state.step, state.epoch, state.batch
        self.tokens, self.seconds = state.tokens, state.seconds
        if (self.out / LOG).is_file():
            lines = [line for line in (self.out / LOG).read_text().splitlines() if _step_of(line) <= self.step]
            write_text(self.out / LOG, "".join(f"{line}\n" for line in lines))
        self.reporter.note(f"continues at step {self.step} ({self.seconds / 60:.1f} minutes)")

    def _identity(self) -> dict[str, Any]:
        hashes = "".join(shard.sha256 for shard in self.data.manifest.shards)
        shards = hashlib.sha256(hashes.encode()).hexdigest()
        return {**self.settings.identity(), "shards": shards, "draft_to_target": self.vocab.sha256}

    def _provenance(self) -> dict[str, Any]:
        manifest, used = self.data.manifest, self.settings
        evaluation: dict[str, Any] = {}
        if self.evaluation is not None:
            evaluation = {name: getattr(self.evaluation, name) for name in ("agreement", "tau_chain4", "positions")}
        return {
            "data": {
                "model": manifest.model,
                "conversations": len(self.train_rows),
                "held_out": len(self.data.rows) - len(self.train_rows),
                "tokens": manifest.tokens,
                "answer_tokens": manifest.answer_tokens,
                "rows_without_answer_tokens": self.data.dropped,
                "prompts_sha256": manifest.prompts_sha256,
                **{f"distillation_{key}": value for key, value in manifest.counts.items()},
            },
            "settings": {**used.identity(), "minutes": round(self._elapsed() / 60, 1), "steps": self.step},
            "evaluation": evaluation,
            "tokens_trained": self.tokens,
        }


def _selection(data: ShardSet) -> LayerSelection:
    """The shards' selection, or an explicit one when a subset of its taps is trained on."""
    selection = data.manifest.selection
    if data.taps == selection.taps:
        return selection
    return replace(selection, taps=data.taps, method="explicit", joint_entropy=None)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return 0
