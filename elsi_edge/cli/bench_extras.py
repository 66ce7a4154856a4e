"""What `bench` measures beside speed: memory, limits, the roofline, and other runtimes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsi_edge.artifacts import PromptRow
    from elsi_edge.runtime.bench.answers import BenchAnswer
    from elsi_edge.runtime.bench.perplexity import Scores
    from elsi_edge.runtime.session import Session


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What was asked for."""

    memory: bool
    roofline: bool
    memory_limit: int | None  # bytes
    peers: Mapping[str, str | None]  # by name the model's file or directory, None where it is to be found
    perplexity: bool = False

    def texts(self, session: "Session", rows: "Sequence[PromptRow]") -> list[list[int]] | None:
        """The windows of token ids whose perplexity was asked for; None when it was not. Raises UsageError."""
        from elsi_edge.runtime.bench.perplexity import windows_of

        return windows_of(rows, session) if self.perplexity else None

    def open_peers(self, bundle: Path, session: "Session") -> "Peers | None":
        """The other runtimes, ready; None when none was asked for."""
        if not self.peers:
            return None
        from elsi_edge.bundle import read_manifest

        model = read_manifest(bundle).model
        paths = {name: path or find_peer(name, model) for name, path in self.peers.items()}
        return Peers(paths, session)

    def measure(
        self, bundle: Path, session: "Session", answers: "Sequence[BenchAnswer]", *, first: bool, partial: bool
    ) -> tuple[dict[str, Any], bool]:
        """Keys of the report, None for what was not asked for, and whether all of it was measured.

        Nothing more is measured after an interrupt (`partial`, or one that comes here). Memory is measured once, with
        the `first` number of threads, after `session` has given its own back.
        """
        found: dict[str, Any] = {"memory": None, "memory_limit": None, "roofline": None}
        if partial:
            return found, False
        try:
            if self.roofline:
                found["roofline"] = _roofline(bundle, session, answers)
            session.release()
            if self.memory and first:
                found["memory"] = _memory(bundle, session)
            if self.memory_limit is not None and first:
                found["memory_limit"] = _limit(bundle, session, self.memory_limit)
        except KeyboardInterrupt:
            return found, False
        return found, True


class Peers:
    """Other runtimes that answer what we answered, one after another."""

    def __init__(self, models: Mapping[str, str], session: "Session") -> None:
        from elsi_edge.cli import common
        from elsi_edge.machine import cores
        from elsi_edge.runtime.bench.peers import Peer

        self._peers: list[Peer] = []
        threads = session.settings.threads or cores().usable
        try:
            with common.progress("other runtimes", len(models), "runtimes") as bar:
                for name, model in models.items():
                    self._peers.append(Peer(name, model, threads=threads, context=min(session.context, 4096)))
                    bar.advance()
        except BaseException:
            self.close()
            raise
        self._answers: list[BenchAnswer] = []
        self._warm = False

    def answer(self, session: "Session", rows: "Sequence[PromptRow]", ours: "BenchAnswer") -> None:
        """Let every one answer the prompt of our last answer if it was a first turn; they take turns at going first."""
        from elsi_edge.runtime.options import GenerateOptions

        place = len(self._answers)
        self._answers.append(ours)
        if ours.turn:
            return
        row = next(row for row in rows if row.id == ours.id)
        ids = session.encode(row.turns[0], GenerateOptions())
        order = self._peers[place % len(self._peers) :] + self._peers[: place % len(self._peers)]
        for peer in order:
            if not self._warm:
                peer.warm_up(ids)
            peer.answers[place] = peer.answer(ids, max(1, len(ours.plain.token_ids)))
        self._warm = True

    def score(self, windows: "Sequence[Sequence[int]]") -> None:
        """Every one's scores of the windows; a runtime's own speculation has the weights of its plain form."""
        from elsi_edge.cli import common

        found: dict[tuple[str, str], Scores | str] = {}
        by_weights = {(peer.name.partition("+")[0], peer.model): peer for peer in self._peers}
        with common.progress("their perplexity", len(by_weights) * len(windows), "windows") as bar:
            for weights, peer in by_weights.items():
                found[weights] = peer.score(windows, advance=lambda: bar.advance())
        for peer in self._peers:
            peer.scores = found[peer.name.partition("+")[0], peer.model]

    def report(self, answers: "Sequence[BenchAnswer]", own: "Scores | None") -> list[dict[str, Any]]:
        """An object for each; `own` are our scores where perplexity was asked for."""
        from elsi_edge.runtime.bench.peers import peer_report

        return [peer_report(peer, answers, own) for peer in self._peers]

    def close(self) -> None:
        """End the children."""
        for peer in self._peers:
            peer.close()


