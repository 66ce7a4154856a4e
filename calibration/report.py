"""The report of a calibration: one HTML page that needs nothing beside it, its pictures as PNG, all numbers as JSON."""

import base64
import importlib.resources
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elsi_edge import fsio
from elsi_edge.calibration import plot_style as style
from elsi_edge.calibration import plots
from elsi_edge.calibration import report_tables as tables
from elsi_edge.calibration.analysis import Analysis
from elsi_edge.calibration.plot_style import numbers
from elsi_edge.calibration.words import GIVEN, listed, number, percent, span, whole
from elsi_edge.packaged import report_css

REPORT = "report.html"
NUMBERS = "calibration.json"

CONTENTS = (
    ("glance", "At a glance"),
    ("wave", "Entropy wave"),
    ("rules", "Rules"),
    ("stability", "Stability"),
    ("probe", "Probe"),
    ("filter", "Token filter"),
    ("cka", "Compartments"),
    ("partners", "Partners"),
    ("normalisations", "Normalisations"),
    ("method", "How it was measured"),
)
SOURCES = (
    ("ELSI, the rule and the bands of the token filter: Goel et al. 2026", ""),
    ("EAGLE-3 and its three taps: Li et al. 2025", "https://arxiv.org/abs/2503.01840"),
    ("Matrix entropy: Giraldo, Rao and Principe 2014", "https://arxiv.org/abs/1211.2459"),
    ("Matrix entropy over the layers of language models: Skean et al. 2025", "https://arxiv.org/abs/2502.02013"),
    ("CKA: Kornblith et al. 2019", "https://arxiv.org/abs/1905.00414"),
    ("Unbiased HSIC: Song et al. 2012", "https://jmlr.org/papers/v13/song12a.html"),
    ("Massive activations: Sun et al. 2024", "https://arxiv.org/abs/2402.17762"),
)


@dataclass(frozen=True, kw_only=True)
class Inlined:
    """A picture inside the page."""

    source: str  # a data: address
    width: int  # pixels
    height: int
    alt: str
    numbers: tables.Table


def write_report(analysis: Analysis, directory: Path) -> Path:
    """Write report.html, its pictures as NAME.png and calibration.json into `directory`; the path of the page.

    Each file is written beside and renamed, the page last. The same analysis gives the same files.
    Raises StorageError, MissingExtraError where matplotlib is not installed.
    """
    files = plots.pictures(analysis)
    page = render(analysis, files)
    plots.write_pictures(files, directory)
    fsio.write_json(directory / NUMBERS, analysis.to_json())
    fsio.write_text(directory / REPORT, page)
    return directory / REPORT


def render(analysis: Analysis, files: Mapping[str, bytes]) -> str:
    """The page, from an analysis and its pictures (PNG files by name, as `plots.pictures` makes them)."""
    import jinja2

    # Model names, paths and warnings come from users and from files: all of them are escaped.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False, keep_trailing_newline=True
    )
    page = environment.from_string(_resource("report.html.j2"))
    return page.render(**_context(analysis, files))


def _resource(name: str) -> str:
    return importlib.resources.files("elsi_edge.calibration").joinpath(name).read_text(encoding="utf-8")


def _context(analysis: Analysis, files: Mapping[str, bytes]) -> dict[str, Any]:
    selection = analysis.selection
    probe, variance, stability = selection.probe, selection.variance, selection.stability
    return {
        "title": f"Calibration of {selection.model or 'a model'}",
        "css": report_css(),
        "pick": pick(analysis),
        "verdict": analysis.verdict,
        "contents": CONTENTS,
        "warnings": selection.settings.get("warnings") or (),
        "figures": _figures(analysis, files),
        "tables": {
            "glance": tables.glance(analysis),
            "rules": tables.rules(analysis),
            "sets": tables.winning_sets(analysis),
            "probe_sets": tables.probe_sets(analysis),
            "correlations": tables.correlations(analysis),
            "bands": tables.bands(analysis),
            "order": tables.order(analysis),
            "compartments": tables.compartments(analysis),
            "searches": tables.searches(analysis),
            "sweep": tables.sweep(analysis),
            "settings": tables.settings(analysis),
        },
        "has_compartments": bool(style.compartments_of(analysis)),
        "single_taps": bool(analysis.settling) and not style.single_tap_pick(analysis),
        "set_score": "joint entropy less the CKA penalty" if selection.method == "elsi-c" else "joint entropy",
        "searches": search_words(analysis),
        "best_pair": best_pair(analysis),
        "positions": whole(selection.tokens),
        "last_tap": selection.blocks,
        "stability": {"text": stability.get("text", ""), "stable": stability.get("stable")} if stability else None,
        "probe": {"text": probe.get("text", ""), "flagged": probe.get("flagged")} if probe.get("agreement") else None,
        "no_probe": probe.get("text", "The probe is not part of this run."),
        "probe_rows": (
            whole(probe.get("fit_rows")),
            whole(probe.get("rows")),
            whole(probe.get("vocabulary")),
            percent(probe.get("standard_error")),
        ),
        "variance": {"text": variance.get("text", "")} if variance else None,
        "variance_prompts": whole(variance.get("prompts")),
        "cka_rows": whole(analysis.cka_rows),
        "gain_rows": whole(analysis.gain_rows),
        "cka_change": number(analysis.cka_change),
        "region_words": region_words(analysis),
        "sources": SOURCES,
    }


def pick(analysis: Analysis) -> str:
    """The choice in one sentence."""
    selection = analysis.selection
    words = f"{selection.describe()}, chosen by {selection.method} with m = {selection.m}"
    if selection.method == "explicit":
        words = f"{selection.describe()}, {GIVEN}"
    value = numbers([selection.joint_entropy])[0]
    if np.isfinite(value):
        words += (
            f": {number(value)} nats of {'joint ' if selection.m > 1 else ''}matrix entropy, about "
            f"{whole(float(np.exp(value)))} directions of {selection.m * selection.width:,}"
        )
    return words[0].upper() + words[1:]


