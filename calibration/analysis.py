"""All that one calibration measured and concluded, as the report shows it: frozen, JSON-ready through `to_plain`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from elsi_edge.artifacts import LayerSelection, StateKind, from_plain, to_plain

Row = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """One rule's taps, all rules measured on the same rows."""

    name: str  # "elsi m = 2", "eagle3", ...
    taps: tuple[int, ...]
    state: StateKind = "residual"
    joint_entropy: float  # nats, on the reservoir
    mean_cka: float  # over pairs, 0 for one tap
    probe: float | None = None  # top-1 agreement 0..1, None where the set was not fitted
    chosen: bool = False  # these are the selection's taps


@dataclass(frozen=True, kw_only=True)
class Settling:
    """What would have been picked after the first so many prompts."""

    prompts: int
    tokens: int  # positions kept
    tap: int  # of highest single-tap entropy among 1..L
    entropy: tuple[float, ...]  # nats, taps 0..L
    win_share: float  # of resamples that the pick wins, 0..1


@dataclass(frozen=True, kw_only=True)
class Search:
    """How far a greedy set is from the best one found; a quick search only looks at some good sets, to show one."""

    m: int
    greedy: tuple[int, ...]
    greedy_entropy: float  # nats, on `rows`
    best: tuple[int, ...]
    best_entropy: float  # nats, on `rows`
    compared: int  # sets measured on `rows`
    total: int  # sets of that size
    rows: int  # positions of the reservoir
    half_entropy: float  # nats, of the best set on half of the rows
    quick: bool = False  # nobody asked for this size: few sets were measured, and `greedy` is no rule's answer


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything behind a selection. Tap-indexed values run over taps 0..L."""

    selection: LayerSelection  # the choice, with entropies, intervals, stability, probe, compartments and variance
    final_norm_entropy: float  # nats, tap L after the final norm
    normalisations: Mapping[str, tuple[float, ...]]  # nats by tap on the reservoir: "unit", "centered", "raw"
    rules: tuple[RuleResult, ...]
    settling: tuple[Settling, ...]
    searches: tuple[Search, ...]  # m = 2 and what else was searched
    cka: tuple[Row, ...]  # [L + 1, L + 1]
    cka_estimator: str  # "biased" or "debiased"
    cka_rows: int  # positions it was measured on
    cka_change: float  # largest change of an entry between half of the rows and all
    gains: tuple[Row, ...]  # [L + 1, L + 1] nats that partner (column) adds to seed (row); None at tap 0 and itself
    gain_rows: int  # positions of the screen that gains were measured on
    verdict: tuple[str, ...]  # sentences
    cost: Mapping[str, float]  # seconds by part, and "memory_bytes"
    format_version: int = 1

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"format": "elsi-edge-calibration", **to_plain(self), "selection": self.selection.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> Self:
        """Read what `to_json` wrote. Raises ConfigError naming `source` for anything else."""
        parts = {
            "normalisations": {name: tuple(row) for name, row in value.get("normalisations", {}).items()},
            "selection": LayerSelection.from_json(value.get("selection", {}), source),
            "rules": tuple(from_plain(RuleResult, item, source) for item in value.get("rules", ())),
            "settling": tuple(from_plain(Settling, item, source) for item in value.get("settling", ())),
            "searches": tuple(from_plain(Search, item, source) for item in value.get("searches", ())),
        }
        return from_plain(cls, {**value, **parts}, source, ignore=("format",))
