"""Pictures of pairs of taps, and of the probe: see plots.py."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from elsi_edge.calibration import plot_style as style
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.plot_style import FloatArray, matrix, numbers

_AXES = (400.0, 235.0)  # points, about what the axes of the probe's picture measure
_DIGIT = (4.6, 6.5)  # points, width of a digit and height of a number, at the size of the labels
_APART = 2.5  # points, least between two numbers side by side
_POINT = 6.0  # points, diameter of a tap's mark
_ANGLES = tuple(np.radians((20, 340, 160, 200, 90, 270, 50, 310, 130, 230)))  # where a number may stand, best first
_CHOSEN_RING, _BEST_RING = 12.0, 16.0  # points


def cka_map(analysis: Analysis, axes: Any) -> None:
    """Likeness between all pairs of taps; compartments as squares along the diagonal."""
    from matplotlib.patches import Rectangle

    values = matrix(analysis.cka)
    low = np.floor(10 * float(np.nanmin(values))) / 10
    image = axes.imshow(values, origin="lower", cmap="viridis", vmin=min(0.9, low), vmax=1.0, interpolation="nearest")
    regions = style.compartments_of(analysis)
    for first, last in regions:
        side = last - first + 1
        square = Rectangle((first - 0.5, first - 0.5), side, side, fill=False, edgecolor="white", linewidth=2.2)
        axes.add_patch(square)
        axes.add_patch(
            Rectangle((first - 0.5, first - 0.5), side, side, fill=False, edgecolor=style.INK, linewidth=0.8)
        )
    eagle3 = style.eagle3_of(analysis.selection)
    if eagle3:
        axes.plot(
            eagle3, eagle3, "^", color="white", markeredgecolor=style.INK, linestyle="none", label="EAGLE-3's taps"
        )
    chosen = style.chosen_of(analysis.selection)
    if chosen:
        axes.plot(chosen, chosen, "o", fillstyle="none", color=style.VERMILLION, markersize=12, markeredgewidth=2.2,
                  linestyle="none", label="chosen")  # fmt: skip
    name = f"{analysis.cka_estimator} linear CKA, {analysis.cka_rows:,} positions"
    axes.figure.colorbar(image, ax=axes, label=name, shrink=0.9)
    axes.set_title("likeness of taps" + ("; squares: compartments" if regions else ""))
    _pair_axes(axes, len(values), "tap", "tap")


def partner_gains(analysis: Analysis, axes: Any) -> None:
    """Nats that a second tap (column) adds to a first one (row); a dot on the best partner of each row."""
    values = matrix(analysis.gains)
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, origin="lower", cmap="viridis", interpolation="nearest")
    axes.set_facecolor("white")
    axes.patch.set(hatch="////", edgecolor="#9a9a9a", linewidth=0.0)  # like no colour of the map
    seeds = [seed for seed in range(len(values)) if np.isfinite(values[seed]).any()]
    partners = [int(np.nanargmax(values[seed])) for seed in seeds]
    axes.plot(
        partners, seeds, "o", color="white", markeredgecolor=style.INK, markeredgewidth=0.7, linestyle="none",
        markersize=style.mark_size(len(values)) + 1, label="best partner of each seed",
    )  # fmt: skip
    axes.figure.colorbar(
        image, ax=axes, label=f"gain in joint entropy, nats ({analysis.gain_rows:,} positions)", shrink=0.9
    )
    axes.set_title("what a partner adds to a seed; hatched: not eligible")
    _pair_axes(axes, len(values), "partner (second tap)", "seed (first tap)")


def probe_against_entropy(analysis: Analysis, axes: Any) -> None:
    """Agreement of the ridge probe with the target against entropy, one point per tap, coloured by depth."""
    probe, selection = analysis.selection.probe, analysis.selection
    agreement, entropy = 100 * numbers(probe.get("agreement")), numbers(selection.entropy)
    taps = np.arange(min(len(agreement), len(entropy)))
    agreement, entropy = agreement[: len(taps)], entropy[: len(taps)]
    error = 100 * numbers([probe.get("standard_error")])[0]
    if np.isfinite(error):
        axes.errorbar(entropy, agreement, yerr=error, fmt="none", ecolor="#c9ced4", elinewidth=0.8, zorder=1)
    points = axes.scatter(entropy, agreement, c=taps, cmap="viridis", s=16 if len(taps) > 64 else 26, zorder=2)
    axes.figure.colorbar(points, ax=axes, label="tap", shrink=0.9)
    final = numbers([analysis.final_norm_entropy, probe.get("final_norm")])
    if np.isfinite(final).all():
        axes.plot(final[:1], 100 * final[1:], "s", color=style.GREY, markersize=5, label="after the final norm")
    _rings(axes, entropy, agreement, style.chosen_of(selection), _CHOSEN_RING, style.VERMILLION, "chosen")
    best = probe.get("best_tap")
    _rings(axes, entropy, agreement, () if best is None else (best,), _BEST_RING, style.BLUE, "probe's best")
    _levels(axes, probe)
    rings = dict.fromkeys(style.chosen_of(selection), _CHOSEN_RING + 1.6)
    rings |= {} if best is None else {best: _BEST_RING + 1.6}
    _label_points(axes, entropy, agreement, rings, {0, len(taps) - 1, best, *selection.taps})
    axes.set_xlabel("matrix entropy, nats")
    axes.set_ylabel("probe's top-1 agreement with the target, %")
    rho = numbers([probe.get("rank_correlation", {}).get(selection.settings.get("normalisation", "unit"))])[0]
    axes.set_title("probe against entropy" + (f"; rank correlation {rho:+.2f}" if np.isfinite(rho) else ""))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, markerscale=0.6)


def _rings(
    axes: Any, x: FloatArray, y: FloatArray, taps: tuple[int, ...], size: float, colour: str, label: str
) -> None:
    inside = [tap for tap in taps if tap < len(x)]
    if inside:
        axes.plot(x[inside], y[inside], "o", fillstyle="none", markersize=size, markeredgewidth=1.6, color=colour,
                  label=label, zorder=3)  # fmt: skip


def _levels(axes: Any, probe: Any) -> None:
    """Agreement without a tap, and of the EAGLE-3 triple, as level lines."""
    eagle3 = next((entry.get("agreement") for entry in probe.get("sets", ()) if entry.get("name") == "eagle3"), None)
    for value, line, label in ((probe.get("none"), ":", "no tap at all"), (eagle3, "--", "EAGLE-3's three taps")):
        if value is not None:
            axes.axhline(100 * value, color=style.GREY, linewidth=1.0, linestyle=line, label=label, zorder=0.5)


def _label_points(axes: Any, x: FloatArray, y: FloatArray, rings: Mapping[int, float], always: set[Any]) -> None:
    """Numbers beside the points, those of `always` first: where they touch no point, ring or other number, or not at
    all. rings: diameter, points, of the largest ring around a tap."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    seen = np.isfinite(x) & np.isfinite(y)
    # In points, as if the axes had the size that the legend and the colour bar leave them.
    across = np.where(seen, (x - left) / (right - left), 9.0) * _AXES[0]
    up = np.where(seen, (y - bottom) / (top - bottom), 9.0) * _AXES[1]
    radius = np.array([rings.get(tap, _POINT) / 2 for tap in range(len(x))])
    named: list[tuple[float, float, float, float]] = []  # left, bottom, right, top
    for tap in sorted(np.flatnonzero(seen).tolist(), key=lambda t: (t not in always, t)):
        width = _DIGIT[0] * len(str(tap))
        for angle in _ANGLES:
            away = radius[tap] + 1.5 + 0.5 * abs(width * np.cos(angle)) + 0.5 * abs(_DIGIT[1] * np.sin(angle))
            middle = across[tap] + away * np.cos(angle), up[tap] + away * np.sin(angle)
            box = (middle[0] - width / 2, middle[1] - _DIGIT[1] / 2, middle[0] + width / 2, middle[1] + _DIGIT[1] / 2)
            gap = across - np.clip(across, box[0], box[2]), up - np.clip(up, box[1], box[3])  # of each point to the box
            inside = min(box[:2]) > 0 and box[2] < _AXES[0] and box[3] < _AXES[1]
            free = inside and (np.hypot(*gap) >= radius).all()
            if free and not any(_touch(box, other) for other in named):
                named.append(box)
                axes.annotate(str(tap), (x[tap], y[tap]), xytext=(middle[0] - across[tap], middle[1] - up[tap]),
                              textcoords="offset points", ha="center", va="center", fontsize=7, zorder=4)  # fmt: skip
                break


def _touch(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] - _APART < other[2] and other[0] - _APART < one[2] and one[1] < other[3] and other[1] < one[3]


def _pair_axes(axes: Any, taps: int, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.5, taps - 0.5)
    axes.set_ylim(-0.5, taps - 0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
