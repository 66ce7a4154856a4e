"""The report's tables: every number behind a picture or a sentence, as rows of text."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elsi_edge.calibration import plot_style as style
from elsi_edge.calibration.analysis import Analysis, RuleResult
from elsi_edge.calibration.plot_style import matrix, numbers
from elsi_edge.calibration.words import change, counted, listed, method, number, percent, seconds, signed, span, whole

_ELSEWHERE = ("warnings", "cka_weight_sweep")  # settings that stand in a place of their own


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under a heading; the first cell names its row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()  # rows to set off: what was chosen


def glance(analysis: Analysis) -> Table:
    """What was measured on what, and what it cost."""
    selection, settings = analysis.selection, analysis.selection.settings
    text = {"prompts": "the prompts alone", "answers": "the prompts and the target's own answers"}
    parts = {name: value for name, value in analysis.cost.items() if not name.endswith("bytes")}
    total = parts.pop("total", None) if "total" in parts else sum(parts.values()) if parts else None
    detail = ", ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in parts.items())
    rows = [
        ("model", selection.model or "-"),
        ("blocks and width", f"{selection.blocks} blocks, so taps 0 to {selection.blocks}; width {selection.width:,}"),
        ("prompts", whole(selection.prompts)),
        ("text measured", text.get(settings.get("text", ""), str(settings.get("text", "-")))),
        ("positions kept", counted(selection)),
        ("normalisation", str(settings.get("normalisation", "-"))),
        ("draft's projection", _projection(selection.m, selection.width)),
        ("time", seconds(total) + (f" ({detail})" if detail else "")),
        ("memory beside the model", _megabytes(analysis.cost.get("memory_bytes"))),
    ]
    return Table(head=("", ""), rows=tuple(rows))


def wave(analysis: Analysis) -> Table:
    """Entropy by tap with its interval and as an effective number of directions."""
    selection = analysis.selection
    entropy, intervals = numbers(selection.entropy), selection.entropy_interval
    rows = []
    for tap, value in enumerate(entropy):
        ends = [number(end) for end in intervals[tap]] if tap < len(intervals) else ["-", "-"]
        rows.append((str(tap), number(value), *ends, whole(math.exp(value)) if np.isfinite(value) else "-"))
    final = numbers([analysis.final_norm_entropy])[0]
    rows.append(("after the final norm", number(final), "-", "-", whole(math.exp(final)) if final == final else "-"))
    marked = set(selection.taps) if selection.state == "residual" else {len(rows) - 1}
    return Table(
        head=("tap", "entropy, nats", "95 % from", "to", "effective directions"),
        rows=tuple(rows),
        marked=frozenset(marked),
    )


def rules(analysis: Analysis) -> Table:
    """Every rule's taps and what they are worth."""
    width = analysis.selection.width
    rows = [
        (
            rule.name,
            _rule_taps(rule),
            str(len(rule.taps)),
            number(rule.joint_entropy),
            number(rule.mean_cka) if len(rule.taps) > 1 else "-",
            percent(rule.probe),
            _projection(len(rule.taps), width),
        )
        for rule in analysis.rules
    ]
    return Table(
        head=("rule", "taps", "m", "joint entropy, nats", "mean CKA", "probe agreement", "projection"),
        rows=tuple(rows),
        marked=frozenset(index for index, rule in enumerate(analysis.rules) if rule.chosen),
    )


def wins(analysis: Analysis) -> Table:
    """Single taps that ever win a resample, most often first."""
    shares = np.nan_to_num(numbers(analysis.selection.stability.get("wins")))
    order = [int(tap) for tap in np.argsort(-shares, kind="stable") if shares[tap] > 0]
    chosen = style.chosen_of(analysis.selection)
    return Table(
        head=("single tap", "resamples won"),
        rows=tuple((str(tap), percent(shares[tap])) for tap in order),
        marked=frozenset(index for index, tap in enumerate(order) if chosen == (tap,)),
    )


def winning_sets(analysis: Analysis) -> Table:
    """Sets of taps that win resamples."""
    sets = analysis.selection.stability.get("sets", ())
    return Table(
        head=("set of taps", "resamples won"),
        rows=tuple((listed(entry["taps"]), percent(entry.get("share"))) for entry in sets),
        marked=_chosen_sets(analysis, [entry["taps"] for entry in sets]),
    )


