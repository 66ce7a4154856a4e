"""The report's pictures: one function each, drawing an `Analysis` into matplotlib axes. Same analysis, same bytes."""

import importlib.util
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elsi_edge import fsio
from elsi_edge.artifacts import LayerSelection
from elsi_edge.calibration import plot_style as style
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.plot_style import measured, numbers
from elsi_edge.calibration.plots_maps import cka_map, partner_gains, probe_against_entropy
from elsi_edge.calibration.words import method
from elsi_edge.errors import MissingExtraError

Draw = Callable[[Analysis, Any], None]

_DPI = 150
_WIDTH = 7.0  # inches
_TOP_TAPS = 5  # curves of the settling picture, beside those that were ever picked
_LOG_FROM = 30.0  # ratio of the largest to the smallest value from which an axis is logarithmic
_NAMED_WINS = 0.02  # share from which a bar carries its number
_LABEL_ROOM = 0.035  # of the axis, that such a number takes


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture: how it is drawn, how tall, and whether an analysis has what it shows."""

    draw: Draw
    height: float  # inches
    shown: Callable[[Analysis], bool]


def draw_wave(selection: LayerSelection, axes: Any, final_norm: float | None) -> None:
    """Matrix entropy by tap; intervals, where measured, as a band."""
    entropy = numbers(selection.entropy)
    taps = np.arange(len(entropy))
    size = style.mark_size(len(taps))
    if len(selection.entropy_interval) == len(taps):
        low, high = (numbers(bound[side] for bound in selection.entropy_interval) for side in (0, 1))
        axes.fill_between(
            taps[1:], low[1:], high[1:], color=style.BLUE, alpha=0.2, linewidth=0, label="95 % interval over prompts"
        )
        axes.plot(taps[[0, 0]], [low[0], high[0]], color=style.GREY, linewidth=1.5)
    axes.plot(taps[1:], entropy[1:], marker="o", markersize=size, linewidth=1.3, color=style.BLUE, label="taps 1 to L")
    axes.plot(taps[:1], entropy[:1], "o", color=style.GREY, markersize=4, label="tap 0, not eligible")
    if final_norm is not None and np.isfinite(final_norm):
        axes.plot(taps[-1:], [final_norm], "s", color=style.GREY, markersize=4.5, label="after the final norm")
    at = [(tap, entropy[tap]) for tap in style.chosen_of(selection)]
    if selection.state == "final-norm" and final_norm is not None:
        at = [(taps[-1], final_norm)]
    if at:
        axes.plot(*zip(*at, strict=True), "o", color=style.VERMILLION, markersize=10, markeredgewidth=1.8,
                  fillstyle="none", label="chosen")  # fmt: skip
    style.tap_axis(axes, len(taps))
    axes.set_ylabel("matrix entropy, nats")


def entropy_wave(analysis: Analysis, axes: Any) -> None:
    """The wave with intervals, compartments, EAGLE-3's taps and the pick."""
    selection = analysis.selection
    style.compartment_shades(axes, analysis)
    style.eagle3_lines(axes, analysis)
    draw_wave(selection, axes, analysis.final_norm_entropy)
    axes.set_title(f"{method(selection)}: {selection.describe()}")
    _legend_below(axes)


def normalisations(analysis: Analysis, axes: Any) -> None:
    """The same states measured three ways; a circle where each would pick."""
    looks = {"unit": ("-", "unit: rows scaled, then centred"), "centered": ("--", "centered: not scaled, centred"),
             "raw": (":", "raw: neither scaled nor centred")}  # fmt: skip
    curves = {name: numbers(analysis.normalisations[name]) for name in looks if name in analysis.normalisations}
    count, top, size = 1, 0.0, 9.0
    for (name, entropy), colour, mark in zip(curves.items(), style.SERIES, style.MARKERS, strict=False):
        if not measured(entropy):
            continue
        count, top = len(entropy), max(top, float(np.nanmax(entropy)))
        line, label = looks[name]
        if measured(entropy[1:]):  # its number stands in the legend: beside the circle it would lie on other curves
            peak = 1 + int(np.nanargmax(entropy[1:]))
            axes.plot([peak], [entropy[peak]], "o", color=colour, markersize=size, markeredgewidth=1.5,
                      fillstyle="none")  # fmt: skip
            label += f"\nhighest at tap {peak}"
            size += 5.0  # where curves share their highest tap the circles lie around each other
        axes.plot(range(count), entropy, linestyle=line, marker=mark, markersize=style.mark_size(count) - 0.5,
                  color=colour, linewidth=1.4, label=label)  # fmt: skip
    style.tap_axis(axes, count)
    axes.set_ylim(0.0, 1.1 * top or 1.0)
    axes.set_ylabel("matrix entropy, nats")
    axes.set_title("the same states under three normalisations; circles: each one's highest tap")
    _legend_below(axes)


