"""What a user may call a model, turned into a local Hugging Face directory that was checked.

A reference is a directory, a `.gguf` file, a hub id `owner/name`, or the built-in `smollm2-135m-instruct`. No pickle is
opened and no code of a model is run.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elsi_edge import builtin, cache, fsio, hub, weights
from elsi_edge.artifacts import ModelShape, to_plain
from elsi_edge.errors import ModelError
from elsi_edge.model_shape import read_shape

BUILTIN = builtin.NAME
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_KINDS = f"a Hugging Face directory, a .gguf file, a hub id like 'owner/name', or the built-in {BUILTIN!r}"


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """A model on this machine, ready to be read."""

    reference: str  # as the user gave it
    directory: Path  # config.json, tokenizer.json, *.safetensors
    slug: str  # names its work directory
    shape: ModelShape
    origin: str = ""  # where the weights came from, for people
    gguf: Path | None = None  # the GGUF that the directory was made from, when there is one
    notes: tuple[str, ...] = ()  # what had to be assumed, sentences for the user

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over shape and weights; reads every byte (about 0.4 s a GB). Raises ModelError, StorageError."""
        return weights.fingerprint(to_plain(self.shape), weights.list_tensors(self.directory))


def resolve(reference: str) -> SourceModel:
    """Find, fetch where needed, and check a model.

    A local directory, a cached model and HF_HUB_OFFLINE never wait for a network. Raises ModelError in one line for
    everything that is not a readable, supported model; MissingExtraError without the build extra; StorageError.
    """
    if reference == BUILTIN:
        return _open(reference, builtin.fetch(), slug=BUILTIN)
    if not reference.strip():  # as a path it would be the current directory
        raise ModelError(f"unknown model {reference!r}; a model is {_KINDS}")
    path = Path(reference).expanduser()
    if path.is_dir():
        return _open(reference, path.absolute(), slug=_slug(path.resolve().name))
    if path.is_file():
        return _open_file(reference, path.absolute())
    if path.is_absolute() or path.suffix in (".gguf", ".safetensors") or reference.startswith((".", "~")):
        raise ModelError(f"{reference}: no such file or directory")
    if _HUB_ID.match(reference):
        return _open(reference, hub.snapshot(reference), slug=_slug(reference.replace("/", "--")))
    raise ModelError(f"unknown model {reference!r}; a model is {_KINDS}")


def _open_file(reference: str, path: Path) -> SourceModel:
    if path.suffix != ".gguf":
        raise ModelError(f"{reference} is a file of a kind that is not read; a model is {_KINDS}")
    from elsi_edge import gguf_source

    gguf_source.check(path)  # before hashing and caching: a refusal is quick and leaves nothing
    name = f"gguf-{fsio.sha256_file(path)[:16]}"
    directory = cache.get_or_build(
        name, lambda out: gguf_source.convert(path, out, {"kind": "gguf", "file": str(path)})
    )
    return _open(reference, directory, slug=_slug(path.stem), gguf=path)


def _open(reference: str, directory: Path, *, slug: str, gguf: Path | None = None) -> SourceModel:
    config = read_config(directory)
    tensors = weights.list_tensors(directory)
    read = read_shape(directory, config, tensors)
    source = read_source(directory)
    if gguf is None and isinstance(source.get("gguf"), str) and (directory / source["gguf"]).is_file():
        gguf = directory / source["gguf"]
    return SourceModel(
        reference=reference,
        directory=_without_strays(directory),
        slug=slug,
        shape=read.shape,
        origin=str(source.get("origin", directory)),
        gguf=gguf,
        notes=read.notes,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory, refused when it is of a kind that is not supported. Raises ModelError."""
    file = directory / "config.json"
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"{directory} is an adapter (LoRA), not a whole model; merge it into its base and save that")
    if not file.is_file():
        raise ModelError(
            f"{directory} has no config.json; a model directory has config.json, tokenizer.json and safetensors"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        raise ModelError(
            f"{directory} is quantised already ({method}), which is not supported; give the original weights"
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{directory} is an encoder-decoder model ({config.get('model_type')}); only decoders are supported"
        )
    if config.get("auto_map") and not _known_family(config.get("model_type")):
        raise ModelError(
            f"{directory} needs code of its own (auto_map in config.json), which is never run; not supported"
        )
    return config


def read_source(directory: Path) -> dict[str, Any]:
    """source.json of a cached model (origin, sha256, licence), empty for any other directory."""
    file = directory / "source.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _known_family(model_type: object) -> bool:
    if not isinstance(model_type, str) or not model_type.isidentifier():
        return False
    try:
        return importlib.util.find_spec(f"transformers.models.{model_type}") is not None
    except ImportError:
        return False


def _without_strays(directory: Path) -> Path:
    """The directory itself, or a view of it in the cache where only the shards that its index names are seen.

    transformers prefers a lone model.safetensors to the index, so a stray one would be loaded instead of the shards.
    """
    files = set(weights.indexed_files(directory).values()) if (directory / weights.INDEX_FILE).is_file() else set()
    if not files or weights.SINGLE_FILE in files or not (directory / weights.SINGLE_FILE).exists():
        return directory
    key = hashlib.sha256(f"{directory} {sorted(files)}".encode()).hexdigest()[:16]

    def link(view: Path) -> None:
        for file in directory.iterdir():
            if file.is_file() and (file.name in files or file.suffix != ".safetensors"):
                (view / file.name).symlink_to(file.absolute())

    return cache.get_or_build(f"view-{key}", link)


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"
