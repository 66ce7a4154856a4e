"""What passes between the rooms: frozen dataclasses, validated when built, and the one protocol for a running target.

Nothing here imports torch. Axis letters as in the docs: B batch, T new tokens, S cached tokens, N tree nodes, M taps,
E hidden width, V target vocabulary, U draft vocabulary, L blocks, H kv heads, D head width.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Protocol, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from elsi_edge.errors import ConfigError, ElsiError

T = TypeVar("T")

Method = Literal["elsi", "elsi-c", "eagle3", "eagle2", "low-entropy", "uniform"]
StateKind = Literal["residual", "final-norm"]
Precision = Literal["int4", "int8", "fp32"]
HeadKind = Literal["own", "tied"]

FINAL_NORM = -1  # in a list of taps to read: the state after the final norm (EAGLE-2's)

METHODS: tuple[Method, ...] = get_args(Method)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SLACK = 64  # positions that a graph knows beyond its context: a verification's rows that do not count
BLOCK = 32  # weights along a row that share a scale, at 4 and 8 bits
BITS: Mapping[Precision, int] = {"int4": 4, "int8": 8, "fp32": 32}  # of a weight
# Scales included: a float32 for every block of 32 weights. The last block of a row is padded, which is not counted.
BYTES_PER_WEIGHT: Mapping[Precision, float] = {"int4": 5 / 8, "int8": 9 / 8, "fp32": 4.0}
# The draft only proposes, so its precision never changes tokens; at fp32 its weights would take four times as long to
# read for the same proposals.
DRAFT_PRECISION: Mapping[Precision, Precision] = {"fp32": "int8", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Architecture-neutral numbers of a target, read once from its configuration."""

    family: str  # the configuration's model_type, e.g. "llama"
    blocks: int  # L
    width: int  # E
    heads: int  # query heads
    kv_heads: int  # H
    head_width: int  # D, not always width / heads
    mlp_width: int
    vocab_size: int  # V, the width of the logits
    context: int  # longest sequence the model was made for, tokens
    tied_embeddings: bool
    rope_theta: float
    norm_eps: float

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "heads", "kv_heads", "head_width", "mlp_width", "vocab_size", "context"):
            _require(getattr(self, name) >= 1, f"model shape: {name} is {getattr(self, name)}, it must be at least 1")

    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one cached token takes over all blocks."""
        return self.blocks * 2 * self.kv_heads * self.head_width * 4


@dataclass(frozen=True, kw_only=True)
class LayerSelection:
    """The taps that a draft sees, with the scores and settings that led to them.

    Tap t is the residual stream entering block t: 0 the embeddings, L after the last block and before the final norm.
    `state` is "final-norm" for EAGLE-2's rule alone: tap L after the final norm.
    """

    taps: tuple[int, ...]  # ascending, each in 0..L
    method: Method | Literal["explicit"]
    state: StateKind = "residual"
    entropy: tuple[float, ...] = ()  # nats, one per tap 0..L; empty when nothing was measured
    joint_entropy: float | None = None  # nats, of the chosen set
    keep: float = 0.30  # share of positions kept, by the target's predictive entropy
    cka_weight: float = 0.0  # ELSI-C's penalty, 0 for the others
    prompts: int = 0  # prompts measured
    tokens: int = 0  # positions kept
    prompts_sha256: str = ""  # of the prompts' texts
    blocks: int = 0  # L of the target
    width: int = 0  # E of the target
    target_fingerprint: str = ""
    model: str = ""  # the reference as the user gave it
    settings: Mapping[str, Any] = field(default_factory=dict)  # normalisation, skipped positions, estimator
    entropy_interval: tuple[tuple[float, ...], ...] = ()  # (low, high) nats per tap, 95 %, over prompts
    stability: Mapping[str, Any] = field(default_factory=dict)  # wins per tap and set, where the pick settles
    probe: Mapping[str, Any] = field(default_factory=dict)  # ridge cross-check: agreement per tap, set and rule
    compartments: tuple[tuple[int, ...], ...] = ()  # (first, last) tap of each region of like taps
    cka_transitions: tuple[int, ...] = ()  # first taps of all compartments but the first
    variance: Mapping[str, Any] = field(default_factory=dict)  # of entropies between prompts: raw, filtered, random
    format_version: int = 1

    def __post_init__(self) -> None:
        _require(len(self.taps) >= 1, "a selection needs at least one tap, it has none")
        _require(list(self.taps) == sorted(set(self.taps)), f"taps {list(self.taps)} must ascend without repeats")
        _require(
            self.blocks >= 1 and self.taps[0] >= 0 and self.taps[-1] <= self.blocks,
            f"taps {list(self.taps)} must lie in 0..{self.blocks}, the target's number of blocks",
        )
        _require(0.0 < self.keep <= 1.0, f"keep is {self.keep}, it must lie in (0, 1]")
        if self.state == "final-norm":
            _require(self.taps == (self.blocks,), "the state after the final norm exists at the last tap alone")

    @property
    def m(self) -> int:
        """Number of taps."""
        return len(self.taps)

    def same_taps(self, other: "LayerSelection") -> bool:
        """Whether both name the same states of a target."""
        return self.taps == other.taps and self.state == other.state

    def describe(self) -> str:
        """Taps in words, e.g. "tap 27" or "taps 2, 15, 27"."""
        if self.state == "final-norm":
            return "the state after the final norm"
        return f"tap{'s' if self.m > 1 else ''} {', '.join(map(str, self.taps))}"

    @property
    def taps_text(self) -> str:
        """Taps as options take them, e.g. "27", "2,15,27" or "final-norm"."""
        return "final-norm" if self.state == "final-norm" else ",".join(map(str, self.taps))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, `m` included for readers."""
        return {"format": "elsi-edge-selection", **to_plain(self), "m": self.m}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> Self:
        """Read what `to_json` wrote. Raises ConfigError naming `source` for anything else."""
        return from_plain(cls, value, source, ignore=("format", "m"))


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Everything structural about a draft: decided once, stored with its weights, derived from afterwards."""

    selection: LayerSelection
    width: int  # of the draft's states, normally the target's E
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    draft_vocab_size: int  # U
    target_vocab_size: int  # V
    context: int  # longest sequence, tokens
    rope_theta: float
    norm_eps: float
    depth: int = 1  # blocks
    target_width: int = 0  # E of the target where the draft's own width is another; 0 where it is the same
    head: HeadKind = "own"  # trained, or the target's lm_head rows as they are ("tied"); stored either way
    target_fingerprint: str = ""
    tokenizer_sha256: str = ""
    template_sha256: str = ""
    draft_to_target_sha256: str = ""  # of the absolute ids, int64 little-endian
    vocab_coverage: float = 0.0  # share of the target's own answer tokens that the draft can say
    training: Mapping[str, Any] = field(default_factory=dict)  # data, steps, settings, acceptance: for the card
    format_version: int = 1

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "head_width", "mlp_width", "draft_vocab_size", "context"):
            _require(getattr(self, name) >= 1, f"draft: {name} is {getattr(self, name)}, it must be at least 1")
        _require(self.depth in (1, 2), f"draft: depth is {self.depth}, it must be 1 or 2")
        _require(self.target_width >= 0, f"draft: target_width is {self.target_width}, it cannot be negative")
        _require(self.heads % self.kv_heads == 0, f"draft: {self.heads} heads cannot share {self.kv_heads} kv heads")
        _require(
            self.draft_vocab_size <= self.target_vocab_size,
            f"draft: vocabulary of {self.draft_vocab_size} exceeds the target's {self.target_vocab_size}",
        )

    @property
    def m(self) -> int:
        """Number of taps the projection reads."""
        return self.selection.m

    @property
    def embedding_width(self) -> int:
        """E of the target: of its states and its embeddings."""
        return self.target_width or self.width

    @property
    def trained_for(self) -> Precision:
        """The precision whose rounding its training saw, "fp32" for none."""
        found = self.training.get("settings", {}).get("qat", "fp32")
        return found if found in PRECISIONS else "fp32"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"format": "elsi-edge-draft", **to_plain(self), "selection": self.selection.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> Self:
        """Read what `to_json` wrote. Raises ConfigError naming `source` for anything else."""
        _require(isinstance(value, Mapping), f"{source}: {_short(value)} where a draft's configuration is expected")
        _require(isinstance(value.get("selection"), Mapping), f"{source}: the key 'selection' is missing")
        selection = LayerSelection.from_json(value["selection"], source)
        return from_plain(cls, {**value, "selection": selection}, source, ignore=("format",))


def usual_draft_precision(target: Precision, draft: DraftConfig | None) -> Precision:
    """Of a draft's weights in a bundle of precision `target` unless asked otherwise: what it was trained for, if so."""
    own = "fp32" if draft is None else draft.trained_for
    return DRAFT_PRECISION[target] if own == "fp32" else own


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One conversation to answer: user turns, in order."""

    id: str
    turns: tuple[str, ...]
    category: str = ""
    source: str = ""
    answer: str = ""  # what the file has an assistant say to the first turn; most files have none


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """Hidden states and logits of one token sequence under the target."""

    states: NDArray[np.float32]  # [M, T, E] residual stream at the asked taps, in their order
    logits: NDArray[np.float32]  # [T, V]; row t predicts token t + 1


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """One prompt to be answered, with all that its answer depends on."""

    key: str  # names the answer for the caller
    prompt_ids: tuple[int, ...]
    max_tokens: int  # of the answer
    temperature: float  # 0 is greedy
    top_k: int  # 0 keeps the whole vocabulary
    seed: int  # of this answer alone, so that it does not depend on its company


@dataclass(frozen=True, kw_only=True)
class TargetRecord:
    """What a draft learns from one token sequence: states everywhere, distributions at its A answer tokens."""

    states: NDArray[np.float32]  # [M, T, E] at the asked taps, in their order
    top_ids: NDArray[np.int32]  # [A, k], likeliest first; row i is what predicted the i-th answer token
    top_logits: NDArray[np.float32]  # [A, k]
    log_sum_exp: NDArray[np.float32]  # [A], of the whole row of logits


class TargetRunner(Protocol):
    """A running target, as calibration and distillation see it; the CLI fills it with a runtime session or torch."""

    fingerprint: str  # of the source model's weights and shape
    shape: ModelShape

    def answer(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
    ) -> list[int]:
        """Token ids of the target's answer, the end token included when it was reached.

        `temperature` 0 is greedy, `top_k` 0 keeps the whole vocabulary.
        """
        ...

    def states(self, token_ids: Sequence[int], taps: Sequence[int]) -> TargetStates:
        """Teacher-forced states at `taps` and logits of the whole sequence, from an empty cache."""
        ...


class BatchTargetRunner(TargetRunner, Protocol):
    """A target that answers many prompts at once; `answer_batch` and `record` may be called from `workers` threads."""

    workers: int  # threads that keep the machine busy
    arithmetic: str  # what computes, e.g. "onnx-int4": states of two kinds do not belong in one set

    def answer_batch(
        self, requests: Iterator[AnswerRequest], *, batch: int, stop: Callable[[], bool]
    ) -> Iterator[tuple[AnswerRequest, list[int]]]:
        """Answers as they finish, at most `batch` in the making; requests are drawn when there is room.

        A batch of 1 decodes as a session does. `stop` is asked every token; True ends it, without what is unfinished.
        """
        ...

    def record(
        self, token_ids: Sequence[int], taps: Sequence[int], *, prompt_tokens: int, keep_top: int
    ) -> TargetRecord:
        """Teacher-forced states at `taps` (FINAL_NORM too) and the distributions behind the answer's tokens."""
        ...

    def memory_needed(self, *, batch: int, tokens: int) -> int:
        """Bytes that `batch` answers of `tokens` tokens, prompts included, take beside the weights."""
        ...


