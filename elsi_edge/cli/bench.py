"""`elsi-edge bench`: plain and speculative decoding of the same prompts, and whether they say the same."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.cli import options as opt
from elsi_edge.cli.draft_support import flags

if TYPE_CHECKING:
    from elsi_edge.artifacts import PromptRow
    from elsi_edge.runtime.bench import BenchSettings
    from elsi_edge.runtime.bench_report import ArmTotals, BenchAnswer, BenchReport
    from elsi_edge.runtime.session import Session

_INTERRUPTED = 130


def bench(
    bundle: opt.BundleArgument,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, .jsonl or .txt (default: 24 built-in ones of eight categories).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to take, from each category in turn (default: all).")
    ] = None,
    draft_nodes: opt.DraftNodes = None,
    proposals: opt.Proposals = opt.DEFAULT_PROPOSALS,
    max_tokens: opt.MaxTokens = 128,
    repeats: Annotated[int, typer.Option(help="Times that each answer is given, plain and speculative.")] = 1,
    exact: opt.Exact = True,
    threads: opt.Threads = 0,
    provider: opt.Provider = "cpu",
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Measure a bundle: both ways of decoding prompt by prompt, and compare their tokens.

    Answers are greedy. Speeds are tokens/s after the first token, so without prefill. The speed-up is the median over
    answers of speculative over plain tokens/s, each pair measured back to back; the ratio of the totals stands beside
    it. In exact mode different tokens are an error, exit code 1. Ctrl-C reports what was measured so far.
    """
    from elsi_edge.bundle_ref import find_bundle
    from elsi_edge.cli import common
    from elsi_edge.packaged import builtin_bench_prompts
    from elsi_edge.prompts import read_prompts, spread_over_categories
    from elsi_edge.runtime.bench import BenchSettings
    from elsi_edge.runtime.bench_report import summarise
    from elsi_edge.runtime.options import SessionSettings
    from elsi_edge.runtime.session import Session

    settings = BenchSettings(
        max_tokens=max_tokens,
        draft_nodes=draft_nodes,
        proposals=opt.proposals_of(proposals),
        exact=exact,
        repeats=repeats,
    )
    settings.options(plain=False)  # values out of range are refused before anything is read
    rows = read_prompts(prompts) if prompts is not None else builtin_bench_prompts()
    rows = rows if limit is None else spread_over_categories(rows, limit)
    found = find_bundle(bundle, work)
    session = Session.open(found.directory, SessionSettings(threads=threads, provider=provider))
    session.policy(settings.options(plain=False))
    if found.note:
        common.note(found.note)
    answers, partial, warm_ups = _run(session, rows, settings)
    report = summarise(answers)
    details = _details(found.directory, rows, settings, partial=partial, warm_ups=warm_ups)
    if json:
        common.emit_json({**report.to_json(), **details})
    else:
        _show(report, details)
        common.next_command(f"elsi-edge chat {shlex.quote(bundle)}{flags(work=work)}")
    failed = not report.identical and report.answers[0].speculative.exact
    if failed:
        common.note(_difference(report))
    if partial or failed:
        raise typer.Exit(_INTERRUPTED if partial else 1)


def _run(
    session: "Session", rows: "list[PromptRow]", settings: "BenchSettings"
) -> "tuple[list[BenchAnswer], bool, int]":
    """Answers, whether Ctrl-C cut them short, and the number of warm-up runs."""
    from elsi_edge.cli import common
    from elsi_edge.runtime.bench import check_prompts, measure, warm_up

    check_prompts(session, rows)
    answers: list[BenchAnswer] = []
    with common.progress("warm up", None, "runs"):
        warm_ups = warm_up(session, rows[0], settings)
    try:
        with common.progress("bench", sum(len(row.turns) for row in rows), "answers") as bar:
            for answer in measure(session, rows, settings):
                answers.append(answer)
                bar.advance()
    except KeyboardInterrupt:
        if not answers:
            raise
        return answers, True, warm_ups
    return answers, False, warm_ups