def variance(analysis: Analysis, axes: Any) -> None:
    """Variance of a tap's entropy between prompts: all positions, those kept, and as many at random."""
    found = analysis.selection.variance
    looks = {"unfiltered": ("-", style.GREY, "all positions (circles)"),
             "filtered": ("-", style.BLUE, "kept by the filter (squares)"),
             "random": ("--", style.ORANGE, "as many at random (triangles)")}  # fmt: skip
    count = 1
    for (name, (line, colour, label)), mark in zip(looks.items(), style.MARKERS, strict=False):
        values = numbers(found.get("by_tap", {}).get(name))
        if measured(values):
            count = len(values)
            axes.plot(range(count), values, linestyle=line, marker=mark, color=colour, label=label, linewidth=1.3,
                      markersize=style.mark_size(count))  # fmt: skip
    everything = np.concatenate([numbers(values) for values in found.get("by_tap", {}).values()] or [numbers(())])
    everything = everything[np.isfinite(everything)]
    if len(everything) and everything.min() > 0 and everything.max() > _LOG_FROM * everything.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(0.0, None)
    for index, band in enumerate(found.get("bands", ())):
        first, last = band["taps"]
        if index % 2 == 0:
            axes.axvspan(first - 0.5, last + 0.5, color=style.LIGHT, linewidth=0, zorder=0)
        values = numbers(band.get(key) for key in ("reduction", "reduction_random", "paper"))
        words = [f"{band['name']} {first}-{last}"]
        words += [f"{what} {-v:+.0%}" for what, v in zip(("filter", "random", "(paper"), values, strict=True) if v == v]
        words[-1] += ")" if words[-1].startswith("(") else ""
        axes.text((first + last) / 2, 1.0, "\n".join(words), transform=axes.get_xaxis_transform(), ha="center",
                  va="bottom", fontsize=8, linespacing=1.3)  # fmt: skip
    style.tap_axis(axes, count)
    axes.set_ylabel("variance between prompts, nats²")
    _legend_below(axes)


