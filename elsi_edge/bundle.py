"""The deployable directory: a manifest, graphs, weights and tokenizer; strict to load, atomic to save."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from elsi_edge._version import __version__
from elsi_edge.artifacts import BITS, DraftConfig, LayerSelection, ModelShape, Precision, from_plain, to_plain
from elsi_edge.errors import BundleError, ConfigError
from elsi_edge.fsio import new_directory, sha256_file, storage_errors, write_json

_log = logging.getLogger(__name__)

FORMAT = "elsi-edge-bundle"
FORMAT_VERSION = 1
NATIVE_FORMAT = 5  # of graphs that name native operators; later ones may name some that this version does not have
MANIFEST = "manifest.json"
DRAFT_VOCAB_FILE = "draft_to_target_ids.npy"  # int64 [U], absolute ids

TAP_CONVENTION = "tap t is the residual stream entering block t; 0 the embeddings, L before the final norm"

_DRAFT_FILES = ("draft.", "draft-native.", "projection.", "draft_to_target_ids.")
_NATIVE = "-native"  # how the roles of graphs that name native operators end
_TEXT_FILES = ("tokenizer.json", "text.json")

# Roles a graph can have in a bundle.
GraphRole = Literal[
    "target-chain",
    "target-tree",
    "target-native",
    "target-states",
    "target-states-native",
    "target-batch",
    "target-batch-native",
    "draft",
    "draft-native",
    "projection",
    "static-prefill",
    "static-verify",
    "static-entry",
    "static-level",
]
# Graphs of plain-only bundles, and their forms with the native products and the stock attention.
NATIVE_PRODUCTS: Mapping[GraphRole, GraphRole] = {
    "target-states": "target-states-native",
    "target-batch": "target-batch-native",
}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StaticForm:
    """The fixed sizes of a bundle of static graphs; the cache is as wide as the bundle's context."""

    prefill_rows: int  # P, tokens of a prompt that a call takes
    verify_rows: int  # n, rows of a verification: the root and at most n - 1 drafted nodes
    level_rows: int  # w, nodes that a call of the draft takes; 0 without a draft
    activation_bits: int  # of what the matrices read and yield: 8, 16, or 32 for float

    def __post_init__(self) -> None:
        if min(self.prefill_rows, self.verify_rows) < 1 or self.level_rows < 0:
            raise ConfigError(
                f"static form: {self.prefill_rows} prefill rows, {self.verify_rows} verify rows and {self.level_rows} "
                "level rows cannot be"
            )


def is_native(role: str) -> bool:
    """Whether graphs of a role name native operators."""
    return role.endswith(_NATIVE)


@dataclass(frozen=True, kw_only=True)
class BundleManifest:
    """What a bundle is; `files` is filled when it is written."""

    model: str  # the reference it was made from
    slug: str  # a name for people and work directories
    shape: ModelShape
    target_fingerprint: str  # of the source model
    precision: Precision
    context: int  # longest sequence this bundle runs, tokens
    graphs: Mapping[str, str]  # GraphRole -> file
    selection: LayerSelection | None = None  # None in a plain-only bundle
    draft: DraftConfig | None = None
    quantisation: Mapping[str, Any] = field(default_factory=dict)  # recipes of target and draft
    parity: Mapping[str, Any] = field(default_factory=dict)  # what the check against the source measured
    licence: str = "unknown"  # of the source model
    static: StaticForm | None = None  # of a bundle of static graphs, for NPUs; None in one of dynamic shapes
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    components: Mapping[str, int] = field(default_factory=dict)  # bytes of the files by component, see `components`
    tokenizer_sha256: str = ""  # of the target's tokenizer.json
    template_sha256: str = ""  # of its chat template
    tap_convention: str = TAP_CONVENTION  # what the numbers of the selection's taps mean
    native_format: int = 0  # NATIVE_FORMAT of its native graphs; 0 without any, and before it was written down
    created_by: str = f"elsi-edge {__version__}"
    format_version: int = FORMAT_VERSION

    @property
    def plain_only(self) -> bool:
        """Whether there is no draft."""
        return self.draft is None

    @property
    def draft_precision(self) -> Precision:
        """Of the draft's matrices, as the bundle was exported; the target's in a plain-only bundle."""
        recipe = self.quantisation.get("draft") or {}
        return next((name for name, bits in BITS.items() if bits == recipe.get("bits")), self.precision)

    @property
    def tap_width(self) -> int:
        """M * E, the width of the target graph's extra output; 0 without taps."""
        return 0 if self.selection is None else self.selection.m * self.shape.width

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        value: dict[str, Any] = {"format": FORMAT, **to_plain(self)}
        value["selection"] = None if self.selection is None else self.selection.to_json()
        value["draft"] = None if self.draft is None else self.draft.to_json()
        if self.static is None:
            del value["static"]  # versions before it read such a manifest too
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], source: str) -> Self:
        """Read what `to_json` wrote. Raises ConfigError naming `source`."""
        parts = dict(value)
        for key in ("shape", "files", "graphs"):
            if not isinstance(parts.get(key), Mapping):
                raise ConfigError(f"{source}: the key {key!r} is missing")
        parts["shape"] = from_plain(ModelShape, parts["shape"], source)
        parts["files"] = {name: from_plain(FileEntry, entry, source) for name, entry in parts["files"].items()}
        if parts.get("selection") is not None:
            parts["selection"] = LayerSelection.from_json(parts["selection"], source)
        if parts.get("draft") is not None:
            parts["draft"] = DraftConfig.from_json(parts["draft"], source)
        if parts.get("static") is not None:
            parts["static"] = from_plain(StaticForm, parts["static"], source)
        manifest = from_plain(cls, parts, source, ignore=("format",))
        _require_consistent(manifest, source)
        return manifest


