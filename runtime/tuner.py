"""`tune`: measure a bundle on this device, solve for what to draft, and say why."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsi_edge._version import __version__
from elsi_edge.artifacts import BITS, PromptRow
from elsi_edge.bundle import read_manifest
from elsi_edge.errors import ConfigError, DataError, PromptError, UsageError
from elsi_edge.prompts import prompts_sha256
from elsi_edge.runtime.acceptance import draft_ranks, ngram_prior
from elsi_edge.runtime.bench.noise import Ticks, falls, load_since, noise_words
from elsi_edge.runtime.drafter import Draft
from elsi_edge.runtime.engines import Engine
from elsi_edge.runtime.measure import (
    MOST_ROWS,
    copy_bandwidth,
    exact_rows,
    exact_tree_rows,
    matrix_peak,
    sparse_rows,
    time_draft,
    time_verify,
)
from elsi_edge.runtime.mixed import MixedProposer
from elsi_edge.runtime.options import GenerateOptions
from elsi_edge.runtime.policy import EXACT_CHAIN_ROWS
from elsi_edge.runtime.price import Costs, interpolate
from elsi_edge.runtime.recorded import Recorded, record
from elsi_edge.runtime.session import Session
from elsi_edge.runtime.solve import Outcome, Solver, candidate_shapes, choose_shape
from elsi_edge.runtime.tuning import ContextCurve, Machine, Tuning, bundle_sha256

DEFAULT_SECONDS = 50.0
_LEAST_SECONDS = 5.0
_ANSWER_TOKENS = 96
_CONTEXTS = (128, 1024)  # tokens in the cache at which verifying is timed

# Share of the time for each part.
_SHARES = {"device": 0.06, "curve": 0.22, "draft": 0.03, "exact": 0.08, "answers": 0.33, "shapes": 0.18}

Progress = Callable[[str, float], None]  # (what is being done, share of the time that has passed)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """How long to measure."""

    seconds: float = DEFAULT_SECONDS

    def __post_init__(self) -> None:
        if not _LEAST_SECONDS <= self.seconds <= 3600.0:
            raise ConfigError(f"--seconds is {self.seconds:g}, it must be {_LEAST_SECONDS:g} to 3600")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The tuning, and every shape that was considered."""

    tuning: Tuning
    outcomes: tuple[Outcome, ...]  # best first


