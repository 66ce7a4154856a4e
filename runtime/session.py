"""A bundle opened for use: prompts in, events and results out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from elsi_edge.artifacts import Precision
from elsi_edge.bundle import Bundle
from elsi_edge.errors import PromptError, UsageError
from elsi_edge.machine import cores
from elsi_edge.runtime.answer import Answer, TokenStream
from elsi_edge.runtime.decode import Plan, Round, rounds
from elsi_edge.runtime.engines import BundleEngines, Engine
from elsi_edge.runtime.memory import peak_resident_bytes
from elsi_edge.runtime.options import PROPOSALS, GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import resolve_provider
from elsi_edge.runtime.pace import Clock, Pace
from elsi_edge.runtime.policy import EXACT_CHAIN_ROWS, Mode, Policy, decide, require_fits, within_rows
from elsi_edge.runtime.result import GenerationEvent, GenerationResult, Timings
from elsi_edge.runtime.sampling import Chooser, is_greedy
from elsi_edge.runtime.tally import Tally
from elsi_edge.runtime.tuning import Tuning, find_tuning
from elsi_edge.text import TextCodec

NO_EXACT_CHAIN = (
    "ONNX Runtime's attention gives a row other bits in company on this CPU, so exact mode decodes plainly here; the "
    "native operators are exact (elsi-edge doctor says why they do not run), or allow kernel noise with --no-exact"
)

Message = Mapping[str, str]  # {"role": ..., "content": ...}


class Codec(Protocol):
    """Text to tokens and back; `TextCodec`, or a toy in tests."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def has_template(self) -> bool: ...
    def encode_chat(self, messages: Sequence[Message], *, limit: int | None = None) -> list[int]: ...
    def encode_raw(self, text: str, *, limit: int | None = None) -> list[int]: ...
    def stream(self) -> TokenStream: ...


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What the caches hold after a generation."""

    engine: Engine
    drafting: bool  # whether the proposer saw it too
    tokens: tuple[int, ...]  # in the target's cache

    def shared(self, prompt_ids: Sequence[int]) -> int:
        """Tokens at the prompt's start that need no prefill: the draft pairs each with the one after it, so one less
        than are equal."""
        equal = 0
        for one, other in zip(self.tokens, prompt_ids, strict=False):
            if one != other:
                break
            equal += 1
        return max(0, min(equal, len(prompt_ids)) - 1)


@dataclass(kw_only=True)
class _Run:
    """A generation under way."""

    policy: Policy
    plan: Plan
    pace: Pace
    answer: Answer
    seed: int
    prompt_tokens: int
    tally: Tally = field(default_factory=Tally)
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0  # when the first token was there
    last: float = 0.0  # when the last round's tokens were there
    round_tokens: list[int] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)

    @property
    def drafting(self) -> bool:
        """Whether anything may be proposed."""
        return self.policy.mode != "plain"

    def take(self, one: Round) -> tuple[str, int]:
        """Tokens of a round, up to the answer's end: the text that may be shown, and how many were used."""
        text, used = "", 0
        for token in one.tokens:
            text += self.answer.push(token)
            used += 1
            if self.answer.finish_reason is not None:
                break
        now = time.perf_counter()
        if self.first == 0.0:
            self.first = now
        else:
            self.tally.add(one, used)
            self.round_tokens.append(used)
            self.round_ms.append((now - self.last) * 1e3)
        self.last = now
        return text, used


