"""The training loop: a step, its place in the budget, evaluation, checkpoints. `train` sets it up."""

import hashlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elsi_edge.artifacts import DraftConfig
from elsi_edge.draft import curves
from elsi_edge.draft.checkpoint import save_draft
from elsi_edge.draft.data import Row, ShardSet, epoch_batches
from elsi_edge.draft.evaluate import CHAIN
from elsi_edge.draft.judge import Judge
from elsi_edge.draft.loss import batch_loss, kept_mass
from elsi_edge.draft.optimiser import (
    MovingAverage,
    learning_rate,
    make_optimisers,
    optimiser_tensors,
    restore_optimisers,
)
from elsi_edge.draft.provenance import provenance
from elsi_edge.draft.report import Reporter, Silent
from elsi_edge.draft.resume import TrainState, copy_weights, load_state, require_same_run, save_state
from elsi_edge.draft.rounding import rounded
from elsi_edge.draft.settings import TrainSettings
from elsi_edge.draft.shards import ShardManifest
from elsi_edge.draft.sharing import deal, sum_gradients
from elsi_edge.draft.structure import Structure
from elsi_edge.draft.unroll import PackedBatch
from elsi_edge.errors import DataError, DraftError
from elsi_edge.processes import Processes

_FEW_ANSWERS = 0.02  # share of answer tokens in the data below which something is likely wrong


