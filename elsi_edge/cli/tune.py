"""`elsi-edge tune`: measure a bundle on this device, and choose what to draft."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.cli import options as opt

if TYPE_CHECKING:
    from pathlib import Path

    from elsi_edge.runtime.solve import Outcome
    from elsi_edge.runtime.tuner import Tuned
    from elsi_edge.runtime.tuning import Tuning

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DOING = {
    "device": "copy bandwidth and matrix peak",
    "answers": "answers to built-in prompts",
    "curve": "verifying 1 to 64 rows",
    "draft": "the draft's calls",
    "exact": "which shapes are exact here",
    "shapes": "chains and trees on the answers",
    "done": "done",
}


def tune(
    bundle: opt.BundleArgument,
    seconds: Annotated[float, typer.Option(help="How long to measure, about; 5 to 3600.")] = 50.0,
    threads: opt.Threads = 0,
    provider: opt.Provider = "cpu",
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Measure what verifying and drafting cost on this device, and choose the chain or tree, or none, that pays.

    Writes BUNDLE.tuning.json beside the bundle (and a picture of the cost curve where matplotlib is installed), which
    generate, chat and bench then use. It holds for this machine, number of threads and bundle alone; --threads has a
    file of its own. Ctrl-C ends it and leaves an earlier file as it was.
    """
    from elsi_edge.bundle_ref import find_bundle
    from elsi_edge.cli import common
    from elsi_edge.cli.progress import reaching
    from elsi_edge.fsio import require_writable
    from elsi_edge.packaged import builtin_bench_prompts
    from elsi_edge.runtime.options import SessionSettings
    from elsi_edge.runtime.session import Session
    from elsi_edge.runtime.tuner import Tuner, TuneSettings
    from elsi_edge.runtime.tuning import save_tuning, tuning_path

    settings = TuneSettings(seconds=seconds)
    found = find_bundle(bundle, work)
    require_writable(tuning_path(found.directory, threads))
    session = Session.open(found.directory, SessionSettings(threads=threads, provider=provider, tuning=False))
    if found.note:
        common.note(found.note)
    rows = _mixed(builtin_bench_prompts())
    with common.progress("tune", seconds, "seconds") as bar:
        reach, last = reaching(bar, seconds), ""

        def progress(part: str, share: float) -> None:
            nonlocal last
            reach(share)
            if part != last and not common.err.is_terminal and part != "done":
                common.note(f"measuring {_DOING[part]} ...")
            last = part

        tuned = Tuner(session, found.directory, rows, settings, progress).run()
    path = save_tuning(found.directory, tuned.tuning)
    picture = _picture(tuned.tuning, path)
    if json:
        common.emit_json({**tuned.tuning.to_json(), "tuning": str(path), "picture": picture})
        return
    _show(tuned)
    common.out.print(f"Tuning: {path}", soft_wrap=True)
    if picture:
        common.out.print(f"Picture: {picture}", soft_wrap=True)
    common.next_command(f"elsi-edge bench {shlex.quote(bundle)}")


def _mixed(rows: "list[Any]") -> "list[Any]":
    """Prompts with the categories in turn, so that a short run sees all of them."""
    from elsi_edge.prompts import spread_over_categories

    return spread_over_categories(rows, len(rows))


def _show(tuned: "Tuned") -> None:
    from elsi_edge.cli import common

    tuning = tuned.tuning
    machine = tuning.machine
    common.out.print(
        f"{tuning.model}, {tuning.precision}; {common.counted(machine.threads, 'thread')}, {machine.provider}, "
        f"{machine.cpu}",
        soft_wrap=True,
    )
    for line in curve_lines(tuning):
        common.out.print(line, soft_wrap=True)
    for line in _lines(tuning):
        common.out.print(line, soft_wrap=True)
    common.out.print(_table(tuned.outcomes))
    common.out.print(f"Choice: {_choice(tuning)}", soft_wrap=True)
    common.out.print(f"Why: {tuning.choice.why}.", soft_wrap=True)
    for text in tuning.notes:
        common.note(f"note: {text}")


