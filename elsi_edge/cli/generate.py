"""`elsi-edge generate`: one prompt, answered as it comes."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from elsi_edge.cli import options as opt
from elsi_edge.runtime.options import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from elsi_edge.runtime.result import GenerationEvent, GenerationResult


def generate(
    bundle: opt.BundleArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to answer; - reads it from stdin, less a final newline.")
    ],
    plain: Annotated[bool, typer.Option("--plain", help="Decode without candidates.")] = False,
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
    system: opt.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    threads: opt.Threads = 0,
    provider: opt.Provider = "cpu",
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Answer a prompt: text on stdout as it comes, one line about it on stderr. --json prints one object instead."""
    from elsi_edge.bundle_ref import find_bundle
    from elsi_edge.cli import common
    from elsi_edge.runtime.options import GenerateOptions, SessionSettings
    from elsi_edge.text import require_clean

    options = GenerateOptions(
        plain=plain,
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
        system=system,
        raw=raw,
    )
    settings = SessionSettings(threads=threads, provider=provider)
    for text in options.stop:
        require_clean(text, "--stop")
    found = find_bundle(bundle, work)
    from elsi_edge.runtime.session import Session

    session = Session.open(found.directory, settings)
    if found.note:
        common.note(found.note)
    events = session.stream(_stdin() if prompt == "-" else prompt, options)  # checks the prompt
    if not session.codec.has_template and not raw:
        common.note("note: this model has no chat template, so the prompt is continued as it is (as with --raw)")
    result = _last(events) if json else _show(events)
    if json:
        common.emit_json(as_json(result))
        return
    for warning in result.warnings:
        common.note(f"warning: {warning}")
    common.note(summary(result))


def _show(events: Iterator["GenerationEvent"]) -> "GenerationResult":
    """Text to stdout as it comes; ends in a newline even when interrupted."""
    try:
        return _last(_written(events))
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _written(events: Iterator["GenerationEvent"]) -> Iterator["GenerationEvent"]:
    for event in events:
        sys.stdout.write(event.text)
        sys.stdout.flush()
        yield event


def _last(events: Iterator["GenerationEvent"]) -> "GenerationResult":
    result = None
    for event in events:
        result = event.result
    if result is None:
        raise RuntimeError("the stream ended without its result")
    return result


def _stdin() -> str:
    # Bytes that are no UTF-8 become surrogates, as in arguments, and are then refused with their place.
    return sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")


def as_json(result: "GenerationResult") -> dict[str, object]:
    """A result for --json. `speedup` and `identical` need a plain run beside it, which `bench` makes: null here."""
    from elsi_edge.artifacts import to_plain

    return {**to_plain(result), "speedup": None, "identical": None}


def summary(result: "GenerationResult") -> str:
    """One line about an answer: tokens, tau, speed, mode, exactness."""
    parts = [f"{len(result.token_ids)} tokens ({result.finish_reason})"]
    if result.mode != "plain" and result.tau is not None:
        parts.append(f"tau {result.tau:.2f}")
    if result.tokens_per_s is not None:
        parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {result.time_to_first_token_ms:.0f} ms")
    nodes = f"{result.draft_nodes} node{'s' if result.draft_nodes != 1 else ''}"
    said = [f"{name} {counts.accepted} of {counts.drafted}" for name, counts in result.by_source.items()]
    mode = "" if result.mode == "plain" else f"{result.mode} of up to {nodes}, accepted {', '.join(said) or 'none'}; "
    parts.append(f"{mode}{result.exactness}")
    return "[" + "; ".join(parts) + "]"
