"""The one part of the build that pyproject.toml cannot say: the native operators, built where a C++ compiler is.

The result is a plain shared library beside the runtime's modules, loaded by ONNX Runtime, not by Python. Where it
cannot be built, a warning is all that happens.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SOURCES = Path("runtime/native")
_NAME = "elsi_edge.runtime.libelsi_edge_ops"


class BuildLibrary(build_ext):
    """A file name without Python's suffix: the library is the same for every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Path of the library within the package."""
        return str(Path(*fullname.split("."))) + ".so"


setup(
    ext_modules=[
        Extension(
            _NAME,
            sources=sorted(str(path) for path in _SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in _SOURCES.glob("*.h")),
            language="c++",
            # Contraction of a * b + c would let compilers give a row other bits on another path.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-g0",
                "-Wno-maybe-uninitialized",  # GCC 12 warns of its own headers
                "-Wno-uninitialized",
            ],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
