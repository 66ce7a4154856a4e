"""Which matrix gets how many bits, and how they are rounded: what `--recipe` reads and the manifest records.

A recipe file is TOML or JSON:

    bits = 4                    # of every matrix that nothing else names; must be the --precision's
    rounding = "least-squares"  # or "nearest", "compensated" (see elsi_edge.export.rounding); unless said, a lm_head of
                                # 4 bits and blocks of 4 bits without offsets are compensated and all others nearest
    offsets = false             # of blocks of 4 bits (see elsi_edge.export.offsets); true unless said, but with
                                # "least-squares"
    lm_head_bits = 4            # 8 unless said, where `bits` is 4
    embedding_bits = 4          # of a table tied to the lm_head: 8 beside a lm_head of 4 bits unless said, else shared
    [matrices]                  # pattern (as a shell's, on names such as layers.3.mlp.down_proj) = 4, 8 or 32 bits
    "layers.0.*" = 8
    "*.down_proj" = 8

Of several patterns that match one matrix, the last one holds. 32 leaves a matrix in float32.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from elsi_edge.artifacts import BITS, BLOCK, Precision
from elsi_edge.errors import ConfigError, DataError, UsageError
from elsi_edge.export.rounding import ACCURACY_LEVEL, Rounding

LM_HEAD = "lm_head"
HEAD_BITS = 8  # of the lm_head beside matrices of 4 bits, unless said: it costs a tenth more bytes and halves the loss
TABLE_BITS = 8  # of an embedding table that shares no blocks: a quarter, and as good as exact
_ALLOWED = (4, 8, 32)
_KEYS = ("bits", "rounding", "offsets", "lm_head_bits", "embedding_bits", "matrices")
_NODE = re.compile(r"(?:/model)?/(.+)/MatMul\Z")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bits and rounding of a target's matrices."""

    bits: int = 4  # of matrices that no pattern names
    rounding: Rounding | None = None  # None = as `rounding_of` says
    offsets: bool | None = None  # of matrices of 4 bits; None = unless rounded by least squares
    lm_head_bits: int | None = None  # None = as a pattern has it, or 8 where `bits` is 4, or `bits`
    embedding_bits: int | None = None  # of a tied table; None = 8 beside a lm_head of 4 bits, else the lm_head's
    matrices: Mapping[str, int] = field(default_factory=dict)  # pattern to bits, later ones first to hold

    def __post_init__(self) -> None:
        named = {"bits": self.bits, **{f"matrices.{name!r}": bits for name, bits in self.matrices.items()}}
        if self.lm_head_bits is not None:
            named["lm_head_bits"] = self.lm_head_bits
        for name, bits in named.items():
            if isinstance(bits, bool) or bits not in _ALLOWED:
                raise ConfigError(f"recipe: {name} is {bits!r}, it must be one of {', '.join(map(str, _ALLOWED))}")
        if self.rounding is not None and self.rounding not in get_args(Rounding):
            raise ConfigError(
                f"recipe: rounding is {self.rounding!r}, it must be one of {', '.join(get_args(Rounding))}"
            )
        if self.offsets not in (None, False, True):
            raise ConfigError(f"recipe: offsets is {self.offsets!r}, it must be true or false")
        if self.offsets and self.rounding == "least-squares":
            raise ConfigError(
                "recipe: offsets is true and rounding 'least-squares', which knows no offsets; drop one, or take "
                '"nearest" or "compensated"'
            )
        head = self.bits_of(LM_HEAD)
        if self.embedding_bits not in (None, TABLE_BITS, head):
            raise ConfigError(
                f"recipe: embedding_bits is {self.embedding_bits!r}, the lm_head has {head} bits; a table has "
                f"{TABLE_BITS}, or the lm_head's 4 where lm_head_bits is 4 too: change one of them"
            )

    def bits_of(self, matrix: str) -> int:
        """Bits of a matrix by its name."""
        if matrix == LM_HEAD and self.lm_head_bits is not None:
            return self.lm_head_bits
        matching = [bits for pattern, bits in self.matrices.items() if fnmatchcase(matrix, pattern)]
        if matching:
            return matching[-1]
        return HEAD_BITS if matrix == LM_HEAD and self.bits == 4 else self.bits

    def has_offsets(self, matrix: str) -> bool:
        """Whether a matrix gets offsets, where its size and weights allow it.

        A lm_head whose blocks are the embedding table's too does not: lookups know no offsets.
        """
        wanted = self.rounding != "least-squares" if self.offsets is None else self.offsets
        shared = matrix == LM_HEAD and self.embedding_bits == 4
        return wanted and not shared and self.bits_of(matrix) == 4

    def rounding_of(self, matrix: str) -> Rounding:
        """How a matrix is rounded.

        Unless told, matrices of 4 bits are compensated, but blocks with offsets nearest: that needs no look at inputs,
        and weights that are Q4_1 already stay as they are.
        """
        if self.rounding is not None:
            return self.rounding
        nearest = self.bits_of(matrix) != 4 or (matrix != LM_HEAD and self.has_offsets(matrix))
        return "nearest" if nearest else "compensated"

    @property
    def compensates(self) -> bool:
        """Whether any rounding may want to know what a matrix's inputs look like."""
        some_of_4 = 4 in {self.bits, self.bits_of(LM_HEAD), *self.matrices.values()}
        return self.rounding == "compensated" or (self.rounding is None and some_of_4)

    def table_bits(self, *, tied: bool) -> int:
        """Bits of the embedding table; one that is tied to the lm_head and has as many shares its blocks.

        Beside a lm_head of 4 bits it has 8 unless said: what compensated rounding makes up for holds for products, not
        for lookups. Raises UsageError for other bits of a table that is not tied.
        """
        if not tied:
            if self.embedding_bits not in (None, TABLE_BITS):
                raise UsageError(
                    f"recipe: embedding_bits is {self.embedding_bits}, but this model's table is not tied to its "
                    f"lm_head and always has {TABLE_BITS} bits; drop it"
                )
            return 32 if self.bits == 32 else TABLE_BITS
        head = self.bits_of(LM_HEAD)
        return self.embedding_bits or (TABLE_BITS if head == 4 else head)

    def require_matches(self, matrices: Iterable[str]) -> None:
        """Raise UsageError for a pattern that names no matrix of the model, with the nearest names."""
        names = sorted(matrices)
        for pattern in self.matrices:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
                raise UsageError(
                    f"recipe: the pattern {pattern!r} names none of the model's {len(names)} matrices; "
                    f"nearest are {', '.join(near)}"
                )

    def to_json(
        self,
        counts: Mapping[int, int] | None = None,
        *,
        roundings: Mapping[str, int] | None = None,
        with_offsets: int = 0,
        table_bits: int | None = None,
    ) -> dict[str, Any]:
        """What the manifest records.

        `counts` says how many matrices got how many bits, `roundings` how many were rounded how, `with_offsets` how
        many have offsets.
        """
        operator = "MatMul" if self.bits == 32 else "MatMulNBits"
        value: dict[str, Any] = {"operator": operator, "bits": self.bits}
        if self.bits != 32 or (counts is not None and set(counts) - {32}):
            used = roundings or {self.rounding or "nearest": 1}
            value |= {"block": BLOCK, "symmetric": with_offsets == 0, "accuracy_level": ACCURACY_LEVEL}
            value |= {"rounding": max(used, key=lambda name: used[name])}
            if len(used) > 1:
                value["matrices_by_rounding"] = dict(sorted(used.items()))
            if counts is not None:
                value["lm_head_bits"] = self.bits_of(LM_HEAD)
        if table_bits is not None:
            value["embedding_bits"] = table_bits
        if self.matrices:
            value["matrices"] = dict(self.matrices)
        if counts is not None:
            value["matrices_by_bits"] = {str(bits): count for bits, count in sorted(counts.items())}
        if with_offsets:
            value["matrices_with_offsets"] = with_offsets
        return value


