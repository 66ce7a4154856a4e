"""Settings by kind: what is fixed when a session opens, and what may change with each call."""

import math
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

from elsi_edge.errors import ConfigError

DraftShape = Literal["auto", "chain", "tree"]
Proposal = Literal["draft", "ngram"]  # a source of candidates
PROPOSALS: tuple[Proposal, ...] = get_args(Proposal)
MAX_SEED = (1 << 63) - 1
DEFAULT_MAX_TOKENS = 256  # tokens
MAX_DRAFT_NODES = 127  # N; a verification of 128 rows


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """Environmental: given when a session opens, recorded in every result."""

    threads: int = 0  # of ONNX Runtime's pool; 0 = as many as this process may use
    provider: str = "cpu"  # execution provider, short or full name
    native: bool = True  # run the native operators where the bundle names them and the library is there
    tuning: bool = True  # use the tuning file beside the bundle, where one is meant for this machine

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"--threads is {self.threads}, it must be 0 (automatic) or more")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Operational: per call. In exact mode none of these but the sampling ones changes the tokens."""

    draft_nodes: int | None = None  # N drafted nodes a round (N + 1 rows to verify); None = the default, 0 = plain
    shape: DraftShape = "auto"  # of the candidates: auto is a tree where exactness allows one, else a chain
    plain: bool = False  # no candidates at all
    proposals: tuple[Proposal, ...] = (
        PROPOSALS  # where candidates come from; a bundle without a draft has n-grams alone
    )
    exact: bool = True  # the same tokens as plain decoding; trees at int4 and int8 need exact=False
    max_tokens: int = DEFAULT_MAX_TOKENS  # of the answer, the end token counted; at least 1
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # keep this many tokens; 0 = all
    top_p: float = 1.0  # keep the smallest set with this probability, in 0..1; 0 keeps the top token
    min_p: float = (
        0.0  # keep tokens with at least this share of the top one's probability, in 0..1; 1 keeps the top token
    )
    repetition_penalty: float = 1.0  # above 1, tokens of prompt and answer so far become less likely; 1 = off
    seed: int | None = None  # None = drawn, and recorded in the result
    stop: tuple[str, ...] = ()  # texts that end the answer; not searched in the prompt
    system: str | None = None  # system message, first in the chat
    reuse_prefix: bool = False  # keep what the caches hold of the prompt from the generation before: a chat's next turn
    raw: bool = False  # continue the prompt as it is, without the chat template

    def __post_init__(self) -> None:
        _in_range("--draft-nodes", self.draft_nodes or 0, 0, MAX_DRAFT_NODES)
        _in_range("--max-tokens", self.max_tokens, 1, math.inf)
        _in_range("--temperature", self.temperature, 0.0, math.inf, open_end=True)
        _in_range("--top-k", self.top_k, 0, math.inf)
        _in_range("--top-p", self.top_p, 0.0, 1.0)
        _in_range("--min-p", self.min_p, 0.0, 1.0)
        _in_range("--repetition-penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("--seed", self.seed or 0, 0, MAX_SEED)
        if isinstance(self.stop, str):
            raise ConfigError(
                f"stop is the text {self.stop!r}, it must be a tuple of texts; write stop=({self.stop!r},)"
            )
        if self.shape not in get_args(DraftShape):
            raise ConfigError(f"--shape is {self.shape!r}, it must be one of {', '.join(get_args(DraftShape))}")
        if not self.proposals or any(name not in PROPOSALS for name in self.proposals):
            raise ConfigError(
                f"--proposals is {','.join(self.proposals)!r}, it must name {' or '.join(PROPOSALS)}, or both with a "
                "comma; none at all is --plain"
            )
        if any(text == "" for text in self.stop):
            raise ConfigError("--stop is an empty text, which every answer contains; give at least one character")
        if self.raw and self.system is not None:
            raise ConfigError("--raw continues the prompt as it is and has no place for --system; drop one of them")
        if self.plain and self.draft_nodes:
            raise ConfigError(f"--plain drafts nothing but --draft-nodes is {self.draft_nodes}; drop one of them")

    def resolved_seed(self) -> int:
        """The seed given, or a fresh one."""
        return secrets.randbelow(1 << 32) if self.seed is None else self.seed


def _in_range(name: str, value: float, low: float, high: float, *, open_end: bool = False) -> None:
    inside = low <= value < high if open_end else low <= value <= high
    if not inside:  # also catches NaN, which compares false with everything
        end = (
            "" if math.isinf(high) else f" and at most {high:g}" if isinstance(high, float) else f" and at most {high}"
        )
        raise ConfigError(f"{name} is {value}, it must be a number of at least {low:g}{end}")