def search_words(analysis: Analysis) -> tuple[str, str]:
    """A heading for the sets that were searched, and what they say about the choice that was made."""
    selection = analysis.selection
    grown = "Sets are grown one tap at a time from every seed (greedy)."
    if selection.method == "elsi" and selection.m > 1:
        words = "Measuring all sets, or the most promising ones, says how much that leaves on the table."
        return "Greedy against the best", f"{grown} {words}"
    looked = " and ".join(f"{found.compared:,} of the {found.total:,} sets of {found.m}" for found in analysis.searches)
    if selection.m == 1:
        why = "At m = 1 there is nothing to compare: every tap is measured, so that greedy and best are the same."
    else:
        why = "These go by joint entropy alone, and the chosen set does not come from among them."
    return "Sets of more taps" if selection.m == 1 else "Sets by joint entropy alone", (
        f"{why} A quick search looked at {looked}, the most promising on fewer positions: a hint at what more taps "
        "hold, not the best there is (--method elsi with --m searches)."
    )


def best_pair(analysis: Analysis) -> str:
    """The pair with most in it, which the largest gain need not be: a poor seed gains most."""
    found = next((found for found in analysis.searches if found.m == 2), None)
    if found is None:
        return ""
    most = "highest joint entropy of the pairs measured on all positions"
    return f"{most}: taps {listed(found.best)}, {number(found.best_entropy)} nats"


def region_words(analysis: Analysis) -> str:
    """How many compartments there are, and which of them EAGLE-3's taps fall in."""
    selection = analysis.selection
    if not selection.compartments:
        return ""
    if not style.compartments_of(analysis):
        if analysis.cka_rows < selection.width:
            return (
                f"{analysis.cka_rows} positions are fewer than the width {selection.width}: too few to tell "
                "compartments apart."
            )
        return "All taps form one compartment, so that none is set apart."
    taps = style.eagle3_of(selection)
    if not taps:
        return f"With {selection.blocks} blocks the model is too shallow for EAGLE-3's three taps."
    where = [
        next((i + 1 for i, (first, last) in enumerate(selection.compartments) if first <= tap <= last), None)
        for tap in taps
    ]
    regions = sorted({region for region in where if region is not None})
    if len(regions) == 1:
        return f"EAGLE-3's taps {listed(taps)} all fall in compartment {regions[0]}."
    missed = len(selection.compartments) - len(regions)
    words = f"EAGLE-3's taps {listed(taps)} fall in compartments {listed(where)}"
    return words + (
        f", {missed} of {len(selection.compartments)} are left out." if missed else ", so none is left out."
    )


def _figures(analysis: Analysis, files: Mapping[str, bytes]) -> dict[str, Inlined]:
    details = {
        "entropy-wave": tables.wave,
        "wins": tables.wins,
        "settling": tables.settling,
        "probe": tables.probe,
        "variance": tables.variance,
        "cka": lambda a: tables.pairs(a.cka, "tap"),
        "partner-gains": lambda a: tables.pairs(a.gains, "seed"),
        "normalisations": tables.normalisations,
    }
    found = {}
    for name, data in files.items():
        width, height = struct.unpack(">II", data[16:24])  # of the PNG header
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        found[name] = Inlined(
            source=source, width=width, height=height, alt=_alt(analysis, name), numbers=details[name](analysis)
        )
    return found


def _alt(analysis: Analysis, name: str) -> str:
    """A picture in words, for those who cannot see it."""
    selection = analysis.selection
    if name == "entropy-wave":
        low, high = _extremes(selection.entropy)
        words = f"Curve of matrix entropy over taps 0 to {selection.blocks}: lowest {low}, highest {high}"
        return f"{words}. {pick(analysis)}."
    if name == "wins":
        wins = selection.stability["wins"]
        return f"Bars of the share of resamples won by each single tap: most often {_extremes(wins, as_share=True)[1]}."
    if name == "settling":
        steps = ", ".join(f"tap {step.tap} at {step.tokens:,}" for step in analysis.settling)
        return f"Curves of the leading taps' entropy against kept positions; picked: {steps}."
    if name == "probe":
        low, high = _extremes(selection.probe["agreement"], as_share=True)
        return f"Scatter of the probe's agreement against entropy, a point per tap: lowest {low}, highest {high}."
    if name == "variance":
        return "Curves of the variance of entropy between prompts by tap, for all positions, filtered and random ones."
    if name == "cka":
        regions = "; ".join(span(ends) for ends in style.compartments_of(analysis)) or "none"
        return f"Map of CKA between all pairs of taps; compartments: {regions}."
    if name == "partner-gains":
        words = "Map of the gain in joint entropy, a row per seed and a column per partner"
        pair = best_pair(analysis)
        return f"{words}. {pair[0].upper()}{pair[1:]}." if pair else f"{words}, a dot on the best partner of each seed."
    peaks = "; ".join(f"{name} {_extremes(values)[1]}" for name, values in analysis.normalisations.items())
    return f"Curves of matrix entropy by tap under each normalisation; highest: {peaks}."


def _extremes(values: Any, *, as_share: bool = False) -> tuple[str, str]:
    """Lowest and highest entry of a row by tap, in words."""
    found = numbers(values)
    if not np.isfinite(found).any():
        return "-", "-"
    places = int(np.nanargmin(found)), int(np.nanargmax(found))
    low, high = (f"{percent(found[tap]) if as_share else number(found[tap]) + ' nats'} at tap {tap}" for tap in places)
    return low, high
