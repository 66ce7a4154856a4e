"""`elsi-edge bench`: plain and speculative decoding of the same prompts, do they say the same, and what limits it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.cli import options as opt
from elsi_edge.cli.draft_support import flags

if TYPE_CHECKING:
    from elsi_edge.artifacts import PromptRow
    from elsi_edge.runtime.bench.answers import BenchAnswer
    from elsi_edge.runtime.bench.noise import Load
    from elsi_edge.runtime.bench.run import BenchSettings
    from elsi_edge.runtime.session import Session

_INTERRUPTED = 130


def bench(
    bundle: Annotated[
        str | None,
        typer.Argument(
            metavar="[BUNDLE]",
            help="A bundle's directory, or a model whose work directory holds one (newest with a draft).",
        ),
    ] = None,
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
    seconds: Annotated[
        float, typer.Option(help="Go over the prompts again and again for so long, to see throttling; 0: once.")
    ] = 0.0,
    exact: opt.Exact = True,
    threads: Annotated[
        str, typer.Option(help="Threads; 0 takes the cores that may be used. Several, as in 1,2, one after another.")
    ] = "0",
    provider: opt.Provider = "cpu",
    memory: Annotated[bool, typer.Option("--memory", help="Memory by component too, from fresh processes.")] = False,
    roofline: Annotated[
        bool,
        typer.Option("--roofline", help="What the machine's memory and arithmetic allow, and how near this comes."),
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Try this limit, e.g. 300MB, for real, and search for the smallest that works."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Other runtimes in the same run: llama.cpp, onnxruntime-genai, openvino-genai."
        ),
    ] = None,
    peer_model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="The model's file or directory for one of --against; may be repeated."),
    ] = None,
    perplexity: Annotated[
        bool,
        typer.Option("--perplexity", help="Perplexity on the prompts' texts too, this bundle's and of --against."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON report to this file too.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML page with pictures to this file; measures memory and roofline.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Measure nothing: say what changed between two --out files."),
    ] = None,
    work: opt.Work = None,
    json: opt.Json = False,
) -> None:
    """Measure a bundle: both ways of decoding prompt by prompt, and compare their tokens.

    Answers are greedy. Speeds are tokens/s after the first token, so without prefill. The speed-up is the median over
    answers of speculative over plain tokens/s, each pair measured back to back; the ratio of the totals stands beside
    it, intervals are 95 % over answers. In exact mode different tokens are an error, exit code 1, and so is a
    --memory-limit that is too small. Ctrl-C reports what was measured so far.
    """
    from elsi_edge.cli import bench_compare, bench_extras
    from elsi_edge.errors import UsageError
    from elsi_edge.runtime.bench.run import BenchSettings

    if compare is not None:
        if bundle is not None:
            raise UsageError(
                f"--compare reads two reports and measures nothing, but {bundle!r} was named; drop one of them"
            )
        bench_compare.show(*compare, json=json)
        return
    if bundle is None:
        raise UsageError("name a bundle to measure, or two reports with --compare A.json B.json")
    settings = BenchSettings(
        max_tokens=max_tokens,
        draft_nodes=draft_nodes,
        proposals=opt.proposals_of(proposals),
        exact=exact,
        repeats=repeats,
        seconds=seconds,
    )
    settings.options(plain=False)  # values out of range are refused before anything is read
    if report is not None:
        memory = roofline = True
    extras = bench_extras.Extras(
        memory=memory,
        roofline=roofline,
        memory_limit=_limit_of(memory_limit),
        peers=bench_extras.peers_of(against, peer_model or []),
        perplexity=perplexity,
    )
    counts = opt.counts_of("--threads", threads)
    run = _Bench(bundle, work, provider, settings, prompts, limit, extras, (out, report))
    reports = run.measure_all(counts, json=json)
    full = {**reports[0], "by_threads": [run.in_short(one) for one in reports]} if len(counts) > 1 else reports[0]
    run.write(full)
    run.conclude(full, json=json)
    if any(one["partial"] for one in reports):
        raise typer.Exit(_INTERRUPTED)
    if run.failed:
        raise typer.Exit(1)


def _limit_of(text: str | None) -> int | None:
    """The bytes of --memory-limit. Raises UsageError, ConfigError for a limit out of range."""
    from elsi_edge.runtime.bench.limits import require_limit

    if text is None:
        return None
    limit = opt.size_of("--memory-limit", text)
    require_limit(limit)
    return limit


class _Bench:
    """One bundle and its prompts, measured with one number of threads after another."""

    def __init__(
        self,
        bundle: str,
        work: Path | None,
        provider: str,
        settings: "BenchSettings",
        prompts: Path | None,
        limit: int | None,
        extras: Any,
        files: tuple[Path | None, Path | None],
    ) -> None:
        from elsi_edge.bundle import read_manifest
        from elsi_edge.bundle_ref import find_bundle
        from elsi_edge.cli import common
        from elsi_edge.fsio import require_writable
        from elsi_edge.packaged import builtin_bench_prompts
        from elsi_edge.prompts import read_prompts, spread_over_categories

        rows = read_prompts(prompts) if prompts is not None else builtin_bench_prompts()
        self.rows = rows if limit is None else spread_over_categories(rows, limit)
        found = find_bundle(bundle, work)
        self.directory, self.named, self.work = found.directory, bundle, work
        self.static = read_manifest(found.directory).static is not None
        self.provider, self.settings, self.extras = provider, settings, extras
        self.out, self.page = files
        for path in files:
            if path is not None:
                require_writable(path)
        self.failed = False
        if found.note:
            common.note(found.note)

    def measure_all(self, counts: list[int], *, json: bool) -> list[dict[str, Any]]:
        """A report for each number of threads; an interrupt ends them, and what it cut short is marked partial."""
        reports: list[dict[str, Any]] = []
        try:
            for count in counts:
                reports.append(self.measure(count, first=not reports, json=json))
                if reports[-1]["partial"]:
                    break
        except KeyboardInterrupt:  # before a count had its first answer
            if not reports:
                raise
            reports[0]["partial"] = True
        return reports

    def measure(self, threads: int, *, first: bool, json: bool) -> dict[str, Any]:
        """The report with one number of threads, shown unless JSON is wanted."""
        from elsi_edge.cli import bench_perplexity, bench_show, common
        from elsi_edge.runtime.bench.json_form import report_json, windows
        from elsi_edge.runtime.bench.report import summarise
        from elsi_edge.runtime.options import SessionSettings
        from elsi_edge.runtime.session import Session

        session = Session.open(self.directory, SessionSettings(threads=threads, provider=self.provider))
        session.policy(self.settings.options(plain=False))
        texts = self.extras.texts(session, self.rows) if first else None
        peers = self.extras.open_peers(self.directory, session) if first else None
        own = None
        try:
            answers, partial, warm_ups, load = _run(session, self.rows, self.settings, peers)
            if texts is not None and not partial:
                own = bench_perplexity.score(self.directory, session, texts, peers, exact=self.settings.exact)
                partial = own is None
        finally:
            if peers is not None:
                peers.close()
        report = summarise(answers)
        value = {**report_json(report), **_details(self.directory, self.rows, self.settings, partial, warm_ups)}
        # Other runtimes work in processes of their own: here they are no disturbance.
        value["noise"] = bench_show.noise_json(report, load if peers is None else None)
        value["sustained"] = windows(answers) if self.settings.seconds else None
        found, whole = self.extras.measure(self.directory, session, answers, first=first, partial=partial)
        value |= {**found, "partial": not whole}
        value["perplexity"] = bench_perplexity.report_json(texts, own)
        value["against"] = None if peers is None else peers.report(answers, own)
        if not json:
            bench_show.show(report, value)
        if value["memory_limit"] is not None and not value["memory_limit"]["works"]:
            self.failed = True
        if not report.identical and report.answers[0].speculative.exact:
            self.failed = True
            common.note(bench_show.difference(report))
        return value

    def in_short(self, value: dict[str, Any]) -> dict[str, Any]:
        """A report of another number of threads."""
        names = (
            *("threads", "tokens_per_s", "tokens_per_s_interval", "speedup", "speedup_interval", "end_to_end", "tau"),
            *("identical", "time_to_first_token_ms", "mode", "draft_nodes", "tuned", "partial"),
        )
        return {**{name: value[name] for name in names}, "plain_tokens_per_s": value["plain"]["tokens_per_s"]}

    def conclude(self, full: dict[str, Any], *, json: bool) -> None:
        """The JSON; or the runs with several numbers of threads side by side, and the command that comes next."""
        from elsi_edge.cli import bench_show, common

        if json:
            common.emit_json(full)
            return
        if len(full.get("by_threads", ())) > 1:
            common.out.print(bench_show.by_threads(full["by_threads"]))
        verb = "chat" if full["tuned"] or full["draft_nodes"] == 0 or self.static else "tune"
        common.next_command(f"elsi-edge {verb} {shlex.quote(self.named)}{flags(work=self.work)}")

    def write(self, value: dict[str, Any]) -> None:
        """The files that were asked for."""
        from elsi_edge.cli import common
        from elsi_edge.fsio import write_bytes, write_json
        from elsi_edge.runtime.bench.html import render

        if self.out is not None:
            write_json(self.out, value)
            common.note(f"Report: {self.out}")
        if self.page is not None:
            write_bytes(self.page, render(value).encode())
            common.note(f"Page: {self.page}")


def _run(
    session: "Session", rows: "list[PromptRow]", settings: "BenchSettings", peers: Any
) -> "tuple[list[BenchAnswer], bool, int, Load]":
    """Answers, whether Ctrl-C cut them short, the number of warm-up runs, what else the cores did."""
    from elsi_edge.cli import common
    from elsi_edge.runtime.bench.noise import Ticks, load_since
    from elsi_edge.runtime.bench.run import check_prompts, measure, warm_up

    check_prompts(session, rows)
    answers: list[BenchAnswer] = []
    with common.progress("warm up", None, "runs"):
        warm_ups = warm_up(session, rows[0], settings)
    start, partial = Ticks.now(), False
    try:
        total = settings.seconds or sum(len(row.turns) for row in rows)
        with common.progress("bench", total, "seconds" if settings.seconds else "answers") as bar:
            for answer in measure(session, rows, settings):
                answers.append(answer)
                if peers is not None:
                    peers.answer(session, rows, answer)
                before = answers[-2].at_s if len(answers) > 1 else 0.0
                bar.advance(answer.at_s - before if settings.seconds else 1)
    except KeyboardInterrupt:
        if not answers:
            raise
        partial = True
    return answers, partial, warm_ups, load_since(start)


def _details(
    directory: Path, rows: "list[PromptRow]", settings: "BenchSettings", partial: bool, warm_ups: int
) -> dict[str, Any]:
    """What a reader needs to repeat the measurement."""
    import platform
    from importlib.metadata import version

    from elsi_edge._version import __version__
    from elsi_edge.bundle import read_manifest
    from elsi_edge.machine import cpu_name
    from elsi_edge.prompts import prompts_sha256
    from elsi_edge.runtime.bench.energy import ABSENT, EnergyMeter

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
        "energy": "RAPL, all packages, other load included" if EnergyMeter().readable else ABSENT,
        "versions": {
            "elsi-edge": __version__,
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
            "numpy": version("numpy"),
        },
    }
