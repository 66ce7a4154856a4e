"""The documentation against the program: pages made from code are current, commands parse, examples run.

A block is a fenced one; what is checked depends on its language: `sh` is a shell's, `python` compiles and imports,
`text` is output, whose lines that begin with `$ elsi-edge` are commands too.
"""

import ast
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from elsi_edge.artifacts import DraftConfig, LayerSelection, ModelShape
from elsi_edge.bundle import BundleManifest, GraphRole
from elsi_edge.export.recipe import Recipe
from tests import commands_page
from tests.cli_run import Run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SOURCES = ("elsi_edge", "calibration", "export", "runtime")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# Options of other programs that pages name.
_FOREIGN = {"--multi_gpu", "--num_processes", "--strict", "--shape"}  # the last in a message for users of Python


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Texts of a page's fenced blocks in one of these languages."""
    for language, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield body


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of every call of ours in one line of a shell; several may stand side by side."""
    words = shlex.split(line.replace("[OPTIONS]", ""), comments=True)
    starts = [i + 1 for i, word in enumerate(words) if word in ("elsi-edge", "elsi_edge")]
    starts = [i for i in starts if words[i - 1] == "elsi-edge" or words[i - 2] == "-m"]
    for start, after in zip(starts, [*(i - 1 for i in starts[1:]), len(words)], strict=False):
        arguments = words[start:after]
        ends = [i for i, word in enumerate(arguments) if word in ("&&", "||", ";", "|", ">", "...")]
        yield arguments[: ends[0]] if ends else arguments


def commands_of(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Arguments of a page's calls, and whether they stand in a block and are thus whole."""
    for body in blocks(page, "sh", "bash", "shell", "text"):
        only_prompts = f"```text\n{body}" in page.read_text(encoding="utf-8")
        for line in body.replace("\\\n", " ").splitlines():
            if not only_prompts or line.startswith("$ "):
                yield from ((arguments, True) for arguments in calls(line))
    for words in _INLINE.findall(prose(page)):
        if re.match(r"(\w+=\S+ )*elsi-edge [a-z]|accelerate .*elsi_edge [a-z]", words):
            yield from ((arguments, False) for arguments in calls(words))


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return commands_page.commands()


