"""The table of rules as Markdown, written into docs/experiments.md between its markers.

`python -m tests.figures.table_report docs/figures/table.json docs/experiments.md`; `tests.figures.table` calls it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elsi_edge.fsio import write_text

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
DRAFTINGS = ("chain-2", "chain-4", "tree-30", "tree-60")
BASE = "eagle3"  # what every rule is compared with


def main() -> None:
    """Render FILE into DOCUMENT."""
    figures, document = Path(sys.argv[1]), Path(sys.argv[2])
    write_into(document, json.loads(figures.read_text()))


def write_into(document: Path, figures: Mapping[str, Any]) -> None:
    """Replace what stands between the markers of `document`."""
    text = document.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    write_text(document, f"{head}{BEGIN}\n\n{render(figures)}\n{END}{tail}")


def render(figures: Mapping[str, Any]) -> str:
    """All tables."""
    rules: Mapping[str, Any] = figures["rules"]
    parts = [_overall(rules), _against(rules), _by_category(rules, "tree-30")]
    if any(rule.get("sampled") for rule in rules.values()):
        parts.append(_sampled(rules))
    return "\n".join(parts)


def _overall(rules: Mapping[str, Any]) -> str:
    """tau at T = 0 over all answers; several seeds as a range."""
    rows = []
    for name, rule in rules.items():
        taus = [_spread([run["tau"]["all"][d] for run in rule["runs"]]) for d in DRAFTINGS]
        size = rule["size"]
        agreement = " ".join(f"{value:.3f}" for value in rule["runs"][0]["agreement"])
        sizes = [f"{size[part] / 1e6:.2f}" for part in ("int4_bytes_projection", "int4_bytes")]
        rows.append([name, f"`{rule['taps']}`", str(len(rule["runs"])), *taus, agreement, *sizes])
    head = ["rule", "taps", "seeds", *DRAFTINGS, "held-out agreement", "projection, MB", "draft, MB"]
    return "tau at T = 0, by exact replay (mean, and the range over seeds):\n\n" + _table(head, rows)


def _against(rules: Mapping[str, Any]) -> str:
    """Each rule less EAGLE-3's three, with the interval over resampled prompts."""
    rows = [
        [name, *(_difference(rule["difference"]["all"][d]) for d in DRAFTINGS), _percent(rule, "tree-30")]
        for name, rule in rules.items()
        if rule.get("difference")
    ]
    head = ["rule", *DRAFTINGS, "share of EAGLE-3's, tree-30"]
    return f"\nDifference to `{BASE}` (paired bootstrap over prompts, 95 %; seeds pooled):\n\n" + _table(head, rows)


def _by_category(rules: Mapping[str, Any], drafting: str) -> str:
    """tau by category; the best of each line in bold."""
    categories = [name for name in next(iter(rules.values()))["runs"][0]["tau"] if name != "all"]
    rows = []
    for category in categories:
        values = [_mean([run["tau"][category][drafting] for run in rule["runs"]]) for rule in rules.values()]
        best = max(values)
        rows.append([category, *(f"**{v:.2f}**" if v == best else f"{v:.2f}" for v in values)])
    return f"\ntau of {drafting} by category:\n\n" + _table(["category", *rules], rows)


def _sampled(rules: Mapping[str, Any]) -> str:
    """tau at T = 1 from real runs, ms per level."""
    rows = [
        [name, f"{s['chain-4']:.2f}", f"{s['tree-30']:.2f}", f"{s['level_ms']:.2f}"]
        for name, rule in rules.items()
        if (s := rule.get("sampled"))
    ]
    head = ["rule", "chain-4", "tree-30", "ms per level of one node"]
    return "\ntau at T = 1 from real runs (65 prompts, 64 tokens, int4, `--no-exact`):\n\n" + _table(head, rows)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{_mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _difference(value: Mapping[str, float]) -> str:
    return f"{value['difference']:+.3f} ({value['low']:+.3f} to {value['high']:+.3f})"


def _percent(rule: Mapping[str, Any], drafting: str) -> str:
    mine = _mean([run["tau"]["all"][drafting] for run in rule["runs"]])
    return f"{mine / (mine - rule['difference']['all'][drafting]['difference']):.1%}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
