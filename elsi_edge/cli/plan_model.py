"""What `plan` may be asked about, as numbers: a bundle, a config.json, or a model whose numbers ship. No torch."""

import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsi_edge.artifacts import DraftConfig, LayerSelection, ModelShape, Precision
from elsi_edge.errors import ElsiError, ModelError
from elsi_edge.fsio import read_json_object
from elsi_edge.model_shape import read_plain_shape

if TYPE_CHECKING:
    from elsi_edge.bundle import BundleManifest

DEFAULT_TAU = ("chain-4=1.81", "what the packaged draft of smollm2-135m-instruct reaches: an assumption for this model")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A model by its numbers."""

    name: str
    shape: ModelShape
    tau: str  # as --tau reads it, when the user gives none
    tau_note: str  # where it comes from
    precision: Precision | None = None  # of a bundle
    draft: DraftConfig | None = None  # of a bundle that has one
    tokenizer: int | None = None  # bytes of tokenizer.json beside the configuration
    notes: tuple[str, ...] = ()


def find_model(reference: str, work: Path | None = None) -> Planned:
    """The model that a user means: a bundle's directory, a model's directory or config.json, or a shipped name.

    Any other name is looked for among the bundles of the work directory. Raises ModelError in one line.
    """
    from elsi_edge.bundle import MANIFEST, read_manifest
    from elsi_edge.bundle_ref import find_bundle

    path = Path(reference).expanduser()
    if reference and (path / MANIFEST).is_file():
        return _of_bundle(read_manifest(path), path)
    if reference and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has neither a {MANIFEST} nor a config.json to plan from")
        return _of_config(path / "config.json", path.resolve().name)
    if path.is_file():
        return _of_config(path, path.resolve().parent.name)
    if (shipped := _shipped(reference)) is not None:
        return shipped
    try:
        found = find_bundle(reference, work).directory
    except ElsiError as error:
        raise ModelError(
            f"no model {reference!r} to plan: neither a bundle, a directory or file config.json, nor one of "
            f"{', '.join(shipped_models())}; the config.json of a hub's model is enough"
        ) from error
    return _of_bundle(read_manifest(found), found)


def shipped_models() -> tuple[str, ...]:
    """Names whose numbers come with the package."""
    return tuple(sorted(path.stem for path in _configs().glob("*.json")))


def draft_of(shape: ModelShape, m: int, draft_vocab: int, bundle_draft: DraftConfig | None = None) -> DraftConfig:
    """The draft that `train` makes for such a target by default, or a bundle's own, with `m` taps."""
    taps = LayerSelection(taps=tuple(range(m)), method="explicit", blocks=max(shape.blocks, m), width=shape.width)
    if bundle_draft is not None:
        values = {**bundle_draft.__dict__, "selection": taps}
        return DraftConfig(**values)
    return DraftConfig(
        selection=taps,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        mlp_width=shape.mlp_width,
        draft_vocab_size=min(draft_vocab, shape.vocab_size),
        target_vocab_size=shape.vocab_size,
        context=shape.context,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
    )


def _of_bundle(manifest: "BundleManifest", directory: Path) -> Planned:
    tau, note = DEFAULT_TAU
    training = {} if manifest.draft is None else manifest.draft.training
    evaluation = training.get("evaluation")
    measured = evaluation.get("tau_chain4") if isinstance(evaluation, Mapping) else None
    if isinstance(measured, (int, float)) and 1 <= measured <= 5:
        tau, note = f"chain-4={measured:.4g}", "of this bundle's draft on held-out answers, without n-grams"
    tokenizer = directory / "tokenizer.json"
    return Planned(
        name=manifest.model,
        shape=manifest.shape,
        tau=tau,
        tau_note=note,
        precision=manifest.precision,
        draft=manifest.draft,
        tokenizer=tokenizer.stat().st_size if tokenizer.is_file() else None,
    )


def _of_config(file: Path, name: str) -> Planned:
    if file.suffix == ".gguf":
        raise ModelError(f"{file}: plan reads a config.json; export the model, then plan its bundle")
    config = read_json_object(file, ModelError, remedy="plan reads a model's config.json")
    read = read_plain_shape(file, config)
    tokenizer = file.parent / "tokenizer.json"
    known = _shipped(name)
    tau, note = DEFAULT_TAU if known is None or known.shape != read.shape else (known.tau, known.tau_note)
    return Planned(
        name=name,
        shape=read.shape,
        tau=tau,
        tau_note=note,
        tokenizer=tokenizer.stat().st_size if tokenizer.is_file() else None,
        notes=read.notes,
    )


def _shipped(reference: str) -> Planned | None:
    for path in sorted(_configs().glob("*.json")):
        value: dict[str, Any] = read_json_object(path, ModelError, remedy="install elsi-edge again")
        names: Sequence[str] = value["names"]
        if reference.lower() in names:
            read = read_plain_shape(path, value["config"])
            taus: Sequence[Mapping[str, Any]] = value["tau"]
            tau = ",".join(f"{entry['shape']}={entry['tau']}" for entry in taus)
            note = "; ".join(str(entry["note"]) for entry in taus)
            return Planned(name=names[0], shape=read.shape, tau=tau, tau_note=note, notes=read.notes)
    return None


def _configs() -> Path:
    return Path(str(importlib.resources.files("elsi_edge.data").joinpath("configs")))