class Tuner:
    """One run of the tuner over an open session; parts in the order in which they run."""

    def __init__(
        self, session: Session, bundle: Path, rows: Sequence[PromptRow], settings: TuneSettings, progress: Progress
    ) -> None:
        self.session, self.bundle, self.rows, self.settings = session, bundle, rows, settings
        self._progress = progress
        self._start = time.perf_counter()
        self._ticks = Ticks.now()
        self._notes: list[str] = []

    def run(self) -> Tuned:
        """Measure, solve. Raises DataError when no prompt fits the context."""
        session = self.session
        if session.verify_rows is not None:
            raise UsageError(
                f"{self.bundle} holds graphs of fixed size: verifying costs the same for 1 to {session.verify_rows} "
                "rows, so there is nothing to tune; generate and bench take it as it is"
            )
        engine = session.engine(exact=True)
        manifest = read_manifest(self.bundle)
        machine = Machine.here(session.settings, manifest.graphs)
        copied, peak = self._device(machine)
        answers = self._answers(engine)
        text = self._text(answers)
        pasts, measured = self._curves(engine, text)
        draft = _draft_of(engine)
        before = self._draft_times(engine, draft, text, until=self._until("draft"))
        good, tried = self._exact(engine, text)
        # Again a while later: small calls on all threads wait for whatever else runs, which is no cost of theirs.
        again = time.perf_counter() + _SHARES["draft"] * self.settings.seconds
        after = self._draft_times(engine, draft, text, until=again)
        entry = None if before[0] is None or after[0] is None else min(before[0], after[0])
        levels = {kind: min(ms, after[1][kind]) for kind, ms in before[1].items()}
        prior = ngram_prior(answers)
        costs = Costs(
            contexts=tuple(pasts),
            verify=tuple(interpolate(curve, max(curve)) for curve in measured),
            entry=entry or 0.0,
            level=levels.get("tree", levels.get("chain", 0.0)),
        )
        tokens = sum(len(answer.token_ids) - 1 for answer in answers)
        overhead = 1e3 * sum(answer.seconds - answer.target_seconds for answer in answers) / tokens
        solver = Solver(
            answers=answers,
            draft=draft,
            costs=costs,
            overhead_ms=overhead,
            ngram_prior=prior,
            context=session.context,
            chain_level_ms=levels.get("chain"),
        )
        outcomes = self._solve(solver, good)
        acceptance = self._acceptance(solver, outcomes, engine)
        self._progress("done", 1.0)
        self._notes += self._noise(measured)
        choice = choose_shape(outcomes, solver.plain_ms(), costs)
        verify = [{str(i + 1): ms for i, ms in enumerate(curve)} for curve in costs.verify]
        tuning = Tuning(
            bundle_sha256=bundle_sha256(self.bundle),
            model=manifest.model,
            precision=session.precision,
            machine=machine,
            past=pasts[0],
            verify_ms=verify[0],
            interpolated=tuple(row for row in range(1, len(verify[0]) + 1) if row not in measured[0]),
            contexts=tuple(ContextCurve(past=p, verify_ms=v) for p, v in zip(pasts[1:], verify[1:], strict=True)),
            draft_entry_ms=entry,
            draft_level_ms=levels.get("tree" if choice.mode == "tree" else "chain"),
            overhead_ms=overhead,
            exact_rows=good,
            exact_rows_tested=tried,
            copy_gb_per_s=copied,
            matrix_gflop_per_s=peak,
            ngram_prior=prior,
            acceptance=acceptance,
            shapes=tuple(outcome.to_json() for outcome in outcomes),
            choice=choice,
            seconds=time.perf_counter() - self._start,
            prompts_sha256=prompts_sha256(list(self.rows)),
            created_by=f"elsi-edge {__version__}",
            notes=tuple(self._notes),
        )
        return Tuned(tuning=tuning, outcomes=tuple(outcomes))

    # --- parts -----------------------------------------------------------------------------------------------------

    def _until(self, part: str) -> float:
        """Say what comes, and when it should end."""
        now = time.perf_counter()
        self._progress(part, min(1.0, (now - self._start) / self.settings.seconds))
        return now + _SHARES[part] * self.settings.seconds

    def _noise(self, curves: Sequence[Mapping[int, float]]) -> list[str]:
        """What casts doubt on the times: other load, and more rows that seem to cost less."""
        said = noise_words(load_since(self._ticks), None, None)
        said += [f"{odd}: the machine was not steady; tune again" for odd in map(falls, curves) if odd][:1]
        return said

    def _device(self, machine: Machine) -> tuple[float, float]:
        self._until("device")
        seconds = _SHARES["device"] * self.settings.seconds / 2
        copied = copy_bandwidth(machine.threads, seconds=min(1.0, seconds))
        return copied, matrix_peak(BITS[self.session.precision], machine.threads, seconds=min(1.0, seconds))

    def _answers(self, engine: Engine) -> list[Recorded]:
        until = self._until("answers")
        session = self.session
        found: list[Recorded] = []
        for row in self.rows:
            try:
                prompt_ids = session.encode(row.turns[0], GenerateOptions())
            except PromptError:
                continue  # a small context
            one = record(
                engine.target,
                prompt_ids,
                limit=_ANSWER_TOKENS,
                context=session.context,
                eos_ids=session.codec.eos_ids,
                category=row.category,
                until=until,
            )
            if len(one.token_ids) > 1:
                found.append(one)
            if time.perf_counter() > until:
                break
        if not found:
            raise DataError(f"no prompt of {len(self.rows)} fits the context of {session.context} tokens")
        if len(found) < len(self.rows):
            self._notes.append(f"time for {len(found)} of {len(self.rows)} prompts; more --seconds see more of them")
        return found

    def _text(self, answers: Sequence[Recorded]) -> list[int]:
        """Tokens to fill the cache with: prompts and answers, again and again."""
        tokens = [token for answer in answers for token in (*answer.prompt_ids, *answer.token_ids)]
        needed = max(_CONTEXTS) + MOST_ROWS + 64
        return (tokens * (1 + needed // len(tokens)))[:needed]

    def _curves(self, engine: Engine, text: Sequence[int]) -> tuple[list[int], list[dict[int, float]]]:
        room = self.session.context - 2  # slots: the exact chain's attention takes one more
        first = min(_CONTEXTS[0], room // 4)
        pasts = [first, max(first + 1, min(_CONTEXTS[1], room - MOST_ROWS, room // 2))]
        rows = sparse_rows(min(MOST_ROWS, room - pasts[-1]))
        until = self._until("curve")
        middle = (time.perf_counter() + until) / 2
        ends = (middle, until)
        measured = [time_verify(engine.target, text, p, rows, until=end) for p, end in zip(pasts, ends, strict=True)]
        return pasts, measured

    def _draft_times(
        self, engine: Engine, draft: Draft | None, text: Sequence[int], *, until: float
    ) -> tuple[float | None, dict[str, float]]:
        """Of the draft's first call in a round, and of a further level by kind of shape, ms."""
        if draft is None:
            return None, {}
        widths = {"chain": 1}
        if self.session.precision == "fp32" or self.session.exact_trees:
            widths["tree"] = 4
        part = (until - time.perf_counter()) / len(widths)
        entries, levels = [], {}
        for number, (kind, width) in enumerate(widths.items(), start=1):
            end = until - part * (len(widths) - number)
            entry, levels[kind] = time_draft(engine.target, draft, text, until=end, width=width)
            entries.append(entry)
        return min(entries), levels

    def _exact(self, engine: Engine, text: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        past = min(64, self.session.context // 4)
        room, until = self.session.context - past - 2, self._until("exact")
        if self.session.exact_trees:
            most = min(MOST_ROWS, room)
            good, tried = exact_tree_rows(engine.target, text, past, most=most, until=until)
        else:
            most, bits = self.session.chain_rows, self.session.precision != "fp32"
            some = text[: past + max(2, room - EXACT_CHAIN_ROWS)]
            good, tried = exact_rows(engine.target, some, past, most=most, bits=bits, until=until)
        if good < most and tried[-1] == good:
            self._notes.append(
                f"time to test {good} of {most} rows a step for exactness, to which exact mode then holds; use more "
                "--seconds"
            )
        return good, tried

    def _solve(self, solver: Solver, exact: int) -> list[Outcome]:
        """Every shape that may run here, best first."""
        until = self._until("shapes")
        shapes = candidate_shapes(
            self.session.precision,
            exact,
            has_draft=solver.draft is not None,
            exact_trees=self.session.exact_trees,
        )
        outcomes: list[Outcome] = []
        speedup = 1.1
        for number, shape in enumerate(shapes):
            if number >= 3 and time.perf_counter() > until:
                self._notes.append(f"time for {number} of {len(shapes)} shapes")
                break
            outcomes.append(solver.outcome(shape, speedup))
            speedup = max(speedup, *(o.speedup for o in outcomes if o.shape.priced)) if shape.priced else speedup
        outcomes.sort(key=lambda outcome: -outcome.tokens_per_s)
        return outcomes

    def _acceptance(self, solver: Solver, outcomes: Sequence[Outcome], engine: Engine) -> dict[str, Any]:
        widest = max(outcomes, key=lambda o: (not o.shape.priced, len(o.shape.proposals), o.shape.nodes))
        found: dict[str, Any] = {
            "shape": widest.shape.words(),
            "by_source": {
                name: {
                    "drafted": counts.drafted,
                    "accepted": counts.accepted,
                    "drafted_by_depth": list(counts.drafted_by_depth),
                    "accepted_by_depth": list(counts.accepted_by_depth),
                }
                for name, counts in widest.tally.by_source().items()
            },
        }
        if solver.draft is not None:
            until = time.perf_counter() + 0.05 * self.settings.seconds
            found["draft_by_rank"] = draft_ranks(solver.draft, solver.answers, until=until)
        return found


def _draft_of(engine: Engine) -> Draft | None:
    proposer = engine.proposer
    if isinstance(proposer, MixedProposer) and proposer.drafter is not None:
        return proposer.drafter.draft
    return None
