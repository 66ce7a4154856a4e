"""`elsi-edge bench --compare`: what changed between two reports."""

from pathlib import Path


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
    common.out.print(f"{found.shared} answers in both, {found.other_tokens} of them with other tokens")
    common.out.print(f"noise: differences of speed within {found.noise:.0%} are taken for noise")
    for name, (one, other) in found.differing.items():
        common.out.print(f"not the same in both: {name} {one} and {other}", soft_wrap=True)