def components(files: Mapping[str, FileEntry]) -> dict[str, int]:
    """Bytes of a bundle's files by component; components without files are not named."""
    sizes: dict[str, int] = {}
    for name, entry in files.items():
        if name.startswith(_DRAFT_FILES):
            part = "draft"
        elif name in _TEXT_FILES:
            part = "tokenizer"
        elif name.startswith("target"):
            part = "target graphs" if name.endswith(".onnx") else "target weights"
        else:
            part = "other"
        sizes[part] = sizes.get(part, 0) + entry.bytes
    order = ("target weights", "target graphs", "draft", "tokenizer", "other")
    return {part: sizes[part] for part in order if part in sizes}


def _require_consistent(manifest: BundleManifest, source: str) -> None:
    """Raise ConfigError for parts that cannot belong to one bundle."""
    draft, selection, limit = manifest.draft, manifest.selection, manifest.shape.context
    if not 1 <= manifest.context <= limit:
        raise ConfigError(f"{source}: the context is {manifest.context} tokens, the model's own limit {limit}")
    if (draft is None) != (selection is None):
        raise ConfigError(f"{source}: it has {'a selection' if draft is None else 'a draft'} alone, not both or none")
    if manifest.tap_convention != TAP_CONVENTION:
        raise ConfigError(f"{source}: its taps are numbered as {manifest.tap_convention!r}, here {TAP_CONVENTION!r}")
    if draft is not None:
        for what, drafts, targets in (
            ("vocabulary", draft.target_vocab_size, manifest.shape.vocab_size),
            ("width", draft.embedding_width, manifest.shape.width),
            ("tokenizer", draft.tokenizer_sha256[:12], manifest.tokenizer_sha256[:12]),
            ("chat template", draft.template_sha256[:12], manifest.template_sha256[:12]),
            ("target weights", draft.target_fingerprint[:12], manifest.target_fingerprint[:12]),
        ):
            if drafts and targets and drafts != targets:
                raise ConfigError(f"{source}: the draft is of another target: its {what} is {drafts}, not {targets}")
    if draft is not None and selection is not None and not draft.selection.same_taps(selection):
        raise ConfigError(
            f"{source}: the selection is {selection.describe()}, the draft sees {draft.selection.describe()}"
        )


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle on disk whose files were checked."""

    directory: Path
    manifest: BundleManifest

    def graph(self, role: GraphRole) -> Path:
        """Path of a graph. Raises BundleError when the bundle has none of this role."""
        name = self.manifest.graphs.get(role)
        if name is None:
            has = ", ".join(sorted(self.manifest.graphs))
            raise BundleError(f"bundle {self.directory} has no {role} graph, it has {has}; export it again")
        return self.directory / name

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read and check a bundle: format, paths inside it, sizes and hashes of every file.

        Native graphs of a later format are left out: the stock ones beside them compute the same, more slowly. Raises
        BundleError naming the file and the two values that disagree. Nothing is written.
        """
        manifest = read_manifest(directory)
        for name, entry in manifest.files.items():
            _check_file(directory, name, entry)
        for role, name in manifest.graphs.items():
            if name not in manifest.files:
                raise BundleError(f"bundle {directory}: graph {role} is {name!r}, which its file list does not name")
        if manifest.native_format > NATIVE_FORMAT:
            _log.warning(
                "%s has native graphs of format %d, this elsi-edge %s runs %d and older: its stock graphs are used; "
                "update elsi-edge, or export again",
                directory,
                manifest.native_format,
                __version__,
                NATIVE_FORMAT,
            )
            stock = {role: name for role, name in manifest.graphs.items() if not is_native(role)}
            manifest = replace(manifest, graphs=stock)
        return cls(directory=directory, manifest=manifest)