def matrix_name(node: str) -> str | None:
    """The name that recipes use for a matrix product of the builder's graph; None for another node.

    "/model/layers.3/mlp/down_proj/MatMul" is layers.3.mlp.down_proj.
    """
    found = _NODE.match(node)
    return None if found is None else found[1].replace("/", ".")


def make_recipe(precision: Precision, file: Path | None = None, lm_head_bits: int | None = None) -> Recipe:
    """The recipe of a precision, with what a file and an option change. Raises UsageError naming what disagrees,
    DataError for a file that cannot be read."""
    bits = BITS[precision]
    value = {"bits": bits} if file is None else {"bits": bits, **_read(file)}
    if lm_head_bits is not None:
        if lm_head_bits not in _ALLOWED:
            raise UsageError(f"--lm-head-bits is {lm_head_bits}, it must be one of {', '.join(map(str, _ALLOWED))}")
        if value.get("lm_head_bits") not in (None, lm_head_bits):
            raise UsageError(
                f"--lm-head-bits is {lm_head_bits}, {file} says lm_head_bits {value['lm_head_bits']}; drop one of them"
            )
        value["lm_head_bits"] = lm_head_bits
    try:
        recipe = Recipe(**value)
    except ConfigError as error:
        raise UsageError(f"{file}: {error}" if file is not None else str(error)) from error
    if recipe.bits != bits:
        raise UsageError(f"{file}: bits is {recipe.bits}, --precision {precision} has {bits}; change one of them")
    fewer = [name for name, asked in {LM_HEAD: recipe.bits_of(LM_HEAD), **recipe.matrices}.items() if asked != 32]
    if bits == 32 and fewer:
        raise UsageError(
            f"--precision {precision} leaves every matrix in floats, but {fewer[0]!r} is to have fewer bits; drop "
            "that, or take --precision int8 and give 32 bits to what shall stay in floats"
        )
    return recipe


def _read(file: Path) -> dict[str, Any]:
    """What a recipe file says, its values not looked at. Raises UsageError, DataError."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"the recipe {file} cannot be read: {why}") from error
    try:
        value = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        form = "JSON" if file.suffix == ".json" else "TOML, as which files are read that do not end in .json"
        raise DataError(f"the recipe {file} is not valid {form}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"the recipe {file} holds no table of settings; its keys are {', '.join(_KEYS)}")
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _KEYS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"the recipe {file} has the unknown key {unknown[0]!r}, known are {', '.join(_KEYS)}{hint}")
    if not isinstance(value.get("matrices", {}), dict):
        raise UsageError(f"the recipe {file}: matrices must be a table of patterns and bits")
    return value