def _details(
    directory: Path, rows: "list[PromptRow]", settings: "BenchSettings", *, partial: bool, warm_ups: int
) -> dict[str, Any]:
    """What a reader needs to repeat the measurement."""
    import platform
    from importlib.metadata import version

    from elsi_edge._version import __version__
    from elsi_edge.bundle import read_manifest
    from elsi_edge.machine import cpu_name
    from elsi_edge.prompts import prompts_sha256

    manifest = read_manifest(directory)
    return {
        "partial": partial,
        "bundle": str(directory),
        "model": manifest.model,
        "target_fingerprint": manifest.target_fingerprint,
        "taps": None if manifest.selection is None else list(manifest.selection.taps),
        "max_tokens": settings.max_tokens,
        "repeats": settings.repeats,
        "warm_up_runs": warm_ups,
        "prompts_given": len(rows),
        "prompts_sha256": prompts_sha256(rows),
        "cpu": cpu_name(),
        "versions": {
            "elsi-edge": __version__,
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
            "numpy": version("numpy"),
        },
    }


def _show(report: "BenchReport", details: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from elsi_edge.cli import common
    from elsi_edge.runtime.bench_report import by_category

    first = report.answers[0].speculative
    nodes = "no candidates" if first.mode == "plain" else f"{first.mode} of up to {first.draft_nodes} nodes"
    common.out.print(
        f"{details['model']}, {first.precision}, {nodes}; {first.threads} threads, {first.provider}, {details['cpu']}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "answers", "tokens", "tau", "tokens/s", "plain", "speed-up"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=bool(name))
    for name, group in by_category(report.answers).items():
        totals = report.to_json()["categories"][name]
        table.add_row(
            name, str(len(group)), str(totals["tokens"]), number(totals["tau"], 2), number(totals["tokens_per_s"], 1),
            number(totals["plain_tokens_per_s"], 1), number(totals["speedup"], 2),
        )  # fmt: skip
    fast, plain = report.speculative, report.plain
    table.add_section()
    table.add_row(
        "all", str(fast.answers), str(fast.tokens), number(fast.tau, 2), number(fast.tokens_per_s, 1),
        number(plain.tokens_per_s, 1), number(report.speedup, 2),
    )  # fmt: skip
    common.out.print(table)
    for line in _lines(report, fast, plain):
        common.out.print(line, soft_wrap=True)
    for warning in report.warnings:
        common.note(f"warning: {warning}")
    if details["partial"]:
        common.note(f"interrupted: {fast.answers} answers, not all that were asked for")


def _lines(report: "BenchReport", fast: "ArmTotals", plain: "ArmTotals") -> list[str]:
    from elsi_edge.cli import common

    first = report.answers[0].speculative
    depths = ", ".join(f"{share:.2f}" for share in fast.accepted_by_depth) or "none"
    said = "; ".join(f"{name} {counts.accepted} of {counts.drafted} nodes" for name, counts in report.by_source.items())
    lines = [
        f"identical: {'yes' if report.identical else 'no'} ({first.exactness})",
        f"speed-up: {number(report.speedup, 2)} (median of the answers' own ratios), "
        f"{number(report.speedup_total, 2)} in total, without prefill",
        f"accepted drafts a verification: {number(fast.accepted_per_verification, 2)}; at depth 1, 2, ...: {depths}",
        f"accepted by source: {said or 'nothing was proposed'}; without candidates "
        f"{number((report.empty_share or 0.0) * 100, 0)} % of the verifications",
        f"first token after {number(fast.time_to_first_token_ms, 0)} ms (median), plain "
        f"{number(plain.time_to_first_token_ms, 0)} ms; peak memory {common.size_text(report.peak_memory_bytes)}",
    ]
    if report.looping:
        lines.append(
            f"looping answers: {report.looping} of {fast.answers}; without them tau "
            f"{number(report.tau_without_looping, 2)}, speed-up {number(report.speedup_without_looping, 2)}"
        )
    if report.drift is not None and abs(report.drift - 1.0) > 0.05:
        lines.append(
            f"the machine's speed moved: plain decoding was {report.drift:.2f} times as fast in the second half"
        )
    return lines


def _difference(report: "BenchReport") -> str:
    """The first answer that differs, in one line."""
    answer = next(answer for answer in report.answers if not answer.identical)
    plain, other = answer.plain.token_ids, answer.speculative.token_ids
    place = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    return (
        f"error: speculative and plain tokens differ in exact mode: prompt {answer.id!r}, turn {answer.turn + 1}, from "
        f"token {place + 1} on; please report this with the bundle and the versions that --json shows"
    )


def number(value: float | None, digits: int) -> str:
    """A figure for a table; a dash for one that there is not."""
    return "-" if value is None else f"{value:.{digits}f}"
