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


def counted(selection: LayerSelection) -> str:
    """How the tokens read became kept positions, e.g. "29,078 tokens read; ...: 6,883 positions kept"."""
    found, kept = selection.settings, f"{selection.tokens:,} positions kept"
    if "tokens_read" not in found or "eligible_positions" not in found:
        return f"{kept} ({selection.keep:.0%} of each prompt)"
    skipped = max(found.get("skip", 0), found.get("template_prefix", 0))
    if found.get("text") == "answers":
        passed = "only those that predict an answer's tokens count"
    elif not skipped:
        passed = "all of them count"
    else:
        head = " (the chat template's own)" if found.get("template_prefix", 0) == skipped > 1 else ""
        passed = f"the first {skipped} of each prompt{head} do not count"
    share = "all of them" if selection.keep >= 1.0 else f"the least sure {selection.keep:.0%}"
    return (
        f"{found['tokens_read']:,} tokens read; {passed}, which leaves {found['eligible_positions']:,}; {share}: {kept}"
    )


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