def settling(analysis: Analysis) -> Table:
    """The pick after the first so many prompts."""
    rows = [
        (
            whole(step.prompts),
            whole(step.tokens),
            str(step.tap),
            number(step.entropy[step.tap] if step.tap < len(step.entropy) else None),
            percent(step.win_share),
        )
        for step in analysis.settling
    ]
    return Table(
        head=("prompts", "positions kept", "pick: single tap", "its entropy, nats", "resamples won"), rows=tuple(rows)
    )


def probe(analysis: Analysis) -> Table:
    """Agreement of the probe by tap, beside the tap's entropy."""
    found, selection = analysis.selection.probe, analysis.selection
    entropy = [*selection.entropy, *[None] * len(found.get("agreement", ()))]
    rows = [("none", "-", percent(found.get("none")))]
    rows += [
        (str(tap), number(value), percent(share))
        for tap, (value, share) in enumerate(zip(entropy, found.get("agreement", ()), strict=False))
    ]
    rows.append(("after the final norm", number(analysis.final_norm_entropy), percent(found.get("final_norm"))))
    marked = {tap + 1 for tap in style.chosen_of(selection)}
    return Table(head=("tap", "entropy, nats", "agreement"), rows=tuple(rows), marked=frozenset(marked))


def probe_sets(analysis: Analysis) -> Table:
    """Agreement of the probe on sets, without any tap, and on its best tap."""
    found = analysis.selection.probe
    sets = found.get("sets", ())
    rows = [(str(entry["name"]), listed(entry["taps"]), percent(entry.get("agreement"))) for entry in sets]
    agreement, best = found.get("agreement", ()), found.get("best_tap")
    if best is not None and best < len(agreement):
        rows.append(("the probe's best single tap", str(best), percent(agreement[best])))
    rows.append(("no tap at all", "-", percent(found.get("none"))))
    marked = _chosen_sets(analysis, [entry["taps"] for entry in sets])
    return Table(head=("set", "taps", "agreement"), rows=tuple(rows), marked=marked)


def correlations(analysis: Analysis) -> Table:
    """Rank correlation of entropy and probe, by normalisation."""
    found = analysis.selection.probe.get("rank_correlation", {})
    used = analysis.selection.settings.get("normalisation")
    return Table(
        head=("normalisation", "rank correlation with the probe"),
        rows=tuple((str(name), signed(rho)) for name, rho in found.items()),
        marked=frozenset(index for index, name in enumerate(found) if name == used),
    )


def bands(analysis: Analysis) -> Table:
    """What the filter does to the variance between prompts, beside the paper's numbers."""
    rows = [
        (
            str(band["name"]),
            span(band["taps"]),
            *(number(band.get(name), 4) for name in ("unfiltered", "filtered", "random")),
            *(change(band.get(name)) for name in ("reduction", "reduction_random", "paper")),
        )
        for band in analysis.selection.variance.get("bands", ())
    ]
    head = ("band", "taps", "all, nats²", "filtered", "random", "change by filter", "by random", "paper's filter")
    return Table(head=head, rows=tuple(rows))


def order(analysis: Analysis) -> Table:
    """How alike prompts rank the taps."""
    names = {"unfiltered": "all positions", "filtered": "kept by the filter", "random": "as many at random"}
    found = analysis.selection.variance.get("order", {})
    rows = tuple((names.get(name, str(name)), signed(rho)) for name, rho in found.items())
    return Table(head=("positions", "mean rank correlation between prompts"), rows=rows)


def variance(analysis: Analysis) -> Table:
    """Variance between prompts by tap."""
    found = analysis.selection.variance.get("by_tap", {})
    names = [name for name in ("unfiltered", "filtered", "random") if name in found]
    return by_tap([("tap", None), *((f"{name}, nats²", found[name]) for name in names)], digits=4)


def normalisations(analysis: Analysis) -> Table:
    """Entropy by tap under each normalisation."""
    found = analysis.normalisations
    return by_tap([("tap", None), *((f"{name}, nats", found[name]) for name in found)], digits=3)


def by_tap(columns: Sequence[tuple[str, Iterable[Any] | None]], *, digits: int) -> Table:
    """A row per tap; the first column counts them."""
    values = [numbers(column) for _, column in columns[1:]]
    count = max(map(len, values), default=0)
    rows = tuple((str(tap), *(number(v[tap], digits) if tap < len(v) else "-" for v in values)) for tap in range(count))
    return Table(head=tuple(name for name, _ in columns), rows=rows)


