"""What the tuner measured for a bundle on a device: the file beside the bundle, and whether it is meant for here."""

import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnxruntime as ort

from elsi_edge.artifacts import Precision, from_plain, to_plain
from elsi_edge.bundle import MANIFEST, read_manifest
from elsi_edge.errors import ConfigError
from elsi_edge.fsio import sha256_file, write_json
from elsi_edge.machine import cores, cpu_features, cpu_name
from elsi_edge.runtime import native_ops
from elsi_edge.runtime.ngram import FROM
from elsi_edge.runtime.options import MAX_DRAFT_NODES, PROPOSALS, SessionSettings
from elsi_edge.runtime.ort import resolve_provider
from elsi_edge.runtime.price import Costs

FORMAT = "elsi-edge-tuning"
FORMAT_VERSION = 1
NO_NATIVE = "none"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a tuning holds: all that decides which kernels run and how fast."""

    cpu: str
    features: tuple[str, ...]  # of the CPU
    threads: int
    provider: str
    onnxruntime: str  # version: kernels change
    native: str = NO_NATIVE  # instruction set and library of the native operators, where they run any graph

    @classmethod
    def here(cls, settings: SessionSettings, graphs: Container[str] = ()) -> "Machine":
        """This machine, as a session with these settings would use it on a bundle with these graphs (roles).

        Raises ProviderError, UsageError.
        """
        path = native_ops.path_for(graphs, settings) or native_ops.path_for(graphs, settings, role="draft-native")
        return cls(
            cpu=cpu_name(),
            features=tuple(cpu_features()),
            threads=settings.threads or cores().usable,
            provider=resolve_provider(settings.provider),
            onnxruntime=ort.__version__,
            native=f"{path}, library {native_ops.VERSION}" if path else NO_NATIVE,
        )

    @property
    def is_native(self) -> bool:
        """Whether the native operators ran a graph."""
        return self.native != NO_NATIVE


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to draft on this device, and what it should bring."""

    mode: Literal["plain", "chain", "tree"]
    draft_nodes: int  # N at most; how many a round really takes depends on their prices
    proposals: tuple[str, ...]  # sources; empty when plain
    tokens_per_s: float  # predicted, without prefill
    plain_tokens_per_s: float  # predicted, of plain decoding
    why: str  # in words

    def __post_init__(self) -> None:
        if not 0 <= self.draft_nodes <= MAX_DRAFT_NODES or any(name not in PROPOSALS for name in self.proposals):
            raise ConfigError(f"a choice of {self.draft_nodes} nodes from {self.proposals} is none")
        if min(self.tokens_per_s, self.plain_tokens_per_s) <= 0.0:
            raise ConfigError("a choice's speeds must be positive")

    @property
    def speedup(self) -> float:
        """Predicted, over plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, kw_only=True)
class ContextCurve:
    """What verifying takes after `past` cached tokens."""

    past: int  # tokens
    verify_ms: Mapping[str, float]  # by rows, "1"..; milliseconds


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A bundle on a device."""

    bundle_sha256: str  # of the manifest, which names every file's hash
    model: str
    precision: Precision
    machine: Machine
    past: int  # tokens in the cache where `verify_ms` was measured
    verify_ms: Mapping[str, float]  # by rows, "1"..; milliseconds
    interpolated: tuple[int, ...]  # rows whose figures are interpolated between measured ones, in every context
    contexts: tuple[ContextCurve, ...]  # the same after more tokens
    draft_entry_ms: float | None  # the draft's first call in a round; None without a draft
    draft_level_ms: float | None  # each further one
    overhead_ms: float  # of a round outside ONNX Runtime
    exact_rows: int  # rows a step up to which the bits (at fp32: the tokens) are those of one row a step; of trees
    # with the native operators, of chains without
    exact_rows_tested: tuple[int, ...]
    copy_gb_per_s: float  # read and written
    matrix_gflop_per_s: float  # float32, 2 per multiply-add
    ngram_prior: tuple[float, ...]  # by kind of match, see `elsi_edge.runtime.ngram.FROM`
    acceptance: Mapping[str, Any]  # by source, depth and rank
    shapes: tuple[Mapping[str, Any], ...]  # every shape considered, with its predicted speed
    choice: Choice
    seconds: float  # that tuning took
    prompts_sha256: str = ""
    created_by: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)  # what cuts short or casts doubt
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for past, curve in ((curve.past, curve.verify_ms) for curve in self.curves):
            known = all(isinstance(curve.get(str(row)), (int, float)) for row in range(1, len(curve) + 1))
            if not curve or not known or not all(0.0 < ms < math.inf for ms in curve.values()):
                raise ConfigError(f"verify_ms at {past} tokens must hold positive times for rows 1, 2, 3, ...")
        if len(self.ngram_prior) != len(FROM) or not all(0.0 < p < 1.0 for p in self.ngram_prior):
            raise ConfigError(f"ngram_prior must hold {len(FROM)} probabilities")

    @property
    def curves(self) -> tuple[ContextCurve, ...]:
        """What verifying takes at every context that was measured, the first among them."""
        return (ContextCurve(past=self.past, verify_ms=self.verify_ms), *self.contexts)

    def costs(self) -> Costs:
        """For pricing candidates, in milliseconds."""
        curves = self.curves[:2]
        entry = self.draft_entry_ms or 0.0
        return Costs(
            contexts=tuple(curve.past for curve in curves),
            verify=tuple(tuple(curve.verify_ms[str(n + 1)] for n in range(len(curve.verify_ms))) for curve in curves),
            entry=entry,
            level=entry if self.draft_level_ms is None else self.draft_level_ms,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"format": FORMAT, **to_plain(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> "Tuning":
        """Read what `to_json` wrote. Raises ConfigError naming `source`."""
        parts = dict(value)
        for key, kind in (("machine", Machine), ("choice", Choice)):
            if not isinstance(parts.get(key), Mapping):
                raise ConfigError(f"{source}: the key {key!r} is missing")
            parts[key] = from_plain(kind, parts[key], source)
        curves = parts.get("contexts")
        if not isinstance(curves, list):
            raise ConfigError(f"{source}: the key 'contexts' is missing")
        parts["contexts"] = tuple(from_plain(ContextCurve, curve, source) for curve in curves)
        return from_plain(cls, parts, source, ignore=("format",))


def tuning_path(bundle: Path, threads: int = 0) -> Path:
    """Where the tuning of a bundle lies: beside it, so that the bundle stays as it is; one file a number of threads,
    that of all usable cores (0) under the plain name."""
    directory = bundle.resolve()
    few = "" if threads in (0, cores().usable) else f".threads-{threads}"
    return directory.with_name(f"{directory.name}.tuning{few}.json")


def bundle_sha256(bundle: Path) -> str:
    """Names a bundle's content: the hash of its manifest, which holds the hash of every file."""
    return sha256_file(bundle / MANIFEST)


def save_tuning(bundle: Path, tuning: Tuning) -> Path:
    """Write the file beside the bundle, whole. Raises StorageError."""
    path = tuning_path(bundle, tuning.machine.threads)
    write_json(path, tuning.to_json())
    return path


def find_tuning(bundle: Path, settings: SessionSettings) -> tuple[Tuning | None, str]:
    """The tuning for this bundle, machine and number of threads, if there is one; else None and a warning.

    The warning is empty where there is no file. What is not meant for here is not used, and never an error.
    """
    path = tuning_path(bundle, settings.threads)
    if not path.is_file():
        path = tuning_path(bundle)
    if not path.is_file():
        return None, ""
    again = f"measure again with: elsi-edge tune {bundle}" + (f" --threads {settings.threads}" * (settings.threads > 0))
    try:
        value = json.loads(path.read_text("utf-8"))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ConfigError(f"it is no {FORMAT} file")
        if value.get("format_version") != FORMAT_VERSION:
            raise ConfigError(f"{path}: format version {value.get('format_version')!r}, this reads {FORMAT_VERSION}")
        tuning = Tuning.from_json(value, str(path))
    except (OSError, ValueError, ConfigError) as error:
        return None, f"ignored {path}: {' '.join(str(error).split())}; {again}"
    if tuning.bundle_sha256 != bundle_sha256(bundle):
        return None, f"ignored {path}: it was measured on another bundle ({tuning.model}); {again}"
    here = Machine.here(settings, read_manifest(bundle).graphs)
    for name in ("threads", "cpu", "features", "provider", "onnxruntime", "native"):
        then, now = getattr(tuning.machine, name), getattr(here, name)
        if then != now:
            shown = [" ".join(v) if isinstance(v, tuple) else v for v in (then, now)]
            what = "native operators" if name == "native" else name
            return None, f"ignored {path}: measured with {what} {shown[0]}, here {shown[1]}; {again}"
    return tuning, ""
