"""The command line's frame: results on stdout, everything else on stderr, one line for every error."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from elsi_edge import cache, cli, machine
from elsi_edge._version import __version__
from elsi_edge.cli import common, progress
from elsi_edge.errors import MissingExtraError, ModelError, UsageError
from tests.tiny_text import write_model_dir

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.HOME_VARIABLE, str(tmp_path / "home"))


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "elsi_edge", *arguments],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a made-up verb whose body is given, in this process; gives the exit code."""

    def call(body: Callable[[], Any], *arguments: str) -> int:
        def probe(json: bool = typer.Option(False, "--json")) -> None:
            """Probe."""
            body()

        module = ModuleType("elsi_edge.cli.probe")
        module.probe = probe  # type: ignore[attr-defined]
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli, "VERBS", (*cli.VERBS, "probe"))
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        with pytest.raises(SystemExit) as caught:
            cli.main(["probe", *arguments])
        return int(caught.value.code or 0)

    return call


def raising(error: BaseException) -> Callable[[], Any]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ModelError("it is off"), 1, "error: it is off\n"),
        (UsageError("two\n  lines"), 2, "error: two lines\n"),
        (
            MissingExtraError("exporting", extra="build", module="torch"),
            1,
            "error: exporting needs the package 'torch', which is not installed: pip install 'elsi-edge[build]'\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (MemoryError(), 1, "error: out of memory; use a smaller model, batch or context\n"),
        (RuntimeError("odd"), 1, "error: unexpected RuntimeError: odd; --debug shows where\n"),
        (typer.BadParameter("not so"), 2, "error: Invalid value: not so (see 'elsi-edge probe --help')\n"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_errors_are_one_line_on_stderr(
    verb: Callable[..., int], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    assert verb(raising(error), "--json") == code
    assert capsys.readouterr() == ("", line)


def test_debug_shows_the_traceback(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(raising(RuntimeError("odd")), "--debug") == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("error: unexpected RuntimeError: odd\n")


def test_results_and_progress_keep_apart(verb: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        with common.progress("measuring", 2, "prompts") as bar:
            bar.advance()
            bar.advance(1)
        logging.getLogger("elsi_edge.models").info("fetching")
        common.out.print("[bold]not markup[/bold] 1.5 :smile:")
        common.next_command("elsi-edge export m")
        common.emit_json({"a": float("nan"), "b": Path, "c": (1, 2)} | {"b": "é"})

    assert verb(body) == 0
    out, err = capsys.readouterr()
    assert out == '[bold]not markup[/bold] 1.5 :smile:\n{"a": null, "b": "é", "c": [1, 2]}\n'
    assert err == "measuring: 2 prompts\nfetching\nNext: elsi-edge export m\n"


def test_a_bar_on_a_terminal_shows_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    screen = io.StringIO()
    monkeypatch.setattr(common, "err", Console(file=screen, force_terminal=True, width=120, _environ={}))
    with common.progress("fetching", 98e6, "bytes") as bar:
        bar.advance(49e6)
    with common.progress("training", None, "steps") as bar:
        bar.advance(3)
    assert "49.0 MB of 98.0 MB" in screen.getvalue() and "3 steps" in screen.getvalue()


def test_a_bar_is_busy_until_something_is_done() -> None:
    """One batch may be all of a small run: a bar that stands at 0 % until then looks stuck."""
    import io

    from rich.console import Console

    shown = progress.bar_on(Console(file=io.StringIO(), force_terminal=True, width=120), "calibrate", 10, "tokens")
    with shown as bar:
        (task,) = bar._bar.tasks  # type: ignore[attr-defined]
        bar.advance(0)
        assert not task.started
        bar.advance(4)
        assert task.started and task.completed == 4


def test_lines_instead_of_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [0.0], list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def after(seconds: float, amount: float) -> list[str]:
        lines.clear()
        now[0] += seconds
        bar.advance(amount)
        return list(lines)

    with progress.lines_on(lines.append, "calibrate", 20_000, "tokens") as bar:
        assert lines == ["calibrate: 20,000 tokens"]
        assert after(9, 3000) == []  # too soon
        assert after(1, 1000) == ["calibrate: 20% of 20,000 tokens, 400/s, 40 s left"]
        assert after(30, 1000) == []  # less than a tenth
        assert after(30, 0) == ["calibrate: 25% of 20,000 tokens, 71.4/s, 4 min left"]  # but silent for a minute
        assert after(20, 15_000) == []  # done; the verb says what came of it
    lines.clear()
    with progress.lines_on(lines.append, "train", 1.0, "") as bar:
        assert after(60, 0.25) == ["train: 25%, 3 min left"]
    lines.clear()
    with progress.lines_on(lines.append, "warm up", None, "runs") as bar:
        assert after(10, 2) == ["warm up: 2 runs, 0.2/s"]
    lines.clear()
    with progress.lines_on(lines.append, "fetch", 98e6, "bytes") as bar:
        assert after(10, 49e6) == ["fetch: 50% of 98.0 MB, 4.9 MB/s, 10 s left"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (98_362_432, "98.4 MB"), (1500, "1.5 kB"), (2.5e12, "2500.0 GB")],
)
def test_sizes(size: float, text: str) -> None:
    assert common.size_text(size) == text


# --- as a process ----------------------------------------------------------------------------------------------------


def test_version_help_and_usage() -> None:
    assert run("--version").stdout.decode() == f"elsi-edge {__version__}\n"
    shown = run("--help")
    assert shown.returncode == 0 and b"doctor" in shown.stdout and b"cache" in shown.stdout
    for arguments, message in (
        (("bogus",), b"error: No such command 'bogus' (see 'elsi-edge --help')\n"),
        (("doctor", "--bad"), b"error: No such option: --bad (see 'elsi-edge doctor --help')\n"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, b"", message)
    nothing = run()
    assert nothing.returncode == 2 and b"Usage" in nothing.stdout + nothing.stderr


def test_an_emoji_on_an_ascii_terminal_degrades(tmp_path: Path) -> None:
    (cache.models_dir() / "naïve-🙂").mkdir(parents=True)
    plain = run("cache", "list", PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stdout) == (0, b"   0 bytes  na?ve-?\n")
    as_json = run("cache", "list", "--json", PYTHONIOENCODING="ascii")
    assert json.loads(as_json.stdout)["entries"][0]["name"] == "naïve-🙂"


def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import sys; from elsi_edge import cli\n"
        "cli.VERBS += ('flood',)\n"
        "import types, importlib.machinery as m\n"
        "module = types.ModuleType('elsi_edge.cli.flood'); module.__spec__ = m.ModuleSpec(module.__name__, None)\n"
        "def flood() -> None:\n"
        "    for _ in range(10_000): print('x' * 100)\n"
        "module.flood = flood; sys.modules[module.__name__] = module\n"
        "cli.main(['flood'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b"" and process.wait(30) == 1


def test_cache_verbs() -> None:
    write_model_dir(cache.models_dir() / "m")
    listed = json.loads(run("cache", "list", "--json").stdout)
    assert [entry["name"] for entry in listed["entries"]] == ["m"] and listed["bytes"] > 100_000
    missing = run("cache", "prune", "x", "--json")
    assert (missing.returncode, missing.stdout) == (1, b"") and b"'x' is not in the cache" in missing.stderr
    pruned = run("cache", "prune", "m")
    assert pruned.returncode == 0 and pruned.stdout.endswith(b"  m\n") and cache.entries() == []


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert report["version"] == __version__ and "CPUExecutionProvider" in report["providers"]
    assert report["packages"]["numpy"] and report["cpu"]["usable_cores"] >= 1
    assert report["cache"]["path"] == str(cache.models_dir()) and report["cache"]["writable"]
    shown = run("doctor").stdout.decode()
    assert f"elsi-edge  {__version__}, Python" in shown and "missing  " in shown


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from elsi_edge.cli import doctor

    versions = {"numpy": "2.4", "torch": None}
    monkeypatch.setattr(doctor, "_requirements", lambda: {"": ["numpy", "jinja2"], "build": ["torch", "numpy"]})
    monkeypatch.setattr(doctor, "_version", versions.get)
    report = doctor.examine()
    assert report["extras"]["build"] == {"installed": False, "missing": ["torch"], "packages": {"numpy": "2.4"}}
    assert report["problems"] == [
        "the package jinja2: pip install elsi-edge",
        "to export and train (torch): pip install 'elsi-edge[build]'",
    ]


# --- the machine -----------------------------------------------------------------------------------------------------


def test_cpu_quota_is_the_tightest_of_group_and_parents(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    root = tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    assert machine.cpu_quota(root, membership) is None
    membership.write_text("0::/a/b\n")
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(root, membership) is None
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert machine.cpu_quota(root, membership) == 2.5
    membership.write_text("0::/of/the/host\n")  # inside a container: the group's files lie at the root
    (root / "cpu.max").write_text("50000 100000\n")
    assert machine.cpu_quota(root, membership) == 0.5
    membership.write_text("4:memory:/x\n3:cpu,cpuacct:/docker/x\n")  # version 1
    (root / "cpu,cpuacct").mkdir()
    (root / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    (root / "cpu,cpuacct" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(root, membership) is None
    (root / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("150000\n")
    assert machine.cpu_quota(root, membership) == 1.5


@pytest.mark.parametrize(("affinity", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (1, 4.0, 1), (4, 0.5, 1)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, affinity: int, quota: float | None, usable: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.cores() == machine.Cores(affinity=affinity, quota=quota, usable=usable)


def test_cpu_features(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "model name\t: A CPU\nflags\t\t: fpu avx2 avx512_vnni\n\nmodel name\t: A CPU\nflags\t\t: fpu avx2\n"
    )
    assert (machine.cpu_features(info), machine.cpu_name(info)) == (["avx2", "avx512_vnni"], "A CPU")
    info.write_text("Features\t: fp asimd asimddp i8mm\n")
    assert machine.cpu_features(info) == ["asimd", "asimddp", "i8mm"]
    assert machine.cpu_features(tmp_path / "nothing") == []
