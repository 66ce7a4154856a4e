"""What a generation yields; the field names are a contract of `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elsi_edge.runtime.tree import Source

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall-clock seconds of a generation, by part."""

    prefill: float = 0.0
    propose: float = 0.0
    verify: float = 0.0
    other: float = 0.0  # sampling, commit, text


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """What became of the nodes that one source proposed."""

    drafted: int  # nodes
    accepted: int
    drafted_by_depth: tuple[int, ...]  # nodes at depth 1, 2, ...
    accepted_by_depth: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """An answer, and what it cost."""

    token_ids: tuple[int, ...]  # the answer's tokens, the end token included when it was reached
    text: str  # without end token and stop text
    finish_reason: FinishReason
    prompt_tokens: int
    tau: float | None  # tokens emitted per verification, the bonus token included; None before any
    accepted_per_verification: float | None  # accepted drafts alone
    verifications: int
    drafted: int  # nodes drafted in all
    accepted_by_depth: tuple[int, ...]  # verifications that accepted a node at depth 1, 2, ...
    tokens_per_s: float | None  # after the first token, so without prefill; None for a single token
    time_to_first_token_ms: float
    exact: bool  # False: equal to plain decoding up to kernel noise
    exactness: str  # the same in words
    mode: Literal["plain", "chain", "tree"]
    draft_nodes: int  # budget N
    seed: int | None  # None when greedy
    precision: str
    provider: str
    threads: int
    peak_memory_bytes: int  # peak resident set of this process
    reused_tokens: int = 0  # of the prompt, from the turn before
    by_source: Mapping[Source, SourceCounts] = field(default_factory=dict)  # draft, ngram, both (they agreed)
    empty_rounds: int = 0  # verifications without candidates
    switched_off: int = 0  # times that speculation was found slower than plain decoding
    tuned: bool = False  # whether a tuning file chose
    warnings: tuple[str, ...] = ()
    timings: Timings = field(default_factory=Timings)
    round_tokens: tuple[int, ...] = ()  # tokens that each round after the first token brought
    round_ms: tuple[float, ...] = ()  # and what it took from the one before, with text and whoever reads a stream


@dataclass(frozen=True, kw_only=True)
class GenerationEvent:
    """One step of a stream: new text, new tokens; the last one carries the result."""

    text: str
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None
