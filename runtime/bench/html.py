"""A bench report as one HTML page that needs nothing beside it. Runs on the device, so without matplotlib."""

import importlib.resources
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elsi_edge.packaged import report_css

_PACKAGE, _PAGE = "elsi_edge.runtime.bench", "report.html.j2"
_WIDTH, _HEIGHT, _MARGIN = 640.0, 260.0, 46.0  # of a chart, user units


_SHARES = {"propose": "drafting", "verify": "the target's calls", "other": "the rest"}  # of a round's time


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a stacked bar."""

    name: str
    value: float
    percent: float  # of the bar


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve in a chart's own coordinates."""

    name: str
    points: str  # as SVG's polyline takes them
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one pair of axes that start at 0."""

    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]  # place, label
    y_ticks: tuple[tuple[float, str], ...]
    x_name: str
    y_name: str
    width: float = _WIDTH
    height: float = _HEIGHT
    margin: float = _MARGIN


def render(report: Mapping[str, Any]) -> str:
    """The page of a report as `bench --json` gives it."""
    import jinja2

    # Prompts, answers and names come from users and from models: all of them are escaped.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["figure"] = figure
    environment.filters["megabytes"] = megabytes
    page = environment.from_string(importlib.resources.files(_PACKAGE).joinpath(_PAGE).read_text(encoding="utf-8"))
    return page.render(
        css=report_css(),
        r=report,
        fastest=_fastest(report),
        shares=_parts({_SHARES[name]: share for name, share in (report.get("shares") or {}).items()}),
        memory=_memory(report.get("memory")),
        curve=_cost_curve(report),
        sustained=_sustained(report.get("sustained")),
        ratios=_ratios(report["prompts"]),
    )


def figure(value: float | None, digits: int = 2) -> str:
    """A number for people; a dash for one that there is not."""
    return "-" if value is None else f"{value:.{digits}f}"


def megabytes(value: float | None) -> str:
    """Bytes in decimal megabytes."""
    return "-" if value is None else f"{value / 1e6:.1f} MB"


def _fastest(report: Mapping[str, Any]) -> float:
    speeds = [c[name] or 0.0 for c in report["categories"].values() for name in ("tokens_per_s", "plain_tokens_per_s")]
    return max([*speeds, 1e-9])


def _parts(values: Mapping[str, float]) -> list[Part]:
    whole = sum(max(0.0, value) for value in values.values())
    if whole <= 0.0:
        return []
    return [Part(name=name, value=value, percent=100.0 * max(0.0, value) / whole) for name, value in values.items()]


def _memory(memory: Mapping[str, Any] | None) -> list[Part]:
    if memory is None:
        return []
    parts = {name: float(one["pss"]) for name, one in memory["components"].items()}
    parts["cache of 1,000 tokens"] = float(memory["cache_per_1000_tokens"]["pss"])
    return _parts(parts)


def _cost_curve(report: Mapping[str, Any]) -> Chart | None:
    roofline = report.get("roofline")
    if not roofline or len(roofline["verify"]) < 2:  # every call of a static bundle has the same rows
        return None
    rows = [point["rows"] for point in roofline["verify"]]
    lines = {"limit (memory or compute)": [point["limit_ms"] for point in roofline["verify"]]}
    if all(point.get("measured_ms") for point in roofline["verify"]):
        lines = {"measured": [point["measured_ms"] for point in roofline["verify"]], **lines}
    return chart(rows, lines, x_name="rows verified in one call", y_name="ms")


def _sustained(windows: Sequence[Mapping[str, Any]] | None) -> Chart | None:
    if not windows or len(windows) < 2:
        return None
    return chart(
        [window["until_s"] for window in windows],
        {
            "speculative": [window["tokens_per_s"] or 0.0 for window in windows],
            "plain": [window["plain_tokens_per_s"] or 0.0 for window in windows],
        },
        x_name="seconds",
        y_name="tokens/s",
    )


def _ratios(answers: Sequence[Mapping[str, Any]]) -> Chart | None:
    found = sorted(answer["speedup"] for answer in answers if answer["speedup"] is not None)
    if len(found) < 2:
        return None
    places = [float(place) for place in range(1, len(found) + 1)]
    lines = {"speculative over plain": found, "no gain": [1.0] * len(found)}
    right = 4.0 * math.ceil(len(found) / 4)  # so that the ticks are whole answers
    return chart(places, lines, x_name="answers, slowest first", y_name="speed-up", right=right)


def chart(
    xs: Sequence[float], lines: Mapping[str, Sequence[float]], *, x_name: str, y_name: str, right: float = 0.0
) -> Chart:
    """Curves over common places; both axes start at 0, and that of places ends at `right` where one is given."""
    right, top = right or _round_up(max(xs)), _round_up(max(max(values) for values in lines.values()) or 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (_WIDTH - 2 * _MARGIN) * x / right, (_HEIGHT - 2 * _MARGIN) * y / top
        return round(_MARGIN + across, 1), round(_HEIGHT - _MARGIN - up, 1)

    drawn = []
    for name, values in lines.items():
        dots = tuple(at(x, y) for x, y in zip(xs, values, strict=True))
        drawn.append(Line(name=name, points=" ".join(f"{x},{y}" for x, y in dots), dots=dots))
    steps = [part / 4 for part in range(5)]
    return Chart(
        lines=tuple(drawn),
        x_ticks=tuple((at(right * step, 0.0)[0], f"{right * step:.3g}") for step in steps),
        y_ticks=tuple((at(0.0, top * step)[1], f"{top * step:.3g}") for step in steps),
        x_name=x_name,
        y_name=y_name,
    )


def _round_up(value: float) -> float:
    """The next number that cut into four gives labels one likes to read."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if value <= step * power)
