"""A bundle opened for use: prompts in, events and results out."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

from elsi_edge.artifacts import Precision
from elsi_edge.bundle import Bundle
from elsi_edge.errors import BundleError, PromptError, UsageError
from elsi_edge.machine import cores
from elsi_edge.runtime.answer import Answer, TokenStream
from elsi_edge.runtime.decode import Plan, Round, rounds
from elsi_edge.runtime.engines import BundleEngines, Engine
from elsi_edge.runtime.memory import peak_resident_bytes
from elsi_edge.runtime.options import GenerateOptions, SessionSettings
from elsi_edge.runtime.ort import resolve_provider
from elsi_edge.runtime.result import FinishReason, GenerationEvent, GenerationResult, Timings
from elsi_edge.runtime.sampling import choose, is_greedy
from elsi_edge.text import TextCodec

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Mode = Literal["plain", "chain", "tree"]

DEFAULT_DRAFT_NODES: Mapping[Precision, int] = {"fp32": 4, "int8": 1, "int4": 1}  # until the device was measured
EXACT_CHAIN_NODES = 15  # int4 and int8 kernels give the same bits for 1 to 16 rows


class Codec(Protocol):
    """Text to tokens and back; `TextCodec`, or a toy in tests."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def has_template(self) -> bool: ...
    def encode_chat(self, messages: Sequence[Message], *, limit: int | None = None) -> list[int]: ...
    def encode_raw(self, text: str, *, limit: int | None = None) -> list[int]: ...
    def stream(self) -> TokenStream: ...


