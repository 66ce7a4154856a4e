"""What the report's pictures share: colours, an axis of taps, numbers out of JSON-ready values."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.selection import EAGLE3_MIN_BLOCKS, eagle3_taps

FloatArray = NDArray[np.float64]

# Told apart by readers with any of the common colour blindnesses (Okabe and Ito 2008).
BLUE, VERMILLION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
PURPLE, SKY, GREY, LIGHT, INK = "#cc79a7", "#56b4e9", "#8a8a8a", "#eef1f4", "#222222"
SERIES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")

_CROWDED = 64  # taps from which marks are drawn small

RC = {
    "figure.facecolor": "white",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a model's name may hold a dollar sign
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "svg.hashsalt": "elsi-edge",  # else ids are drawn at random
    "svg.fonttype": "none",
}


def numbers(values: Iterable[Any] | None) -> FloatArray:
    """Values [n] as doubles, NaN where nothing was measured."""
    return np.array(
        [np.nan if value is None else float(value) for value in (() if values is None else values)], np.float64
    )


def matrix(rows: Sequence[Sequence[Any]]) -> FloatArray:
    """Rows [n, n] as doubles, NaN where nothing was measured."""
    return np.array([numbers(row) for row in rows], np.float64)


def measured(values: Iterable[Any] | None) -> bool:
    """Whether any value is a finite number."""
    return bool(np.isfinite(numbers(values)).any())


def eagle3_of(selection: LayerSelection) -> tuple[int, ...]:
    """EAGLE-3's taps in this target, none in a shallow one."""
    return eagle3_taps(selection.blocks) if selection.blocks >= EAGLE3_MIN_BLOCKS else ()


def chosen_of(selection: LayerSelection) -> tuple[int, ...]:
    """The chosen taps, none for the state after the final norm."""
    return selection.taps if selection.state == "residual" else ()


def mark_size(taps: int) -> float:
    """Points, of the marks on a curve over so many taps."""
    return 3.5 if taps <= _CROWDED else 1.8


def tap_axis(axes: Any, taps: int) -> None:
    """Label the x axis with taps 0..taps - 1."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.7, taps - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.set_xlabel("tap (residual stream entering block t; the last: leaving the last block)")


def eagle3_lines(axes: Any, analysis: Analysis) -> None:
    """EAGLE-3's taps as faint upright lines, one of them named for the legend."""
    for index, tap in enumerate(eagle3_of(analysis.selection)):
        label = "EAGLE-3's taps" if index == 0 else "_nolegend_"
        axes.axvline(tap, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.5, label=label)


def compartments_of(analysis: Analysis) -> tuple[tuple[int, ...], ...]:
    """Regions of like taps that are worth showing: none where there is one, or too few positions to tell them apart."""
    found = analysis.selection.compartments
    return found if len(found) > 1 and analysis.cka_rows >= analysis.selection.width else ()


def compartment_shades(axes: Any, analysis: Analysis) -> None:
    """Every second compartment in a light shade."""
    for index, (first, last) in enumerate(compartments_of(analysis)):
        if index % 2 == 0:
            label = "every second compartment" if index == 0 else "_nolegend_"
            axes.axvspan(first - 0.5, last + 0.5, color=LIGHT, linewidth=0, zorder=0, label=label)


def single_tap_pick(analysis: Analysis) -> bool:
    """Whether what single taps win is the selection itself, and not a set or another rule's tap."""
    last = analysis.settling[-1].tap if analysis.settling else None
    return chosen_of(analysis.selection) == (last,)