class Session:
    """A bundle on ONNX Runtime. Open with `Session.open`; one generation at a time."""

    def __init__(
        self,
        *,
        codec: Codec,
        engines: Mapping[bool, Engine] | BundleEngines,
        precision: Precision,
        context: int,
        settings: SessionSettings,
        has_draft: bool,
        has_ngrams: bool = False,
        tuning: Tuning | None = None,
        warnings: tuple[str, ...] = (),
        exact_trees: bool = False,
        verify_rows: int | None = None,
        chain_rows: int = EXACT_CHAIN_ROWS,
    ) -> None:
        self.codec, self.precision, self.context = codec, precision, context
        self.settings, self.has_draft = settings, has_draft
        self.tuning, self.warnings = tuning, warnings
        self.exact_trees = exact_trees  # every row has bits of its own, whatever the tree and precision
        self.chain_rows = chain_rows  # a step that give a chain the bits of one row a step, where trees are not exact
        self.verify_rows = verify_rows  # of a bundle whose graphs are of fixed size
        there = {"draft": has_draft, "ngram": has_ngrams}
        self._sources = tuple(name for name in PROPOSALS if there[name])
        self._engines = engines  # exact? -> engine
        self._running: _Run | None = None  # marks the generation that owns the engine's caches
        self._memory: _Memory | None = None  # of the last generation, None while one runs
        self._clock = Clock()

    @classmethod
    def open(cls, bundle: Path | str, settings: SessionSettings | None = None) -> Self:
        """Check a bundle and open it; graphs load when first used. Raises BundleError, ProviderError, UsageError."""
        settings = settings or SessionSettings()
        resolve_provider(settings.provider)
        loaded = Bundle.load(Path(bundle))
        tuning, warning = find_tuning(loaded.directory, settings) if settings.tuning else (None, "")
        engines = BundleEngines(loaded, settings, tuning)
        chain_rows = engines.chain_rows()
        warnings = [text for text in (warning, engines.native_note) if text]
        if chain_rows == 1:
            warnings.append(NO_EXACT_CHAIN)
        if settings.threads > cores().usable:
            warnings.append(
                f"{settings.threads} threads share {cores().usable} usable cores and wait for each other; "
                "--threads 0 takes the cores there are"
            )
        return cls(
            codec=TextCodec.open(loaded.directory),
            engines=engines,
            precision=loaded.manifest.precision,
            context=loaded.manifest.context,
            settings=settings,
            has_draft=not loaded.manifest.plain_only,
            has_ngrams=True,
            tuning=tuning,
            warnings=tuple(warnings),
            exact_trees=engines.native,
            chain_rows=chain_rows,
            verify_rows=None if loaded.manifest.static is None else loaded.manifest.static.verify_rows,
        )

    def generate(self, prompt: str | Sequence[Message], options: GenerateOptions | None = None) -> GenerationResult:
        """Answer a prompt or a conversation. Raises PromptError, UsageError."""
        result: GenerationResult | None = None
        for event in self.stream(prompt, options):
            result = event.result
        assert result is not None  # a stream always ends with its result
        return result

    def stream(
        self, prompt: str | Sequence[Message], options: GenerateOptions | None = None
    ) -> Iterator[GenerationEvent]:
        """The same as events: new text as soon as it is certain; the last event carries the result.

        The prompt is checked before the first event is asked for. Closing the iterator early cancels cleanly.
        """
        options = options or GenerateOptions()
        prompt_ids = self.encode(prompt, options)
        return self._events(prompt_ids, options, self.policy(options))

    def encode(self, prompt: str | Sequence[Message], options: GenerateOptions) -> list[int]:
        """Token ids of a prompt: through the chat template, or raw. Raises PromptError when empty or too long."""
        limit = self.context - 1  # one token of answer at least; a codec may refuse a huge text before it counts it
        if options.raw and not isinstance(prompt, str):
            raise PromptError("--raw continues one text as it is, but the prompt is a conversation; drop one of them")
        if isinstance(prompt, str) and (options.raw or not self.codec.has_template):
            if options.system is not None:
                raise PromptError("this model has no chat template, so --system has no place; drop it")
            ids = self.codec.encode_raw(prompt, limit=limit)
        else:
            if isinstance(prompt, str) and not prompt.strip():
                raise PromptError("the prompt is empty; give it text, or continue blanks as they are with --raw")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if options.system is not None:
                messages = [{"role": "system", "content": options.system}, *messages]
            ids = self.codec.encode_chat(messages, limit=limit)
        if not ids:
            raise PromptError("the prompt has no tokens; give at least one character")
        if len(ids) > limit:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the context {self.context}; "
                "shorten it or export with a longer --context"
            )
        return ids

    def policy(self, options: GenerateOptions) -> Policy:
        """How such a call drafts on this bundle. Raises UsageError, BundleError for what cannot be had."""
        if self.verify_rows is not None:
            require_fits(options, self.verify_rows)
        policy = decide(
            options,
            precision=self.precision,
            sources=self._sources,
            tuning=self.tuning,
            exact_trees=self.exact_trees,
            chain_rows=self.chain_rows,
        )
        return policy if self.verify_rows is None else within_rows(policy, options, self.verify_rows)

    def engine(self, *, exact: bool) -> Engine:
        """The loaded target and proposer of a mode, loading them if need be: to run the loop with another proposer."""
        return self._engines[exact]

    def release(self) -> None:
        """Give back the memory of graphs and caches; the next answer loads them again."""
        self._running = self._memory = None
        if isinstance(self._engines, BundleEngines):
            self._engines.release()

    def _events(self, prompt_ids: list[int], options: GenerateOptions, policy: Policy) -> Iterator[GenerationEvent]:
        engine = self.engine(exact=options.exact)
        run = self._start(prompt_ids, options, policy, engine)
        choose = Chooser(options, seed=run.seed, prompt_ids=prompt_ids)
        loop = rounds(
            engine.target,
            engine.proposer if run.drafting else None,
            prompt_ids,
            run.plan,
            choose,
            run.pace,
            greedy=choose.greedy,
        )
        at_rest = False  # whether the caches are as a round left them
        try:
            for one in loop:
                text, used = run.take(one)
                at_rest = True
                if run.answer.finish_reason is not None:
                    break
                yield GenerationEvent(text=text, token_ids=one.tokens)
                if self._running is not run:
                    raise UsageError(
                        "this generation was ended by another one on the same session; open a second session"
                    )
                at_rest = False
            yield GenerationEvent(text=text, token_ids=one.tokens[:used], result=self._result(run, options))
        finally:
            if at_rest and self._running is run:
                # The caches hold all that was emitted but the last token; rows beyond the answer's end do not count.
                held = (*prompt_ids, *run.answer.token_ids[:-1])
                self._memory = _Memory(engine=engine, drafting=run.drafting, tokens=held)

    def _start(self, prompt_ids: list[int], options: GenerateOptions, policy: Policy, engine: Engine) -> "_Run":
        memory, self._memory = self._memory, None
        drafting = policy.mode != "plain"
        kept = 0
        if options.reuse_prefix and memory is not None and memory.engine is engine and memory.drafting >= drafting:
            kept = memory.shared(prompt_ids)
        limit = min(options.max_tokens, self.context - len(prompt_ids))
        run = self._running = _Run(
            policy=policy,
            plan=Plan(
                budget=policy.budget,
                chain=policy.mode != "tree",
                limit=limit,
                context=self.context,
                proposals=policy.proposals,
                kept=kept,
            ),
            pace=policy.pace(options, self.precision, self._clock),
            answer=Answer(self.codec.stream(), eos_ids=self.codec.eos_ids, stop=options.stop, limit=limit),
            seed=options.resolved_seed(),
            prompt_tokens=len(prompt_ids),
        )
        return run

    def _result(self, run: "_Run", options: GenerateOptions) -> GenerationResult:
        end = time.perf_counter()
        answer, tally, policy = run.answer, run.tally, run.policy
        after_first = len(answer.token_ids) - 1
        exact, words = self._exactness(options, policy.mode)
        return GenerationResult(
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            finish_reason=answer.finish_reason or "length",
            prompt_tokens=run.prompt_tokens,
            tau=tally.emitted / tally.verifications if tally.verifications else None,
            accepted_per_verification=sum(tally.by_depth) / tally.verifications if tally.verifications else None,
            verifications=tally.verifications,
            drafted=tally.drafted,
            accepted_by_depth=tuple(tally.by_depth),
            tokens_per_s=after_first / (end - run.first) if after_first > 0 else None,
            time_to_first_token_ms=(run.first - run.begun) * 1e3,
            exact=exact,
            exactness=words,
            mode=policy.mode,
            draft_nodes=policy.budget,
            seed=None if is_greedy(options) else run.seed,
            precision=self.precision,
            provider=resolve_provider(self.settings.provider),
            threads=self.settings.threads or cores().usable,
            peak_memory_bytes=peak_resident_bytes(),
            reused_tokens=run.plan.kept,
            by_source=tally.by_source(),
            empty_rounds=tally.empty,
            switched_off=run.pace.switched_off,
            tuned=policy.tuning is not None,
            warnings=self.warnings,
            timings=Timings(
                prefill=run.first - run.begun,
                propose=tally.propose,
                verify=tally.verify,
                other=max(0.0, end - run.first - tally.propose - tally.verify),
            ),
            round_tokens=tuple(run.round_tokens),
            round_ms=tuple(run.round_ms),
        )

    def _exactness(self, options: GenerateOptions, mode: Mode) -> tuple[bool, str]:
        if mode == "plain":
            return True, "plain decoding"
        if self.precision == "fp32":
            return True, "the same tokens as plain decoding (fp32: logits differ by rounding only)"
        if options.exact or self.exact_trees:
            return True, "bit-identical to plain decoding"
        return False, "equal to plain decoding up to kernel noise"
