"""The command line: verbs that are imported when they are called, and one place where errors become lines.

Each verb is a function of the same name in `elsi_edge.cli.<verb>` that imports nothing heavy at its top, so that
`elsi-edge --help` is quick and works without torch.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import typer.core

from elsi_edge._version import __version__
from elsi_edge.cli.signals import orderly_end
from elsi_edge.errors import ElsiError

VERBS = (
    *("demo", "build", "calibrate", "distill", "train", "export", "draft"),
    *("generate", "chat", "bench", "tune", "plan", "inspect", "doctor", "cache"),
)
_MODULES = {"cache": "cache_cmd", "draft": "draft_layout"}  # where the module's name is not the verb's
_INTERRUPTED = 130  # as the shell reports SIGINT
_CLOSED_PIPE = 1  # as typer reports it where it sees it first


class _Verbs(typer.core.TyperGroup):
    """A group that imports a verb's module when the verb is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb in VERBS if importlib.util.find_spec(_module(verb)) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(_module(cmd_name))
        group = getattr(module, "app", None)
        if group is None:
            group = typer.Typer(add_completion=False)
            group.command(cmd_name)(getattr(module, cmd_name))
        command = typer.main.get_command(group)
        command.name = cmd_name
        return command


def _module(verb: str) -> str:
    return f"{__name__}.{_MODULES.get(verb, verb)}"


app = typer.Typer(cls=_Verbs, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an unexpected error."),
) -> None:
    """Faster tokens on small devices: export a model with a draft, and decode both on ONNX Runtime."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an error of ours, 2 wrong usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us, a service for one
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows "?" for it; the work was done.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    if debug:  # wherever it stands
        arguments.remove("--debug")
    if own[:1] == ["--version"]:
        typer.echo(f"elsi-edge {__version__}")
        sys.exit(0)
    with orderly_end() as interrupts:
        sys.exit(_run(arguments, debug=debug, interrupts=interrupts))


def _run(arguments: list[str], *, debug: bool, interrupts: Sequence[int]) -> int:
    _log_to_stderr(debug)
    try:
        code = app(args=arguments, prog_name="elsi-edge", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:
            return _say("interrupted", _INTERRUPTED)
        return code if isinstance(code, int) else 0
    except ElsiError as error:
        if debug:
            traceback.print_exc()
        return _say(f"error: {error}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except _usage_error() as error:
        # Without arguments the help was printed instead of a message.
        return _say(f"error: {_usage_text(error)}", 2) if str(error) else 2
    except Exception as error:
        if debug:
            traceback.print_exc()
        # A module that is being imported may turn an interrupt into an error of its own.
        return _say("interrupted", _INTERRUPTED) if interrupts else _say(_unforeseen(error, debug=debug), 1)


def _unforeseen(error: Exception, *, debug: bool) -> str:
    if isinstance(error, MemoryError):
        return "error: out of memory; use a smaller model, batch or context"
    if isinstance(error, OSError):  # of a file that no verb foresaw, or of stdout itself
        return f"error: {error.filename or 'input or output'}: {error.strerror or error}"
    hint = "" if debug else "; --debug shows where"
    return f"error: unexpected {type(error).__name__}: {error}{hint}"


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.write(" ".join(text.split()) + "\n")
        sys.stderr.flush()
    return code


def _usage_error() -> type[Exception]:
    # typer carries click inside or beside it, depending on its version; the class is the same in kind.
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _usage_text(error: Any) -> str:
    context = getattr(error, "ctx", None)
    help_command = f"{context.command_path if context is not None else 'elsi-edge'} --help"
    message = str(error.format_message()).replace("Value error, ", "", 1)  # pydantic's mark, which says nothing
    return f"{message.rstrip('.')} (see '{help_command}')"


def _log_to_stderr(debug: bool) -> None:
    log = logging.getLogger("elsi_edge")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.propagate = False
