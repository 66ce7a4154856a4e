"""Pictures of pairs of taps, and of the probe: see plots.py."""

from typing import Any

import numpy as np

from elsi_edge.calibration import plot_style as style
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.plot_style import FloatArray, matrix, numbers

_LABEL_WIDTH, _LABEL_HEIGHT = 0.04, 0.035  # of the axes, that a number beside a point takes


def cka_map(analysis: Analysis, axes: Any) -> None:
    """Likeness between all pairs of taps; compartments as squares along the diagonal."""
    from matplotlib.patches import Rectangle

    values = matrix(analysis.cka)
    low = np.floor(10 * float(np.nanmin(values))) / 10
    image = axes.imshow(values, origin="lower", cmap="viridis", vmin=min(0.9, low), vmax=1.0, interpolation="nearest")
    for first, last in analysis.selection.compartments:
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
    axes.set_title("likeness of taps; squares: compartments")
    _pair_axes(axes, len(values), "tap", "tap")


def partner_gains(analysis: Analysis, axes: Any) -> None:
    """Nats that a second tap (column) adds to a first one (row); a dot on the best partner of each row."""
    values = matrix(analysis.gains)
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, origin="lower", cmap="cividis", interpolation="nearest")
    axes.set_facecolor("#d9d9d9")
    seeds = [seed for seed in range(len(values)) if np.isfinite(values[seed]).any()]
    partners = [int(np.nanargmax(values[seed])) for seed in seeds]
    axes.plot(
        partners, seeds, "o", color="white", markeredgecolor=style.INK, markeredgewidth=0.7, linestyle="none",
        markersize=style.mark_size(len(values)) + 1, label="best partner of each seed",
    )  # fmt: skip
    axes.figure.colorbar(
        image, ax=axes, label=f"gain in joint entropy, nats ({analysis.gain_rows:,} positions)", shrink=0.9
    )
    axes.set_title("what a partner adds to a seed; grey: not eligible")
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
    _rings(axes, entropy, agreement, style.chosen_of(selection), 12, style.VERMILLION, "chosen")
    best = probe.get("best_tap")
    _rings(axes, entropy, agreement, () if best is None else (best,), 16, style.BLUE, "probe's best")
    _levels(axes, probe)
    _label_points(axes, entropy, agreement, {0, len(taps) - 1, best, *selection.taps})
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


def _label_points(axes: Any, x: FloatArray, y: FloatArray, always: set[Any]) -> None:
    """Numbers beside the points, those of `always` first; one that would cover another is left out."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    named: list[tuple[float, float]] = []
    for tap in sorted(range(len(x)), key=lambda t: (t not in always, t)):
        if not (np.isfinite(x[tap]) and np.isfinite(y[tap])):
            continue
        place = (x[tap] - left) / (right - left), (y[tap] - bottom) / (top - bottom)
        if all(abs(place[0] - u) > _LABEL_WIDTH or abs(place[1] - v) > _LABEL_HEIGHT for u, v in named):
            named.append(place)
            axes.annotate(str(tap), (x[tap], y[tap]), xytext=(4, 3), textcoords="offset points", fontsize=7, zorder=4)


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