def peers_of(against: str | None, models: Sequence[str]) -> dict[str, str | None]:
    """The runtimes of --against with what --peer-model names for them. Raises UsageError, MissingExtraError."""
    from elsi_edge.errors import UsageError
    from elsi_edge.runtime.bench.peers import require_peers

    names = [] if against is None else [name.strip() for name in against.split(",")]
    require_peers(names)
    given = {}
    said = f"which names {', '.join(names)}" if names else "which is missing"
    for text in models:
        name, equals, path = text.partition("=")
        if not equals or not any(one.partition("+")[0] == name for one in names):
            raise UsageError(f"--peer-model {text!r} must be NAME=PATH for a runtime of --against, {said}")
        if not Path(path).exists():
            raise UsageError(f"--peer-model {text}: {path} is not there")
        given[name] = path
    return {name: given.get(name.partition("+")[0]) for name in names}


def find_peer(name: str, model: str) -> str:
    """The built-in model's GGUF, or what onnxruntime-genai's builder makes of it. Raises UsageError."""
    from elsi_edge import builtin, cache
    from elsi_edge.errors import UsageError

    gguf = builtin.gguf()
    runtime = name.partition("+")[0]
    if model != builtin.NAME or gguf is None:
        kind = "a directory that its builder wrote" if runtime == "onnxruntime-genai" else "a GGUF file"
        raise UsageError(f"where {runtime} finds {model} is not known: give --peer-model {runtime}=PATH, {kind}")
    if runtime != "onnxruntime-genai":
        return str(gguf)
    return str(cache.get_or_build(f"{builtin.NAME}-genai-int4", lambda out: _build_genai(gguf.parent, out)))


def _build_genai(model: Path, out: Path) -> None:
    """What onnxruntime-genai itself would run, by its own command; in a child, whose memory is not this process's."""
    import subprocess
    import sys

    from elsi_edge.cli import common
    from elsi_edge.cli.extras import EXPORT, require_build
    from elsi_edge.errors import ModelError
    from elsi_edge.runtime.bench.memory import last_line

    require_build("a bench against onnxruntime-genai", EXPORT)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(model), "-o", str(out)]
    command += ["-p", "int4", "-e", "cpu", "-c", str(out / "cache")]
    with common.progress("building onnxruntime-genai's int4 model", None, "files"):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ModelError(f"onnxruntime-genai's builder failed on {model}: {last_line(done.stderr)}")


def _roofline(bundle: Path, session: "Session", answers: "Sequence[BenchAnswer]") -> dict[str, Any]:
    import statistics

    from elsi_edge.artifacts import to_plain
    from elsi_edge.bundle import read_manifest
    from elsi_edge.cli import common
    from elsi_edge.machine import cores
    from elsi_edge.runtime.bench.roofline import measure_ceilings, roofline

    threads = session.settings.threads or cores().usable
    with common.progress("bandwidth and matrix peaks", None, ""):
        ceilings = measure_ceilings(session.precision, threads)
    runs = [run for answer in answers for run in answer.plain_runs if run.verifications]
    verifications = sum(run.verifications for run in runs)
    step_ms = 1e3 * sum(run.timings.verify for run in runs) / verifications
    past = round(statistics.mean(run.prompt_tokens + len(run.token_ids) / 2 for run in runs))
    found = roofline(
        read_manifest(bundle).shape,
        session.precision,
        past=past,
        step_ms=step_ms,
        ceilings=ceilings,
        tuning=session.tuning,
        fixed_rows=session.verify_rows,
    )
    value: dict[str, Any] = {**to_plain(found), "reached": found.reached, "words": list(found.words)}
    for point, plain in zip(found.verify, value["verify"], strict=True):
        plain["limit_ms"] = point.limit_ms
    return value


def _memory(bundle: Path, session: "Session") -> dict[str, Any] | None:
    from elsi_edge.artifacts import to_plain
    from elsi_edge.bundle import read_manifest
    from elsi_edge.cli import common
    from elsi_edge.runtime.bench.memory import PROCESSES, measure_memory, one_tap

    with common.progress("memory", PROCESSES, "processes") as bar:
        found = measure_memory(bundle, session.settings, advance=lambda: bar.advance())
    if found is None:
        common.note("memory by component needs /proc/PID/smaps_rollup (Linux 4.14 or later), which is not here")
        return None
    tap = one_tap(read_manifest(bundle))
    return {**to_plain(found), "one_tap": None if tap is None else {**to_plain(tap), "words": tap.words}}


def _limit(bundle: Path, session: "Session", limit: int) -> dict[str, Any]:
    from elsi_edge.artifacts import to_plain
    from elsi_edge.cli import common
    from elsi_edge.runtime.bench.limits import find_smallest

    with common.progress("memory limit", None, "processes") as bar:
        report = find_smallest(bundle, session.settings, limit, advance=lambda: bar.advance())
    found: dict[str, Any] = to_plain(report)
    return found
