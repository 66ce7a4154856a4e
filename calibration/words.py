"""Numbers as the report and the terminal write them; "-" stands for what was not measured."""

import math
from collections.abc import Iterable
from typing import Any

from elsi_edge.artifacts import LayerSelection

NOTHING = "-"
GIVEN = "given with --taps"  # how taps are chosen that the user named


def method(selection: LayerSelection) -> str:
    """How a selection came about, for people."""
    return GIVEN if selection.method == "explicit" else selection.method


def number(value: Any, digits: int = 3) -> str:
    """A plain number with thousands separated, e.g. "5.325" or "18,204"."""
    return f"{value:,.{digits}f}" if _finite(value) else NOTHING


def whole(value: Any) -> str:
    """A count."""
    return number(value, 0)


def signed(value: Any, digits: int = 2) -> str:
    """A number with its sign, e.g. a correlation."""
    return f"{value:+.{digits}f}" if _finite(value) else NOTHING


def percent(value: Any, digits: int = 1) -> str:
    """A share as per cent."""
    return f"{value:.{digits}%}" if _finite(value) else NOTHING


def change(reduction: Any) -> str:
    """A reduction, 0..1, as the change it is: 0.484 is "-48.4%"."""
    return f"{-reduction:+.1%}" if _finite(reduction) else NOTHING


def listed(items: Iterable[Any]) -> str:
    """Items with commas, e.g. of taps."""
    return ", ".join(map(str, items)) or NOTHING


def span(ends: Iterable[Any]) -> str:
    """First and last of a run of taps, e.g. "6-23"."""
    first, last = ends
    return f"{first}-{last}" if first != last else str(first)


def seconds(value: Any) -> str:
    """A time, e.g. "9.8 s" or "12 min 4 s"."""
    if not _finite(value):
        return NOTHING
    return f"{value:.1f} s" if value < 100 else f"{value // 60:.0f} min {value % 60:.0f} s"


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