def verbs_of(arguments: list[str], known: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the verbs that a call means ("cache list|prune" means two), and what follows them."""
    groups = {name.split()[0] for name in known if " " in name}
    if arguments[0] in groups:
        subs = arguments[1].split("|") if len(arguments) > 1 and not arguments[1].startswith("-") else []
        return [f"{arguments[0]} {sub}" for sub in subs], arguments[2:]
    return [arguments[0]], arguments[1:]


def complaint(arguments: list[str], whole: bool, known: dict[str, Any]) -> str:
    """Why the command line refuses a call, "" where it does not."""
    own = commands_page.root_options() | {"--help"}
    arguments = [word for word in arguments if word not in own]
    if not arguments:
        return ""
    verbs, rest = verbs_of(arguments, known)
    for verb in verbs:
        if verb not in known:
            return f"no verb {verb!r}"
        options = {name for parameter in known[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            if word.startswith("--") and word.split("=")[0] not in options:
                return f"{verb} has no {word}"
        if whole:
            values = ["1" if word in ("N", "H") else word for word in rest]
            try:
                known[verb].make_context(verb, values)
            except Exception as error:  # typer brings click's classes along, or not
                return f"{verb}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path, known: dict[str, Any]) -> None:
    wrong = [
        f"elsi-edge {' '.join(arguments)}: {why}"
        for arguments, whole in commands_of(page)
        if arguments and (why := complaint(arguments, whole, known))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_prose_exist(page: Path, known: dict[str, Any]) -> None:
    every = {name for command in known.values() for p in command.params for name in (*p.opts, *p.secondary_opts)}
    every |= commands_page.root_options() | _FOREIGN
    ours = [words for words in _INLINE.findall(prose(page)) if not words.startswith(("python", "pip", "make"))]
    named = {option for words in ours for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", words)}
    assert not named - every


def test_the_checker_refuses_what_is_wrong(known: dict[str, Any]) -> None:
    assert "no verb" in complaint(["generat", "b"], False, known)
    assert "has no" in complaint(["generate", "b", "p", "--draft-node", "3"], False, known)
    assert complaint(["generate", "b"], True, known) and not complaint(["generate", "b"], False, known)
    assert complaint(["export", "m", "--precision", "int5"], True, known)
    assert [c[0] for c in calls("X=1 elsi-edge doctor && elsi-edge chat b # elsi-edge no")] == ["doctor", "chat"]


def test_commands_page_is_current() -> None:
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page(), "run: python -m tests.commands_page"


def test_pictures_are_current() -> None:
    drawn = runpy.run_path(str(DOCS / "img/draw.py"))["PICTURES"]
    for name, draw in drawn.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == draw(), "run: python docs/img/draw.py"


def test_bundle_page_names_every_key() -> None:
    page = (DOCS / "bundle.md").read_text(encoding="utf-8")
    names = {f.name for kind in (BundleManifest, ModelShape, LayerSelection, DraftConfig) for f in fields(kind)}
    names |= set(get_args(GraphRole))
    assert not {name for name in names if f"`{name}`" not in page}


def test_messages_in_troubleshooting_are_said() -> None:
    """Every message of a table's first column, piece by piece between its `...`, stands in the sources."""
    source = "\n".join(
        path.read_text(encoding="utf-8") for room in SOURCES for path in sorted((ROOT / room).rglob("*.py"))
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # adjacent literals are one text
    tables = re.findall(r"^\| message .*\n\|[-|]+\n((?:\|.*\n)+)", prose(DOCS / "troubleshooting.md"), re.MULTILINE)
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
    messages = [words for cell in cells for words in _INLINE.findall(cell)]
    assert len(messages) >= 20
    said = [(words, piece.strip()) for words in messages for piece in words.split("...") if len(piece.strip()) > 6]
    missing = [f"{words!r}: {piece!r}" for words, piece in said if piece not in source]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles_and_its_imports_exist(page: Path) -> None:
    for body in blocks(page, "python"):
        for found in ast.walk(ast.parse(body)):
            if isinstance(found, ast.ImportFrom):
                module = importlib.import_module(found.module or "")
                assert not [name.name for name in found.names if not hasattr(module, name.name)]


def test_recipes_can_be_read() -> None:
    recipes = [tomllib.loads(body) for page in PAGES for body in blocks(page, "toml")]
    assert recipes and all(Recipe(**recipe).bits == 4 for recipe in recipes)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_link_to_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", prose(page)):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("name", ["on-device.md", "bundle.md"])
def test_quick_commands_run(name: str, run: Run, tiny_bundle: Callable[..., Path], known: dict[str, Any]) -> None:
    quick = ("generate", "inspect", "doctor", "cache list")
    bundle, ran = tiny_bundle("int4"), 0
    for body in blocks(DOCS / name, "sh"):
        for line in body.splitlines():
            for arguments in calls(line):
                if verbs_of(arguments, known)[0] and verbs_of(arguments, known)[0][0] in quick:
                    done = run(*(bundle if word == "my-bundle" else word for word in arguments))
                    assert done.code == 0, (arguments, done.err)
                    ran += 1
    assert ran


@pytest.mark.parametrize("name", ["on-device.md", "bundle.md"])
def test_python_runs(name: str, tiny_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    for body in blocks(DOCS / name, "python"):
        exec(compile(body.replace("my-bundle", str(tiny_bundle("int4"))), name, "exec"), {})
    assert capsys.readouterr().out


def test_site_builds_strictly_and_asks_nobody(tmp_path: Path) -> None:
    """No warnings, and no script, style, font or picture from another host."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=120,
    )  # fmt: skip
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|srcset)="(?:https?:)?//[^"]+', text), page.name
        assert not re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//', text), page.name
