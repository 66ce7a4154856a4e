"""The native operators: find the library that a build left beside this module, load it, say what it can do here.

The library is optional: without a compiler at install time it is not there, and the stock graphs run. It is a custom
operator library of ONNX Runtime (domain `elsi.edge`); ctypes reads three plain functions of the same file.
"""

import contextlib
import ctypes
import functools
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from elsi_edge.bundle import NATIVE_FORMAT
from elsi_edge.errors import ProviderError, UsageError
from elsi_edge.runtime.options import SessionSettings
from elsi_edge.runtime.ort import open_graph, resolve_provider, session_options

DOMAIN = "elsi.edge"
LIBRARY = "libelsi_edge_ops.so"  # as setup.py names it
FORMAT = NATIVE_FORMAT  # of the graphs that name the operators; a library of another one is not used
VERSION = 3  # of the kernels: with another one costs are measured again
EXACT_ROWS = 64  # rows in one call for which the tests hold a row's bits to be its own


@dataclass(frozen=True, kw_only=True)
class NativeReport:
    """Whether the native operators can run here, and how."""

    available: bool
    path: str = ""  # instruction set in use: avx512vnni, avx2, neon-i8mm, neon-dot, portable
    paths: tuple[str, ...] = ()  # all that this CPU can run, best first
    library: str = ""  # file
    why_not: str = ""  # one line where it is not available

    def note(self) -> str:
        """One line for people: what runs, or what is lost."""
        if self.available:
            return f"native operators: {self.path}"
        return (
            f"native operators: none ({self.why_not}); ONNX Runtime's own are used, slower, and exact in chains alone"
        )


def report() -> NativeReport:
    """Whether the native operators can run here. Never raises."""
    path = library_path()
    try:
        library = _load(path)
    except ProviderError as error:
        return NativeReport(available=False, library=str(path), why_not=str(error))
    paths = tuple(library.elsi_native_paths().decode().split())
    return NativeReport(available=True, path=_forced or paths[0], paths=paths, library=str(path))


def path_for(graphs: Container[str], settings: SessionSettings, *, role: str = "target-native") -> str:
    """The instruction set on which a bundle with these graphs runs one of them natively; "" where it does not.

    Raises ProviderError, UsageError for the provider.
    """
    return report().path if _wanted(graphs, settings, role) else ""


def note_for(graphs: Container[str], settings: SessionSettings) -> str:
    """What is lost where a bundle with these graphs would run natively and the library is not there; else "".

    Raises as `path_for` does.
    """
    found = report()
    return found.note() if _wanted(graphs, settings, "target-native") and not found.available else ""


def _wanted(graphs: Container[str], settings: SessionSettings, role: str) -> bool:
    on_cpu = resolve_provider(settings.provider) == "CPUExecutionProvider"
    return settings.native and on_cpu and role in graphs


def library_path() -> Path:
    """Where the library lies once it is built."""
    return Path(__file__).resolve().parent / LIBRARY


def register(options: ort.SessionOptions) -> None:
    """Let sessions with these options run graphs that name the operators. Raises ProviderError without the library."""
    path = library_path()
    _load(path)
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime raises several unrelated types
        raise ProviderError(f"ONNX Runtime {ort.__version__} refuses {path}: {str(error).splitlines()[0]}") from error


def open_native(path: Path, settings: SessionSettings) -> ort.InferenceSession:
    """Open a graph that names the operators. Raises as `register` and `elsi_edge.runtime.ort.open_graph` do."""
    options = session_options(settings)
    register(options)
    return open_graph(path, options, settings)


@contextlib.contextmanager
def forced_path(name: str) -> Iterator[None]:
    """Sessions opened inside use the named instruction set: for tests and comparisons. Raises UsageError."""
    global _forced
    library = _load(library_path())
    if not library.elsi_native_force(name.encode()):
        raise UsageError(f"native path {name!r} cannot run here; those that can: {', '.join(report().paths)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        library.elsi_native_force(before.encode())
        _forced = before


_forced = ""  # the path forced at the moment, "" for the best


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise ProviderError(f"{path.name} is not there; it needs a C++ compiler when elsi-edge is installed")
    if _is_stale(path):
        raise ProviderError(f"{path.name} is older than its sources; build it again: pip install -e .")
    try:
        library = ctypes.CDLL(str(path))
        library.elsi_native_paths.restype = ctypes.c_char_p
        library.elsi_native_force.argtypes = [ctypes.c_char_p]
        found = library.elsi_native_format()
    except (OSError, AttributeError) as error:
        raise ProviderError(f"{path.name} cannot be loaded ({error}); install elsi-edge again") from error
    if found != FORMAT:
        raise ProviderError(f"{path.name} has format {found}, this version needs {FORMAT}; install elsi-edge again")
    return library


def _is_stale(path: Path) -> bool:
    """Whether sources beside the library (of an editable install, after a pull) were changed since it was built."""
    sources = [*path.parent.glob("native/*.cpp"), *path.parent.glob("native/*.h")]
    return any(source.stat().st_mtime > path.stat().st_mtime for source in sources)