class Trainer:
    """One training run: the network, its optimisers and where it stands."""

    def __init__(
        self,
        data: ShardSet,
        structure: Structure,
        out: Path,
        settings: TrainSettings,
        reporter: Reporter,
        group: Processes,
        joined: int | None = None,
    ) -> None:
        """`joined`: shards that a run to continue had taken in, where more than those in `data`."""
        self.data, self.structure, self.out, self.settings = data, structure, out, settings
        self.group, self.first = group, group.rank == 0
        self.reporter: Reporter = reporter if self.first else Silent()
        self.network, self.ids, self.inverse = structure.network, structure.ids, structure.inverse
        self.device = self.ids.device
        self.dtype = torch.bfloat16 if settings.arithmetic == "bf16" else torch.float32
        self.train_rows, held_out = data.split()
        self.base_shards = len(data.manifest.shards)
        self.optimisers = make_optimisers(self.network, settings)
        self.average = MovingAverage(self.network, settings.ema)
        self.step = self.epoch = self.next_batch = self.tokens = self.skipped = 0
        self.seconds = 0.0  # of earlier sittings
        self._drawn = -1  # step of the last evaluation that the curves show
        self.judge = Judge(data, held_out, self.ids, settings, self.dtype, group)
        self._join(joined)
        if structure.notes:
            self.reporter.note(f"not taken over: {'; '.join(structure.notes)}")
        share = data.manifest.answer_tokens / max(1, data.manifest.tokens)
        if share < _FEW_ANSWERS:
            self.reporter.note(f"only {share:.2%} of the tokens are answers, and only answers are trained on")
        self._resume()

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self, stopped: threading.Event) -> DraftConfig:
        """Train until the budget is used; save, evaluate and log on the way."""
        self._started = self._saved = time.monotonic()
        if self.judge.evaluated < 0:
            self._evaluate()
        share, _, _ = self._agree(stopped)
        left = max(1.0 - share, 1e-9)  # of the budget for this sitting, which is what is reported
        while share < 1.0 and not self.judge.worn_out():
            steps_before, whole = self.step, self.next_batch == 0
            for rows in self._remaining_batches():
                self._train_step(rows, share)
                if self.step != self.judge.evaluated and self.step % self.settings.evaluate_every == 0:
                    self._evaluate()
                self.reporter.advance(max(0.0, min(1.0, self._progress()) - share) / left)
                share, save, stop = self._agree(stopped)
                if save or stop:
                    self._save()
                if stop:
                    raise KeyboardInterrupt
                if share >= 1.0 or self.judge.worn_out():
                    break
            if whole and self.step == steps_before and share < 1.0:  # a resumed run may begin at an epoch's end
                raise DataError(
                    f"{self.data.directory}: none of {self.skipped} batches had an answer token to train on; raise the "
                    f"length limit of {self.settings.max_length} tokens, or distill again"
                )
        if self.judge.evaluated != self.step:
            self._evaluate()
        return self._save()

    def _agree(self, stopped: threading.Event) -> tuple[float, bool, bool]:
        """Share of the budget used, whether to save and whether to stop: the first process's word for all."""
        due = time.monotonic() - self._saved >= 60 * self.settings.checkpoint_minutes
        flag = self.group.sum_(torch.tensor(int(stopped.is_set()), device=self.device))
        share, due = self.group.from_first((self._progress(), due))
        return share, due, bool(flag > 0)

    def _remaining_batches(self) -> Iterator[list[Row]]:
        """The rest of this epoch, then step to the next one."""
        settings = self.settings
        batches = epoch_batches(self.train_rows, budget=settings.batch_tokens, seed=settings.seed, epoch=self.epoch)
        while self.next_batch < len(batches):
            self.next_batch += 1
            yield batches[self.next_batch - 1]
        self.epoch, self.next_batch = self.epoch + 1, 0
        if self.settings.follow:
            self._join(self.group.from_first(len(ShardManifest.load(self.data.directory).shards)))

    def _join(self, shards: int | None) -> None:
        """Train on the first `shards` shards, those written since included."""
        if shards is not None and shards > len(self.data.manifest.shards):
            rows = self.data.grow(shards)
            self.train_rows += rows
            self.reporter.note(f"epoch {self.epoch}: {len(rows)} conversations joined, {len(self.train_rows)} in all")

    def _train_step(self, rows: list[Row], progress: float) -> None:
        settings, group = self.settings, self.group
        started = time.monotonic()
        steps = settings.unrolled(progress)
        parts = deal(rows, settings.accumulate * group.count)[group.rank :: group.count]
        batches = [self._pack(part, steps) for part in parts if part]
        counts = torch.zeros(steps, dtype=torch.long, device=self.device)
        for batch in batches:
            counts += batch.counts()
        group.sum_(counts)
        if int(counts[0]) == 0:  # nothing to learn from, and a mean over nothing is not a number
            self.skipped += 1
            return
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        value = torch.zeros((), dtype=torch.float64, device=self.device)
        with rounded(self.network, settings.qat):
            for batch in batches:
                loss = batch_loss(self.network, batch, self.inverse, settings, self.dtype, steps, counts.tolist())
                loss.backward()  # type: ignore[no-untyped-call]
                value += loss.detach()
        mean = float(group.sum_(value))
        self._require_finite(mean, "loss", rows)
        sum_gradients(self.network, group)
        norm = float(torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip, foreach=True))
        self._require_finite(norm, "gradient", rows)
        rate = learning_rate(settings, progress)
        for optimiser in self.optimisers:
            for param_group in optimiser.param_groups:
                param_group["lr"] = rate
            optimiser.step()
        self.step += 1
        tokens = sum(row.length for row in rows)
        self.tokens += tokens
        self.average.update(self.network, self.step)
        if self.step % settings.log_every == 0:
            records = sum(row.records for row in rows)
            mass = value.new_tensor(sum(kept_mass(batch, self.inverse) for batch in batches))
            seconds = time.monotonic() - started
            self._log(
                loss=mean, lr=rate, grad_norm=norm, unroll=steps, tokens=self.tokens, epoch=self.epoch,
                answer_share=int(counts[0]) / tokens, kept_mass=float(group.sum_(mass)) / records,
                tokens_per_s=tokens / seconds,
            )  # fmt: skip

    def _require_finite(self, value: float, what: str, rows: Sequence[Row]) -> None:
        if not math.isfinite(value):
            shards = sorted({self.data.manifest.shards[row.shard].file for row in rows})
            raise DraftError(
                f"the {what} became {value} at step {self.step + 1}, on rows of {', '.join(shards)}; "
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

    # --- data, evaluation, files --------------------------------------------------------------------------------

    def _pack(self, rows: list[Row], steps: int) -> PackedBatch:
        return self.data.batch(rows, steps).to(self.device)

    def _evaluate(self) -> None:
        result = self.judge.judge(self.network, self.average, self.step)
        self._log(**result.plain())
        steps = " ".join(f"{value:.3f}" for value in result.agreement)
        taus = ", ".join(f"{name.replace('-', ' of ')} {value:.3f}" for name, value in result.tau.items())
        taus = taus or f"chain of {CHAIN} {result.tau_chain4:.3f}"
        self.reporter.note(f"step {self.step}: agreement {steps}; tau {taus}")
        if self.judge.worn_out():
            self.reporter.note(f"stops: agreement did not rise in {self.judge.stale} evaluations")

    def _log(self, **values: Any) -> None:
        if self.first:
            curves.append(self.out, {"step": self.step, "minutes": round(self._elapsed() / 60, 3), **values})

    def _save(self) -> DraftConfig:
        """Write the checkpoint, the draft of the moving average, and the curves."""
        config = self.structure.config
        if self.first:
            state = TrainState(
                step=self.step,
                epoch=self.epoch,
                batch=self.next_batch,
                tokens=self.tokens,
                seconds=self._elapsed(),
                skipped=self.skipped,
                base_shards=self.base_shards,
                shards=len(self.data.manifest.shards),
                identity=self._identity(),
                weights={name: weight.detach().cpu() for name, weight in self.network.named_parameters()},
                average={name: weight.cpu() for name, weight in self.average.weights.items()},
                optimiser=optimiser_tensors(self.network, self.optimisers),
                **self.judge.standing(),
            )
            save_state(self.out, state)
            training = provenance(
                self.data, len(self.train_rows), self.structure, self.settings,
                minutes=state.seconds / 60, steps=self.step, tokens=self.tokens, skipped=self.skipped,
                processes=self.group.count, evaluation=state.best_evaluation or state.evaluation,
            )  # fmt: skip
            tensors = {name: weight.numpy() for name, weight in (state.best_weights or state.average).items()}
            ids = self.structure.vocab.draft_to_target_ids
            config = save_draft(self.out, replace(config, training=training), tensors, ids)
            if self._drawn != self.judge.evaluated:
                curves.draw(self.out)
                self._drawn = self.judge.evaluated
        self._saved = time.monotonic()
        saved: DraftConfig = self.group.from_first(config)
        return saved

    def _resume(self) -> None:
        state = load_state(self.out)
        self.group.wait()
        if state is None:
            if self.first:
                (self.out / curves.LOG).unlink(missing_ok=True)
            return
        require_same_run(state, self._identity(), self.out)
        copy_weights(self.network, state.weights)
        self.average.weights = {name: weight.to(self.device) for name, weight in state.average.items()}
        restore_optimisers(self.network, self.optimisers, state.optimiser)
        self.step, self.epoch, self.next_batch = state.step, state.epoch, state.batch
        self.tokens, self.seconds, self.skipped = state.tokens, state.seconds, state.skipped
        self.judge.restore(state, self.device)
        if self.first:
            curves.cut_log(self.out, self.step)
        self.reporter.note(f"continues at step {self.step} ({self.seconds / 60:.1f} minutes)")

    def _identity(self) -> dict[str, Any]:
        """Not the number of processes: another one changes no batch, only the order of sums."""
        hashes = "".join(shard.sha256 for shard in self.data.manifest.shards[: self.base_shards])
        return {
            **self.settings.identity(),
            "shards": hashlib.sha256(hashes.encode()).hexdigest(),
            "draft_to_target": self.structure.vocab.sha256,
            "init": self.structure.init_sha256,
        }
