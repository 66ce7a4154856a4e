"""How a calibration measures and chooses: settings, and the small protocols that the caller fills."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from elsi_edge.artifacts import METHODS, Method
from elsi_edge.calibration import selection
from elsi_edge.calibration.statistics import NORMALISATIONS, Normalisation
from elsi_edge.errors import ConfigError

_FIXED_M: dict[str, int] = {"eagle3": 3, "eagle2": 1}


class Advance(Protocol):
    """What a progress context gives."""

    def advance(self, n: float) -> None:
        """n more units are done."""


Progress = Callable[[str, float | None, str], AbstractContextManager[Advance]]  # description, total, unit
Note = Callable[[str], None]  # one line for the user


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """How taps are measured and chosen. Raises ConfigError for values out of range."""

    method: Method | Literal["explicit"] = "elsi"
    m: int | None = None  # number of taps; None is the rule's own, or 1
    taps: tuple[int, ...] = ()  # for "explicit" alone
    keep: float = 0.30  # share of each prompt's positions kept, the least sure first, (0, 1]
    skip: int = 4  # first positions of a prompt never counted, tokens; massive activations live there
    normalisation: Normalisation = "unit"
    cka_weight: float = selection.DEFAULT_CKA_WEIGHT  # nats, ELSI-C alone
    debiased_cka: bool = False
    reservoir: int = 2048  # kept positions that sets and CKA are measured on
    seed: int = 0  # of the order of prompts, the reservoir, random positions, held-out prompts and resamples
    batch_tokens: int = 1024  # positions per forward pass
    probe: bool = True  # fit and score the ridge cross-check
    until_stable: bool = False  # stop adding prompts once the single-tap pick is stable

    def __post_init__(self) -> None:
        methods = (*METHODS, "explicit")
        _require(self.method in methods, f"method is {self.method!r}, it must be one of {', '.join(methods)}")
        _require(
            self.normalisation in NORMALISATIONS,
            f"normalisation is {self.normalisation!r}, it must be one of {', '.join(NORMALISATIONS)}",
        )
        _require(self.m is None or self.m >= 1, f"m is {self.m}, it must be at least 1")
        _require(0.0 < self.keep <= 1.0, f"keep is {self.keep}, it must lie in (0, 1]")
        _require(self.skip >= 0, f"skip is {self.skip}, it must be at least 0")
        _require(self.cka_weight >= 0.0, f"the CKA weight is {self.cka_weight}, it must be at least 0")
        _require(self.reservoir >= 16, f"reservoir is {self.reservoir}, it must be at least 16")
        _require(self.seed >= 0, f"seed is {self.seed}, it must be at least 0")
        _require(self.batch_tokens >= 1, f"batch_tokens is {self.batch_tokens}, it must be at least 1")
        _require(
            (self.method == "explicit") == bool(self.taps),
            "taps go with the method 'explicit', and it with them",
        )
        fixed = len(self.taps) if self.taps else _FIXED_M.get(self.method)
        what = "--taps names" if self.method == "explicit" else f"{self.method} takes"
        _require(
            self.m is None or fixed is None or self.m == fixed,
            f"m is {self.m}, but {what} {fixed} tap{'s' if fixed != 1 else ''}; leave --m out",
        )

    def taps_wanted(self, blocks: int) -> int:
        """m for a model of `blocks` blocks. Raises ConfigError when it has fewer, or no such taps."""
        if self.taps:
            selection.explicit(self.taps, blocks)
        if self.method == "eagle3":
            selection.eagle3_taps(blocks)
        m = len(self.taps) or self.m or _FIXED_M.get(self.method, 1)
        _require(
            bool(self.taps) or m <= blocks,
            f"m is {m}, but the model has {blocks} blocks and as many taps to choose from; ask for fewer",
        )
        return m


class _Silent:
    def advance(self, n: float) -> None:
        """Nothing to show."""


@contextlib.contextmanager
def no_progress(description: str, total: float | None, unit: str) -> Iterator[Advance]:
    """A progress that shows nothing."""
    yield _Silent()


def no_note(text: str) -> None:
    """A note that goes nowhere."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
