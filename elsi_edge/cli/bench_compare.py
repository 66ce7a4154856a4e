"""`elsi-edge bench --compare`: what changed between two reports."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsi_edge.runtime.bench.compare import Comparison


def show(before: Path, after: Path, *, json: bool) -> None:
    """Read both, say what changed. Raises DataError for a file that is no report."""
    from rich import box
    from rich.table import Table

    from elsi_edge.artifacts import to_plain
    from elsi_edge.cli import common
    from elsi_edge.cli.bench_show import interval
    from elsi_edge.runtime.bench.compare import compare, read_report

    found = compare(read_report(before), read_report(after))
    if json:
        common.emit_json(to_plain(found))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "A", "B", "B / A", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for change in found.changes:
        figures = [
            f"{value:,.4g}" if value < 1e6 else common.size_text(value) for value in (change.before, change.after)
        ]
        table.add_row(change.name, *figures, f"{change.ratio:.3f}{interval(change.interval, 3)}", change.verdict)
    common.out.print(table)
    for line in _lines(found):
        common.out.print(line, soft_wrap=True)


def _lines(found: "Comparison") -> Iterator[str]:
    """What stands below the table."""
    from elsi_edge.cli.common import counted

    yield f"{counted(found.shared, 'answer')} in both, {found.other_tokens or 'none'} of them with other tokens"
    if any(found.only):
        yield f"in one alone: {counted(found.only[0], 'answer')} of A, {counted(found.only[1], 'answer')} of B"
    others = {change.name: change.noise for change in found.changes if change.noise != found.noise}
    yield f"noise: differences of speed within {found.noise:.0%} are taken for noise" + "".join(
        f", of {name} within {noise:.0%}"
        for name, noise in (
            ("the first token", others.get("first token, ms")),
            ("tau", others.get("tau")),
            ("memory", others.get("peak memory, bytes")),
        )
        if noise is not None
    )
    yield from found.notes
    for name, (one, other) in found.differing.items():
        yield f"not the same in both: {name} {one} and {other}"