def read_manifest(directory: Path) -> BundleManifest:
    """The manifest alone, its format and paths checked but not the files. Raises BundleError."""
    path = directory / MANIFEST
    if not path.is_file():
        raise BundleError(f"{directory} is not a bundle: {MANIFEST} is missing; make one with: elsi-edge export MODEL")
    try:
        with storage_errors(path):
            value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not valid JSON ({error}); export the bundle again") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BundleError(f"{path} is not an {FORMAT} manifest; make a bundle with: elsi-edge export MODEL")
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{path}: format version {version!r}, this elsi-edge {__version__} reads {FORMAT_VERSION}; "
            "export again or use the version that wrote it"
        )
    try:
        manifest = BundleManifest.from_json(value, str(path))
    except ConfigError as error:
        raise BundleError(f"{error}; export the bundle again") from error
    for name in [*manifest.files, *manifest.graphs.values()]:
        _check_path(directory, name)
    return manifest


def _check_path(directory: Path, name: str) -> None:
    """Names are relative, use `/`, and stay inside the bundle."""
    parts = PurePosixPath(name).parts
    if "\\" in name or not parts or name.startswith("/") or ".." in parts or ":" in parts[0]:
        raise BundleError(f"bundle {directory}: file name {name!r} leaves the bundle or is not a plain relative path")
    if not (directory / name).resolve().is_relative_to(directory.resolve()):
        raise BundleError(f"bundle {directory}: file {name!r} is a link to a place outside the bundle")


def _check_file(directory: Path, name: str, entry: FileEntry) -> None:
    path = directory / name
    if not path.is_file():
        raise BundleError(f"bundle {directory}: the file {name} is missing; copy or export it again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleError(
            f"bundle {directory}: {name} has {size} bytes, the manifest says {entry.bytes}; copy it again"
        )
    with storage_errors(path):
        digest = sha256_file(path)
    if digest != entry.sha256:
        raise BundleError(
            f"bundle {directory}: {name} was altered (sha256 {digest[:12]}, the manifest says {entry.sha256[:12]}); "
            "copy it again"
        )


class BundleWriter:
    """A bundle being made in a temporary directory; files are put into `directory`, then `finish` seals it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def finish(self, manifest: BundleManifest) -> BundleManifest:
        """Hash every file and write the manifest, which then names them all."""
        names = sorted(p.relative_to(self.directory).as_posix() for p in self.directory.rglob("*") if p.is_file())
        files = {
            name: FileEntry(bytes=(self.directory / name).stat().st_size, sha256=sha256_file(self.directory / name))
            for name in names
            if name != MANIFEST
        }
        sealed = BundleManifest(**{**manifest.__dict__, "files": files, "components": components(files)})
        write_json(self.directory / MANIFEST, sealed.to_json())
        return sealed


@contextmanager
def new_bundle(final: Path, *, replace: bool = False) -> Iterator[BundleWriter]:
    """Make a bundle beside `final`; it appears there whole when the block ends, and not at all when it raises."""
    with new_directory(final, replace=replace) as temporary:
        yield BundleWriter(temporary)
        if not (temporary / MANIFEST).is_file():
            raise BundleError(f"the bundle for {final} was never finished")
