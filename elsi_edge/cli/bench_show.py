"""What `bench` says in a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsi_edge.runtime.bench.noise import Load
    from elsi_edge.runtime.bench.report import BenchReport


def show(report: "BenchReport", value: Mapping[str, Any]) -> None:
    """A table by category, then what it means in sentences."""
    from rich import box
    from rich.table import Table

    from elsi_edge.cli import common

    first = report.answers[0].speculative
    nodes = "no candidates"
    if first.mode != "plain":
        nodes = f"{first.mode} of up to {common.counted(first.draft_nodes, 'node')}"
        nodes += ", tuned for this machine" if first.tuned else ", not tuned for this machine"
    threads = common.counted(first.threads, "thread")
    common.out.print(
        f"{value['model']}, {first.precision}, {nodes}; {threads}, {first.provider}, {value['cpu']}", soft_wrap=True
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "answers", "tokens", "tau", "tokens/s", "plain", "speed-up"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=bool(name))
    for name, group in value["categories"].items():
        table.add_row(
            name, str(group["answers"]), str(group["tokens"]), number(group["tau"], 2),
            number(group["tokens_per_s"], 1), number(group["plain_tokens_per_s"], 1), number(group["speedup"], 2),
        )  # fmt: skip
    table.add_section()
    fast, plain = report.speculative, report.plain
    table.add_row(
        "all", str(fast.answers), str(fast.tokens), number(fast.tau, 2), number(fast.tokens_per_s, 1),
        number(plain.tokens_per_s, 1), number(report.speedup, 2),
    )  # fmt: skip
    common.out.print(table)
    parts = (
        _speed_lines(report), _sustained_lines(value), _memory_lines(value), _limit_lines(value), _roofline_lines(value)
    )  # fmt: skip
    for line in (*(line for part in parts for line in part), *_perplexity_lines(value)):
        common.out.print(line, soft_wrap=True)
    if value["against"]:
        common.out.print(_peers(value["against"]))
        for peer in value["against"]:
            common.out.print(f"{peer['name']}: {peer['version']}, {peer['flags']}", soft_wrap=True)
    for line in (*report.warnings, *value["noise"]["words"]):
        common.note(f"warning: {line}")
    if value["partial"]:
        common.note(f"interrupted: {common.counted(fast.answers, 'answer')}, not all that was asked for")


def by_threads(reports: Sequence[Mapping[str, Any]]) -> Any:
    """A table of several numbers of threads, as `bench` keeps them in `by_threads`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("threads", "tokens/s", "plain", "speed-up", "first token, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in reports:
        table.add_row(
            str(one["threads"]), number(one["tokens_per_s"], 1), number(one["plain_tokens_per_s"], 1),
            number(one["speedup"], 2) + interval(one["speedup_interval"]), number(one["time_to_first_token_ms"], 0),
        )  # fmt: skip
    return table


def noise_json(report: "BenchReport", load: "Load | None") -> dict[str, Any]:
    """How steady the machine was, with sentences for what was not."""
    from elsi_edge.artifacts import to_plain
    from elsi_edge.runtime.bench.noise import noise_words

    return {"load": to_plain(load), "words": noise_words(load, report.spread, report.drift)}


def difference(report: "BenchReport") -> str:
    """The first answer that differs, in one line."""
    answer = next(answer for answer in report.answers if not answer.identical)
    plain = answer.plain.token_ids
    every = (*answer.plain_runs, *answer.speculative_runs)
    other = next(run.token_ids for run in every if run.token_ids != plain)
    place = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    return (
        f"error: speculative and plain tokens differ in exact mode: prompt {answer.id!r}, turn {answer.turn + 1}, from "
        f"token {place + 1} on; please report this with the bundle and the versions that --json shows"
    )


def number(value: float | None, digits: int) -> str:
    """A figure for a table; a dash for one that there is not."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(bounds: tuple[float, float] | None, digits: int = 2) -> str:
    """ " (0.97-1.31)", or nothing."""
    return "" if bounds is None else f" ({bounds[0]:.{digits}f}-{bounds[1]:.{digits}f})"


def _speed_lines(report: "BenchReport") -> Iterator[str]:
    from elsi_edge.cli import common

    fast, plain, first = report.speculative, report.plain, report.answers[0].speculative
    depths = ", ".join(f"{share:.2f}" for share in fast.accepted_by_depth) or "none"
    said = "; ".join(f"{name} {counts.accepted} of {counts.drafted} nodes" for name, counts in report.by_source.items())
    yield f"identical: {'yes' if report.identical else 'no'} ({first.exactness})"
    spread = "" if report.speedup_interval is None else ", 95 % interval"
    yield (
        f"speed-up: {number(report.speedup, 2)}{interval(report.speedup_interval)} (median of the answers' own "
        f"ratios{spread}), {number(report.speedup_total, 2)} in total, without prefill; with prefill "
        f"{number(report.end_to_end, 2)}{interval(report.end_to_end_interval)}"
    )
    yield f"accepted drafts a verification: {number(fast.accepted_per_verification, 2)}; at depth 1, 2, ...: {depths}"
    yield (
        f"accepted by source: {said or 'nothing was proposed'}; without candidates "
        f"{number((report.empty_share or 0.0) * 100, 0)} % of the verifications"
    )
    yield (
        f"first token after {number(fast.time_to_first_token_ms, 0)} ms (median), plain "
        f"{number(plain.time_to_first_token_ms, 0)} ms; peak resident memory of this process, which decoded both ways, "
        f"{common.size_text(report.peak_memory_bytes)}"
    )
    times = [(name, arm.ms_per_token) for name, arm in (("speculative", fast), ("plain", plain))]
    said = ", ".join(
        f"{name} {' / '.join(number(value, 1) for value in (ms.p50, ms.p90, ms.p99))}" for name, ms in times
    )
    yield f"ms a token, p50 / p90 / p99: {said}"
    if fast.shares is not None:
        propose, verify, other = fast.shares.propose, fast.shares.verify, fast.shares.other
        yield f"time: drafting {propose:.0%}, the target's calls {verify:.0%}, the rest {other:.0%}"
    if fast.joules_per_token is not None and plain.joules_per_token is not None:
        yield f"energy: {fast.joules_per_token:.3f} J a token, plain {plain.joules_per_token:.3f} (whole machine)"
    if report.looping:
        yield (
            f"looping answers: {report.looping} of {fast.answers}; without them tau "
            f"{number(report.tau_without_looping, 2)}, speed-up {number(report.speedup_without_looping, 2)}"
        )


def _sustained_lines(value: Mapping[str, Any]) -> Iterator[str]:
    windows = [one for one in value["sustained"] or () if one["tokens_per_s"] and one["plain_tokens_per_s"]]
    if len(windows) < 2:
        return
    first, last = windows[0], windows[-1]
    slowest = min(one["plain_tokens_per_s"] for one in windows)
    yield (
        f"over {last['until_s']:.0f} s, from the first stretch to the last: {first['tokens_per_s']:.1f} to "
        f"{last['tokens_per_s']:.1f} tokens/s, plain {first['plain_tokens_per_s']:.1f} to "
        f"{last['plain_tokens_per_s']:.1f}, at the slowest {slowest:.1f}"
    )


def _memory_lines(value: Mapping[str, Any]) -> Iterator[str]:
    from elsi_edge.cli.common import size_text

    memory = value["memory"]
    if memory is None:
        return
    parts = [f"{name} {size_text(max(0, one['pss']))}" for name, one in memory["components"].items()]
    parts.append(f"caches {size_text(memory['cache_per_1000_tokens']['pss'])} per 1,000 tokens")
    yield f"memory (Pss) of {memory['processes']} fresh processes: {', '.join(parts)}"
    steady, peak = memory["steady"], memory["peak"]
    yield (
        f"with {memory['steady_tokens']} tokens cached {size_text(steady['pss'])}, of which "
        f"{size_text(steady['anonymous'])} anonymous; peak {size_text(peak['pss'])}, {size_text(peak['anonymous'])} "
        "anonymous"
    )
    if memory["one_tap"] is not None:
        yield memory["one_tap"]["words"]


def _limit_lines(value: Mapping[str, Any]) -> Iterator[str]:
    from elsi_edge.cli.common import size_text

    limit = value["memory_limit"]
    if limit is not None:
        verdict = "works" if limit["works"] else f"does not work ({limit['trials'][0]['why']})"
        speeds = f"{number(limit['smallest_tokens_per_s'], 1)} tokens/s, {number(limit['without']['tokens_per_s'], 1)}"
        yield (
            f"memory limit {size_text(limit['asked_bytes'])}: {verdict}; the smallest that worked: "
            f"{size_text(limit['smallest_bytes'])} ({limit['kind_words']}), at {speeds} without a limit"
        )
        if limit["note"] is not None:
            yield limit["note"]


def _roofline_lines(value: Mapping[str, Any]) -> Iterator[str]:
    roofline = value["roofline"]
    if roofline is not None:
        peaks = ", ".join(f"{name} {peak:.0f} GOP/s" for name, peak in roofline["ceilings"]["gop_per_s"].items())
        ceilings = roofline["ceilings"]
        yield (
            f"machine: copy {ceilings['copy_gb_per_s']:.1f} GB/s, reading {ceilings['read_gb_per_s']:.1f} GB/s, matrix "
            f"products {peaks}"
        )
        yield from roofline["words"]


def _perplexity_lines(value: Mapping[str, Any]) -> Iterator[str]:
    own = value["perplexity"]
    if own is None:
        return
    yield f"perplexity: {own['perplexity']:.2f} on {own['windows']} texts, {own['tokens']} tokens predicted"
    for peer in value["against"] or ():
        found = peer["perplexity"]
        if found is not None:
            yield f"perplexity of {peer['name']}: {perplexity_words(found)}"


def perplexity_words(found: Mapping[str, Any]) -> str:
    """A peer's perplexity, or why there is none."""
    if found["perplexity"] is None:
        return f"not measured ({found['not_measured']})"
    return f"{found['perplexity']:.2f}, its likeliest token ours in {100 * found['top1_agreement']:.1f} % of the places"


def _peers(peers: list[Mapping[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    scored = any(peer["perplexity"] is not None for peer in peers)
    names = ["runtime", "tokens/s", "ours over it", "end to end", "first token, ms", "same text"]
    for name in (*names, "perplexity") if scored else names:
        table.add_column(name, justify="left" if name == "runtime" else "right", no_wrap=True)
    for peer in peers:
        cells = [
            peer["name"], number(peer["tokens_per_s"], 1), number(peer["ours_over_it"], 2) + interval(peer["interval"]),
            number(peer["end_to_end"], 2), number(peer["time_to_first_token_ms"], 0),
            f"{peer['same_text']} of {peer['answers']}",
        ]  # fmt: skip
        if scored:
            cells.append(number((peer["perplexity"] or {}).get("perplexity"), 2))
        table.add_row(*cells)
    return table
