"""`elsi-edge chat`: a conversation, each turn answered as a fresh session would answer the whole history."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from elsi_edge.cli import options as opt
from elsi_edge.runtime.options import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from types import FrameType

    from elsi_edge.runtime.options import GenerateOptions
    from elsi_edge.runtime.session import Session

Message = dict[str, str]  # {"role": ..., "content": ...}


def chat(
    bundle: opt.BundleArgument,
    system: opt.System = None,
    exact: opt.Exact = True,
    draft_nodes: opt.DraftNodes = None,
    proposals: opt.Proposals = opt.DEFAULT_PROPOSALS,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = DEFAULT_MAX_TOKENS,
    stop: opt.Stop = None,
    threads: opt.Threads = 0,
    provider: opt.Provider = "cpu",
    work: opt.Work = None,
) -> None:
    """Hold a conversation, one line a turn; the end of input (Ctrl-D) leaves it.

    Ctrl-C stops an answer, and what was shown of it stays in the history; at the prompt, or twice, it leaves. When the
    conversation no longer fits the context, its oldest turns are dropped in pairs, never the system message, and a line
    says so.
    """
    from elsi_edge.bundle_ref import find_bundle
    from elsi_edge.cli import common
    from elsi_edge.errors import PromptError
    from elsi_edge.runtime.options import GenerateOptions, SessionSettings
    from elsi_edge.runtime.session import Session

    options = GenerateOptions(
        exact=exact,
        draft_nodes=draft_nodes,
        proposals=opt.proposals_of(proposals),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        reuse_prefix=True,
    )
    found = find_bundle(bundle, work)
    session = Session.open(found.directory, SessionSettings(threads=threads, provider=provider))
    if not session.codec.has_template:
        raise PromptError("this model has no chat template, so there is no chat; continue text with: generate --raw")
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    session.encode([*first, {"role": "user", "content": "hello"}], options)  # a template may refuse the system message
    session.policy(options)
    if found.note:
        common.note(found.note)
    for warning in session.warnings:
        common.note(f"warning: {warning}")
    _converse(session, first, options)


def _converse(session: "Session", history: list[Message], options: "GenerateOptions") -> None:
    from elsi_edge.cli import common
    from elsi_edge.errors import PromptError

    def count(messages: list[Message]) -> int:
        return len(session.codec.encode_chat(messages))

    first = [message for message in history if message["role"] == "system"]
    reserve = min(options.max_tokens, session.context // 4)
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        turn = {"role": "user", "content": line}
        try:
            session.encode([*first, turn], options)  # refuses a turn that is too long by itself, before it is counted
            kept, dropped = fit([*history, turn], count, context=session.context, reserve=reserve)
            if dropped:
                common.note(dropped)
            answer = _answer(session, kept, options)
        except PromptError as error:
            common.note(f"error: {error} (this turn was left out)")
            continue
        # Without any text there is no turn to keep: the conversation stays as it was before.
        history = [*kept, {"role": "assistant", "content": answer}] if answer is not None else kept[:-1]


def fit(
    messages: list[Message], count: Callable[[list[Message]], int], *, context: int, reserve: int
) -> tuple[list[Message], str]:
    """The conversation with as many of its oldest turns dropped as needed, and a line about it ("" when it fits).

    `messages` are an optional system message, pairs of user and assistant, and the user's new turn; `count` gives the
    tokens of a conversation, `context` and `reserve` (room for the answer) are tokens. Pairs are dropped whole, the
    system message and the new turn never. Raises PromptError when these two alone do not fit.
    """
    from elsi_edge.errors import PromptError

    head = 1 if messages[0]["role"] == "system" else 0
    before = tokens = count(messages)
    kept, pairs = messages, 0
    while tokens + reserve > context and len(kept) > head + 1:
        kept = [*kept[:head], *kept[head + 2 :]]
        pairs += 1
        tokens = count(kept)
    if tokens >= context:
        raise PromptError(f"this turn has {tokens} tokens, the context {context}; shorten it")
    if not pairs:
        return messages, ""
    turns = "the oldest turn and its answer" if pairs == 1 else f"the {pairs} oldest turns and their answers"
    return kept, f"note: the conversation has {before} of {context} tokens; dropped {turns}, {tokens} tokens stay"


def _answer(session: "Session", messages: list[Message], options: "GenerateOptions") -> str | None:
    """Stream one answer to stdout; its text, or what was shown before Ctrl-C. None when nothing was."""
    from elsi_edge.cli import common
    from elsi_edge.cli.generate import summary

    shown, result = "", None
    with _interruptible() as interrupted:
        events = session.stream(messages, options)
        for event in events:
            shown += event.text
            sys.stdout.write(event.text)
            sys.stdout.flush()
            result = event.result
            if interrupted() and result is None:
                break
    sys.stdout.write("\n")
    sys.stdout.flush()
    if result is not None:
        common.note(summary(result))
        return result.text
    common.note("[stopped; the conversation keeps what was shown]" if shown else "[stopped; this turn was left out]")
    return shown or None


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, asked between rounds so that no buffer is left torn; a second press raises."""
    presses = 0

    def press(number: int, frame: "FrameType | None") -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_line() -> str | None:
    """The next line without its end, None at the end of input; asks for it on stderr when a person types."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.buffer.readline()
    # Bytes that are no UTF-8 become surrogates, as in arguments, and are then refused with their place.
    return line.decode(errors="surrogateescape").rstrip("\r\n") if line else None