def settling(analysis: Analysis, axes: Any) -> None:
    """Entropy of the leading taps as prompts are added; above, what would have been picked, and how firmly."""
    steps = analysis.settling
    tokens = numbers(step.tokens for step in steps)
    last = numbers(steps[-1].entropy)
    ranked = [int(tap) for tap in np.argsort(-np.nan_to_num(last, nan=-np.inf), kind="stable") if tap != 0]
    picked = sorted({step.tap for step in steps}, key=ranked.index)
    shown = picked[: len(style.SERIES)]
    shown += [tap for tap in ranked if tap not in shown][: max(0, _TOP_TAPS - len(shown))]
    for tap, colour, mark in zip(shown, style.SERIES, style.MARKERS, strict=False):
        curve = numbers(step.entropy[tap] for step in steps)
        axes.plot(tokens, curve, marker=mark, markersize=3, linewidth=1.3, color=colour, label=f"tap {tap}")
    best = numbers(step.entropy[step.tap] for step in steps)
    axes.plot(tokens, best, "o", color=style.INK, markersize=9, fillstyle="none", label="picked so far")
    spread = len(tokens) > 1 and tokens.min() > 0 and tokens.max() > 8 * tokens.min()
    if spread:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_thousands)
        axes.xaxis.set_minor_formatter(_nothing)
        axes.set_xticks(tokens.tolist() if len(tokens) <= 8 else tokens[:: len(tokens) // 6].tolist(), minor=False)
    else:
        axes.xaxis.set_major_formatter(_thousands)
    axes.margins(x=0.06)
    _settling_words(steps, np.log(tokens) if spread else tokens, axes)
    pick = "pick" if style.single_tap_pick(analysis) else "pick among single taps"
    axes.set_title(f"the {pick}, and the share of resamples that it wins", pad=30)
    axes.set_xlabel("positions kept" + (" (logarithmic)" if spread else ""))
    axes.set_ylabel("matrix entropy, nats")
    _legend_below(axes)


def _settling_words(steps: tuple[Any, ...], places: Any, axes: Any) -> None:
    """The pick and its win share over each step, left out where they would touch the next; the last always stands."""
    room = 0.075 * float(np.ptp(places) or 1.0)
    kept: list[int] = []
    for index in range(len(steps) - 1, -1, -1):
        if not kept or places[kept[-1]] - places[index] >= room:
            kept.append(index)
    for index in kept:
        step = steps[index]
        share = numbers([step.win_share])[0]
        words = f"tap {step.tap}\n" + (f"{share:.0%}" if np.isfinite(share) else "-")
        axes.text(step.tokens, 1.02, words, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)


def wins(analysis: Analysis, axes: Any) -> None:
    """How often each tap is the highest when prompts are drawn again."""
    from matplotlib.patches import Patch

    stability = analysis.selection.stability
    shares = np.nan_to_num(numbers(stability["wins"]))
    chosen = style.chosen_of(analysis.selection)
    chosen = chosen if len(chosen) == 1 else ()  # members of a set need not win by themselves
    bars = axes.bar(range(len(shares)), 100 * shares, color=style.BLUE, width=0.8)
    for tap in chosen:
        bars[tap].set(color=style.VERMILLION)
    room = max(1, round(_LABEL_ROOM * len(shares)))
    for tap in np.flatnonzero(shares >= _NAMED_WINS).tolist():  # a number where no higher bar stands in its way
        if tap == np.argmax(np.where(np.abs(np.arange(len(shares)) - tap) <= room, shares, -1.0)):
            axes.text(tap, 100 * shares[tap], f"{tap}\n{shares[tap]:.0%}", ha="center", va="bottom", fontsize=8)
    style.tap_axis(axes, len(shares))
    axes.set_ylim(0, max(5.0, 130 * float(shares.max(initial=0.0))))
    axes.set_ylabel("resamples won, %")
    single = style.single_tap_pick(analysis)
    axes.set_title(("" if single else "single taps: ") + f"{stability.get('resamples', 0):,} resamples of the prompts")
    if chosen:
        names = (style.VERMILLION, "chosen"), (style.BLUE, "others")
        axes.legend(handles=[Patch(color=colour, label=label) for colour, label in names], loc="best")


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}"


def _nothing(value: float, _: int) -> str:
    return ""


def _legend_below(axes: Any) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _has_cka(analysis: Analysis) -> bool:
    return any(measured(row) for row in analysis.cka)


def _has_gains(analysis: Analysis) -> bool:
    return any(measured(row) for row in analysis.gains)


FIGURES: Mapping[str, Picture] = {
    "entropy-wave": Picture(draw=entropy_wave, height=4.0, shown=lambda a: measured(a.selection.entropy)),
    "wins": Picture(draw=wins, height=2.8, shown=lambda a: measured(a.selection.stability.get("wins"))),
    "settling": Picture(draw=settling, height=3.8, shown=lambda a: len(a.settling) > 1),
    "probe": Picture(
        draw=probe_against_entropy,
        height=4.6,
        shown=lambda a: measured(a.selection.probe.get("agreement")) and measured(a.selection.entropy),
    ),
    "variance": Picture(
        draw=variance,
        height=3.9,
        shown=lambda a: any(measured(row) for row in a.selection.variance.get("by_tap", {}).values()),
    ),
    "cka": Picture(draw=cka_map, height=5.6, shown=_has_cka),
    "partner-gains": Picture(draw=partner_gains, height=5.6, shown=_has_gains),
    "normalisations": Picture(
        draw=normalisations, height=3.9, shown=lambda a: any(map(measured, a.normalisations.values()))
    ),
}
"""Pictures by name, in the report's order."""


def picture(draw: Callable[[Any], None], *, height: float, kind: str = "png") -> bytes:
    """A PNG or SVG file, 7 inches wide, of what `draw` puts into its axes; the user's matplotlibrc changes nothing.

    Raises MissingExtraError where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("drawing", extra="build", module="matplotlib")
    from matplotlib import rc_context
    from matplotlib import style as sheets
    from matplotlib.figure import Figure

    with sheets.context("default", after_reset=True), rc_context(style.RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # of a model's name: drawn as a box
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.subplots())
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
    return buffer.getvalue() if kind == "svg" else _fewer_colours(buffer)


def _fewer_colours(png: io.BytesIO) -> bytes:
    """A PNG with a palette of 256 colours: a third of the size, no channel off by more than eyes can tell."""
    from PIL import Image  # matplotlib's own way of writing a PNG

    buffer = io.BytesIO()
    colours = Image.open(png).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colours.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def pictures(analysis: Analysis) -> dict[str, bytes]:
    """PNG files by name, of every picture that the analysis has the numbers for. Raises MissingExtraError."""
    return {
        name: picture(lambda axes, spec=spec: spec.draw(analysis, axes), height=spec.height)  # type: ignore[misc]
        for name, spec in FIGURES.items()
        if spec.shown(analysis)
    }


def save_plots(analysis: Analysis, directory: Path) -> dict[str, Path]:
    """Write the pictures into `directory` as NAME.png; paths by name. The same analysis gives the same files.

    A picture of an earlier run that this analysis does not have is removed, so that a directory shows one run.
    Raises StorageError, MissingExtraError.
    """
    return write_pictures(pictures(analysis), directory)


def write_pictures(files: Mapping[str, bytes], directory: Path) -> dict[str, Path]:
    """Write what `pictures` made (see `save_plots`)."""
    paths = {name: directory / f"{name}.png" for name in FIGURES}
    for name, path in paths.items():
        if name in files:
            fsio.write_bytes(path, files[name])
        else:
            with fsio.storage_errors(path):
                path.unlink(missing_ok=True)
    return {name: paths[name] for name in files}