@dataclass(kw_only=True)
class _Tally:
    """Running counts of a generation."""

    verifications: int = 0
    emitted: int = 0  # tokens that verifications brought and the answer used
    drafted: int = 0
    by_depth: list[int] = field(default_factory=list)
    propose: float = 0.0
    verify: float = 0.0

    def add(self, one: Round, used: int) -> None:
        self.verifications += 1
        self.emitted += used
        self.drafted += one.drafted
        self.propose += one.seconds_propose
        self.verify += one.seconds_target
        for depth in range(min(used, len(one.tokens) - 1)):  # drafts beyond the answer's end do not count
            if depth == len(self.by_depth):
                self.by_depth.append(0)
            self.by_depth[depth] += 1


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
    ) -> None:
        self.codec, self.precision, self.context = codec, precision, context
        self.settings, self.has_draft = settings, has_draft
        self._engines = engines  # exact? -> engine
        self._running: object = None  # marks the generation that owns the engine's caches

    @classmethod
    def open(cls, bundle: Path | str, settings: SessionSettings | None = None) -> Self:
        """Check a bundle and open it; graphs load when first used. Raises BundleError, ProviderError, UsageError."""
        settings = settings or SessionSettings()
        resolve_provider(settings.provider)
        loaded = Bundle.load(Path(bundle))
        return cls(
            codec=TextCodec.open(loaded.directory),
            engines=BundleEngines(loaded, settings),
            precision=loaded.manifest.precision,
            context=loaded.manifest.context,
            settings=settings,
            has_draft=not loaded.manifest.plain_only,
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
        return self._events(prompt_ids, options, self.mode(options))

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

    def mode(self, options: GenerateOptions) -> Mode:
        """What the options ask for on this bundle. Raises UsageError for a budget that exact mode cannot hold."""
        budget = self.budget(options)
        if budget == 0:
            return "plain"
        if self.precision == "fp32" or not options.exact:
            return "chain" if options.shape == "chain" else "tree"
        if options.shape == "tree":
            raise UsageError(
                f"--shape tree at {self.precision} is not exact: its attention sums a path's keys in another order "
                "when they are not adjacent, and rounding then changes tokens; add --no-exact, or use a chain or fp32"
            )
        if budget > EXACT_CHAIN_NODES:
            raise UsageError(
                f"--draft-nodes is {budget}, exact mode at {self.precision} holds chains of at most "
                f"{EXACT_CHAIN_NODES}: its kernels give the same bits for 1 to 16 rows only; use fewer, or --no-exact"
            )
        return "chain"

    def engine(self, *, exact: bool) -> Engine:
        """The loaded target and proposer of a mode, loading them if need be: to run the loop with another proposer."""
        return self._engines[exact]

    def budget(self, options: GenerateOptions) -> int:
        """N, the drafted nodes of a round. Raises BundleError when a draft is asked for and there is none."""
        if options.plain:
            return 0
        if not self.has_draft:
            if options.draft_nodes:
                raise BundleError(
                    f"--draft-nodes is {options.draft_nodes}, but this bundle has no draft; "
                    "use --plain or export with one"
                )
            return 0
        return DEFAULT_DRAFT_NODES[self.precision] if options.draft_nodes is None else options.draft_nodes

    def _events(self, prompt_ids: list[int], options: GenerateOptions, mode: Mode) -> Iterator[GenerationEvent]:
        engine = self.engine(exact=options.exact)
        seed = options.resolved_seed()
        limit = min(options.max_tokens, self.context - len(prompt_ids))
        plan = Plan(budget=self.budget(options), chain=mode != "tree", limit=limit, context=self.context)
        answer = Answer(self.codec.stream(), eos_ids=self.codec.eos_ids, stop=options.stop, limit=limit)
        tally = _Tally()
        start = time.perf_counter()
        first = 0.0
        loop = rounds(
            engine.target,
            None if mode == "plain" else engine.proposer,
            prompt_ids,
            plan,
            lambda logits, index: choose(logits, options, seed=seed, index=index),
        )
        running = self._running = object()
        for one in loop:
            text, used = "", 0
            for token in one.tokens:
                text += answer.push(token)
                used += 1
                if answer.finish_reason is not None:
                    break
            if first == 0.0:
                first = time.perf_counter()
            else:
                tally.add(one, used)
            if answer.finish_reason is not None:
                break
            yield GenerationEvent(text=text, token_ids=one.tokens)
            if self._running is not running:
                raise UsageError("this generation was ended by another one on the same session; open a second session")
        end = time.perf_counter()
        result = self._result(answer, tally, options, mode, plan, seed, len(prompt_ids), (start, first, end))
        yield GenerationEvent(text=text, token_ids=one.tokens[:used], result=result)

    def _result(
        self,
        answer: Answer,
        tally: _Tally,
        options: GenerateOptions,
        mode: Mode,
        plan: Plan,
        seed: int,
        prompt_tokens: int,
        clock: tuple[float, float, float],
    ) -> GenerationResult:
        start, first, end = clock
        reason: FinishReason = answer.finish_reason or "length"
        after_first = len(answer.token_ids) - 1
        exact, words = self._exactness(options, mode)
        return GenerationResult(
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            tau=tally.emitted / tally.verifications if tally.verifications else None,
            accepted_per_verification=sum(tally.by_depth) / tally.verifications if tally.verifications else None,
            verifications=tally.verifications,
            drafted=tally.drafted,
            accepted_by_depth=tuple(tally.by_depth),
            tokens_per_s=after_first / (end - first) if after_first > 0 else None,
            time_to_first_token_ms=(first - start) * 1e3,
            exact=exact,
            exactness=words,
            mode=mode,
            draft_nodes=plan.budget,
            seed=None if is_greedy(options) else seed,
            precision=self.precision,
            provider=resolve_provider(self.settings.provider),
            threads=self.settings.threads or cores().usable,
            peak_memory_bytes=peak_resident_bytes(),
            timings=Timings(
                prefill=first - start,
                propose=tally.propose,
                verify=tally.verify,
                other=max(0.0, end - first - tally.propose - tally.verify),
            ),
        )

    def _exactness(self, options: GenerateOptions, mode: Mode) -> tuple[bool, str]:
        if mode == "plain":
            return True, "plain decoding"
        if self.precision == "fp32":
            return True, "the same tokens as plain decoding (fp32: logits differ by rounding only)"
        if options.exact:
            return True, "bit-identical to plain decoding"
        return False, "equal to plain decoding up to kernel noise"