# --- dataclass <-> plain values ----------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and numpy scalars as JSON-ready values; floats that JSON cannot hold become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_plain(cls: type[T], value: Mapping[str, Any], source: str, ignore: tuple[str, ...] = ()) -> T:
    """Build a dataclass from a mapping; lists become tuples. Raises ConfigError naming the key that is off."""
    _require(isinstance(value, Mapping), f"{source}: {_short(value)} where an object is expected")
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {key: _tuples(item) for key, item in value.items() if key not in ignore}
    unknown = sorted(set(given) - set(known))
    _require(not unknown, f"{source}: unknown key {unknown[0] if unknown else ''!r}; written by a newer version?")
    missing = [
        name
        for name, f in known.items()
        if name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    _require(not missing, f"{source}: the key {missing[0] if missing else ''!r} is missing")
    hints = get_type_hints(cls)
    for name, item in given.items():
        _require(_fits(item, hints[name]), f"{source}: the key {name!r} cannot be {_short(item)}")
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error
    except ElsiError as error:
        raise type(error)(f"{source}: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type, down to the items of tuples and mappings; floats must be finite."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return value in parts
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if origin is not None:
        return isinstance(value, Mapping) and all(_fits(item, parts[1]) for item in value.values())
    if kind in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole or (kind is float and isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
