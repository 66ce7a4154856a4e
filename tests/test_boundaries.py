"""What may import what: the device runtime without torch, and the folders that are installed."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import elsi_edge.cli
from elsi_edge import errors

ROOT = Path(__file__).parents[1]
ROOMS = {"elsi_edge": "elsi_edge", "calibration": "elsi_edge.calibration", "export": "elsi_edge.export"}
ROOMS["runtime"] = "elsi_edge.runtime"

# What the `build` extra brings; a device has none of it.
ABSENT = (
    "torch",
    "transformers",
    "optimum",
    "onnx",
    "onnx_ir",
    "onnxruntime_genai",
    "gguf",
    "safetensors",
    "accelerate",
)
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}, None))\n"


def python(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a fresh interpreter where the build extra cannot be imported."""
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120, cwd=ROOT)


def modules_of(folder: str) -> list[str]:
    package = ROOMS[folder]
    found = [path.stem for path in sorted((ROOT / folder).glob("*.py"))]
    if folder == "runtime":
        found += [f"bench.{path.stem}" for path in sorted((ROOT / folder / "bench").glob("*.py"))]
    names = [package if name == "__init__" else f"{package}.{name}" for name in found]
    return [name.removesuffix(".__init__") for name in names]


def test_every_runtime_module_imports_without_the_build_extra() -> None:
    names = modules_of("runtime")
    assert len(names) > 5
    done = python(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_the_top_level_imports_without_the_build_extra() -> None:
    done = python(f"import importlib\nfor name in {modules_of('elsi_edge')!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["", *elsi_edge.cli.VERBS])
def test_help_works_without_the_build_extra(verb: str) -> None:
    done = python(f"from elsi_edge.cli import main\nmain({[verb, '--help'] if verb else ['--help']!r})")
    assert done.returncode == 0, done.stderr
    assert "Usage: elsi-edge" in done.stdout
    if not verb:
        assert all(name in done.stdout for name in elsi_edge.cli.VERBS)


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "from elsi_edge import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy.testing', 'onnxruntime', 'tokenizers', 'jinja2', 'psutil'} & set(sys.modules)\n"
        "sys.exit(f'imported for --help: {heavy}' if heavy else 0)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    code = f"from elsi_edge import models\ntry: models.resolve({str(tmp_path)!r})\nexcept Exception as e: print(e)"
    done = python(code)
    expected = "reading a model needs the package 'optimum', which is not installed: pip install 'elsi-edge[build]'\n"
    assert done.stdout == expected, done.stderr


def test_the_package_list_names_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    places = settings["package-dir"]
    found = set()
    for folder in ROOMS:
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            found.add(".".join([ROOMS[folder], *init.parent.relative_to(ROOT / folder).parts]))
    assert set(settings["packages"]) == found
    assert places == {
        **{package: folder for folder, package in ROOMS.items()},
        "elsi_edge.runtime.bench": "runtime/bench",
    }


def test_rooms_do_not_import_each_other() -> None:
    """calibration and runtime know no other room; export uses the draft, and the runtime to check what will run."""
    allowed: dict[str, set[str]] = {"calibration": set(), "export": {"draft", "runtime"}, "runtime": set()}
    for folder, friends in allowed.items():
        forbidden = {"calibration", "export", "runtime", "draft", "cli"} - friends - {folder}
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in imported(file):
                room = name.removeprefix("elsi_edge.").split(".")[0] if name.startswith("elsi_edge.") else ""
                assert room not in forbidden, f"{file.relative_to(ROOT)} imports {name}"


def imported(file: Path) -> list[str]:
    """Names of all modules that a file imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
    return names


def test_public_errors() -> None:
    """The error tree is a contract: callers catch these names."""
    public = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ElsiError)
    }
    usage = {"UsageError", "ConfigError", "PromptError"}
    other = {"ElsiError", "ModelError", "DataError", "SelectionError", "DraftError", "BundleError", "ParityError"}
    other |= {"ProviderError", "StorageError", "MissingExtraError"}
    assert public == dict.fromkeys(usage, 2) | dict.fromkeys(other, 1)


def test_verbs() -> None:
    expected = "demo build calibrate distill train export draft generate chat bench tune plan inspect doctor cache"
    assert expected.split() == list(elsi_edge.cli.VERBS)