def compartments(analysis: Analysis) -> Table:
    """Regions of like taps: their inner likeness, and whose taps fall in them; no rows where there are no two."""
    cka, selection = matrix(analysis.cka), analysis.selection
    eagle3, chosen = style.eagle3_of(selection), style.chosen_of(selection)
    rows = []
    for index, (first, last) in enumerate(style.compartments_of(analysis)):
        inner = cka[first : last + 1, first : last + 1]
        likeness = inner[np.triu_indices(len(inner), k=1)] if inner.size else inner
        likeness = likeness[np.isfinite(likeness)]
        mean = float(likeness.mean()) if likeness.size else None
        inside = [listed(tap for tap in taps if first <= tap <= last) for taps in (eagle3, chosen)]
        rows.append((str(index + 1), span((first, last)), str(last - first + 1), number(mean, 2), *inside))
    head = ("compartment", "taps", "how many", "mean CKA inside", "EAGLE-3's taps", "chosen")
    return Table(head=head, rows=tuple(rows))


def pairs(values: Any, corner: str, digits: int = 2) -> Table:
    """A square of numbers, a row and a column per tap."""
    square = matrix(values)
    head = (corner, *map(str, range(len(square))))
    return Table(
        head=head, rows=tuple((str(tap), *(number(v, digits) for v in row)) for tap, row in enumerate(square.tolist()))
    )


def searches(analysis: Analysis) -> Table:
    """Sets by size, and how far the greedy one is from the best found where that was searched for."""
    compared = any(not found.quick for found in analysis.searches)
    rows = []
    for found in analysis.searches:
        greedy = (
            (
                listed(found.greedy),
                number(found.greedy_entropy, 4),
                number(found.best_entropy - found.greedy_entropy, 4),
            )
            if not found.quick
            else ("-", "-", "-")
        )
        rows.append(
            (
                str(found.m),
                listed(found.best),
                number(found.best_entropy, 4),
                *(greedy if compared else ()),
                f"{found.compared:,} of {found.total:,}" + (", a quick search" if found.quick else ""),
                whole(found.rows),
                number(found.half_entropy, 4),
            )
        )
    between = ("greedy set", "nats", "greedy is below by") if compared else ()
    head = ("m", "best of those measured", "nats", *between, "sets measured", "positions", "on half of them, nats")
    return Table(head=head, rows=tuple(rows))


def settings(analysis: Analysis) -> Table:
    """Everything that decides the numbers."""
    selection = analysis.selection
    rows = [
        ("method", method(selection)),
        ("keep", number(selection.keep, 2)),
        ("CKA weight", f"{number(selection.cka_weight, 2)} nats"),
        ("CKA estimator", f"{analysis.cka_estimator}, on {whole(analysis.cka_rows)} positions"),
        ("prompts, SHA-256", selection.prompts_sha256 or "-"),
        ("target, SHA-256", selection.target_fingerprint or "-"),
    ]
    for name, value in selection.settings.items():
        if name not in _ELSEWHERE:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append((name.replace("_", " "), shown))
    return Table(head=("setting", "value"), rows=tuple(rows))


def sweep(analysis: Analysis) -> Table:
    """ELSI-C's set by the weight of its CKA penalty; the weight that was used is set off."""
    selection = analysis.selection
    found = selection.settings.get("cka_weight_sweep") or ()
    return Table(
        head=("weight of CKA, nats", "set of taps"),
        rows=tuple((number(entry["weight"], 2), listed(entry["taps"])) for entry in found),
        marked=frozenset(i for i, entry in enumerate(found) if entry["weight"] == selection.cka_weight),
    )


def _chosen_sets(analysis: Analysis, sets: Sequence[Sequence[int]]) -> frozenset[int]:
    chosen = list(style.chosen_of(analysis.selection))
    return frozenset(index for index, taps in enumerate(sets) if list(taps) == chosen)


def _rule_taps(rule: RuleResult) -> str:
    return listed(rule.taps) if rule.state == "residual" else f"{listed(rule.taps)}, after the final norm"


def _projection(m: int, width: int) -> str:
    return f"{width:,}" if m == 1 else f"{m} x {width:,} = {m * width:,}"


def _megabytes(value: Any) -> str:
    shown = number(value / 1e6 if isinstance(value, (int, float)) else None, 0)
    return shown if shown == "-" else f"{shown} MB"