def curve_lines(tuning: "Tuning") -> list[str]:
    """The cost curve for a terminal: milliseconds by rows, and as a multiple of one row."""
    curves = [(curve.past, curve.verify_ms) for curve in tuning.curves]
    rows = [row for row in _SHOWN_ROWS if str(row) in tuning.verify_ms]
    most = max(curve[str(row)] for _, curve in curves for row in rows)
    lines = ["verifying n rows, ms (times one row):", "     n " + "".join(f"{row:>8}" for row in rows)]
    for past, curve in curves:
        one = curve["1"]
        bars = "".join(f"{_BARS[min(7, int(8 * curve[str(row)] / most))]:>8}" for row in rows)
        lines.append("       " + bars)
        lines.append(f"{past:>6} " + "".join(f"{curve[str(row)]:>8.1f}" for row in rows) + "  ms after so many tokens")
        lines.append("       " + "".join(f"{curve[str(row)] / one:>8.2f}" for row in rows))
    return lines


def _lines(tuning: "Tuning") -> list[str]:
    bits = "to the bit" if tuning.precision != "fp32" else "up to rounding"
    trees = tuning.machine.is_native and tuning.precision != "fp32"
    kind = "trees too" if trees else "chains"
    lines = [
        f"copy {tuning.copy_gb_per_s:.1f} GB/s, matrix products {tuning.matrix_gflop_per_s:.0f} GFLOP/s at "
        f"{tuning.precision}; outside ONNX Runtime {tuning.overhead_ms:.2f} ms a plain step",
        f"1 to {tuning.exact_rows} rows a step, {kind}, give the same {bits} "
        f"(tried: {len(tuning.exact_rows_tested)} counts)",
    ]
    if tuning.draft_entry_ms is not None and tuning.draft_level_ms is not None:
        lines.append(
            f"the draft takes {tuning.draft_entry_ms:.2f} ms a round and {tuning.draft_level_ms:.2f} ms each level more"
        )
    return lines


def _table(outcomes: "tuple[Outcome, ...]") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("shape", "tokens/s", "times plain", "tau", "nodes a round", "verify ms", "draft ms"):
        table.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.shape.words(),
            *(f"{outcome.tokens_per_s:.1f}", f"{outcome.speedup:.2f}", f"{outcome.tau:.2f}", f"{outcome.nodes:.2f}"),
            *(f"{outcome.ms_verify:.2f}", f"{outcome.ms_draft:.2f}"),
        )
    return table


def _choice(tuning: "Tuning") -> str:
    choice = tuning.choice
    if choice.mode == "plain":
        return f"plain decoding, {choice.tokens_per_s:.1f} tokens/s predicted"
    return (
        f"{choice.mode} of at most {choice.draft_nodes} from {' and '.join(choice.proposals)}, "
        f"{choice.tokens_per_s:.1f} tokens/s predicted, {choice.speedup:.2f} times plain"
    )


def _picture(tuning: "Tuning", path: "Path") -> str | None:
    """The cost curve as a PNG beside the tuning file; None where matplotlib is not installed."""
    import importlib.util
    import io

    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    from elsi_edge.fsio import write_bytes

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for past, curve in ((curve.past, curve.verify_ms) for curve in tuning.curves):
        rows = [int(row) for row in curve]
        (line,) = axes.plot(rows, [curve[str(row)] for row in rows], label=f"after {past} tokens")
        measured = [row for row in rows if row not in tuning.interpolated]
        axes.plot(measured, [curve[str(row)] for row in measured], "o", markersize=3, color=line.get_color())
    axes.set(xlabel="rows verified in one call (drafted nodes and the root)", ylabel="ms", ylim=(0, None))
    axes.set_title(f"{tuning.model}, {tuning.precision}, {tuning.machine.threads} threads", fontsize=10)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    picture = path.with_suffix(".png")
    write_bytes(picture, buffer.getvalue())
    return str(picture)
