"""What `plan` may be asked about, as numbers: a bundle, a config.json, or a model whose numbers ship. No torch."""

import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elsi_edge.artifacts import DraftConfig, LayerSelection, ModelShape, Precision
from elsi_edge.builtin import NAME
from elsi_edge.errors import ElsiError, ModelError
from elsi_edge.fsio import read_json_object
from elsi_edge.model_shape import read_plain_shape
from elsi_edge.packaged import packaged_config

if TYPE_CHECKING:
    from elsi_edge.bundle import BundleManifest, StaticForm
    from elsi_edge.runtime.device import Device

_DRAFT_VOCAB = 8192  # of the draft that `train` makes unless told
_FLOAT_ON_CPU = 16  # activation bits that the CPU provider has no products for
_CHAIN = 4  # of the chain whose tau an evaluation has at least
_TAU = "chain-4=1.81"  # of an early packaged draft, where none is there


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A model by its numbers."""

    name: str
    shape: ModelShape
    tau: str  # as --tau reads it, when the user gives none
    tau_note: str  # where it comes from
    precision: Precision | None = None  # of a bundle
    context: int | None = None  # tokens that a bundle was exported for
    static: "StaticForm | None" = None  # of a bundle for NPUs
    draft: DraftConfig | None = None  # of a bundle that has one, or the packaged one of the built-in model
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


def planned_form(planned: Planned, device: "Device", asked: Precision | None) -> "tuple[Precision, StaticForm | None]":
    """The precision that is planned, and the sizes of static graphs where the bundle or the device has those alone.

    Raises UsageError for what `export --for npu` does not write.
    """
    from elsi_edge.runtime.plan_static import default_form, require_static_family, require_static_precision

    if planned.static is None and not device.static_only:
        return asked or planned.precision or "int4", None
    own = planned.precision if planned.static is not None else None
    precision = asked or own or "int8"
    require_static_precision(precision)
    require_static_family(planned.shape)
    if planned.static is None:
        return precision, default_form(precision)
    bits = planned.static.activation_bits if precision == own else default_form(precision).activation_bits
    return precision, replace(planned.static, activation_bits=bits)


def static_notes(planned: Planned, device: "Device", form: "StaticForm", asked: int | None) -> list[str]:
    """What of a static plan is not as one may expect; `asked` is --context."""
    notes = []
    if planned.static is None and planned.context is not None:
        notes.append("the bundle's graphs are dynamic, which NPUs do not run: planned is what export --for npu writes")
    if planned.static is not None and asked not in (None, planned.context):
        notes.append(
            f"the bundle's cache has {planned.context:,} slots, which are planned with; --context {asked} takes "
            f"another: elsi-edge export MODEL --for npu --context {asked}"
        )
    if planned.static is None and asked is not None:
        notes.append(f"the cache is of fixed width: elsi-edge export MODEL --for npu --context {asked}")
    if not device.static_only and form.activation_bits == _FLOAT_ON_CPU:
        notes.append(
            "on the CPU provider a static bundle with 16-bit activations computes in float32: no NPU's figures"
        )
    return notes


def draft_of(shape: ModelShape, m: int, draft_vocab: int | None, own: DraftConfig | None = None) -> DraftConfig:
    """The draft that `train` makes for such a target by default, or the model's own, with `m` taps.

    `draft_vocab` None: the own draft's tokens, else the default.
    """
    taps = LayerSelection(taps=tuple(range(m)), method="explicit", blocks=max(shape.blocks, m), width=shape.width)
    if own is not None:
        tokens = own.draft_vocab_size if draft_vocab is None else draft_vocab
        return replace(own, selection=own.selection if own.m == m else taps, draft_vocab_size=tokens)
    return DraftConfig(
        selection=taps,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_width=shape.head_width,
        mlp_width=shape.mlp_width,
        draft_vocab_size=min(draft_vocab or _DRAFT_VOCAB, shape.vocab_size),
        target_vocab_size=shape.vocab_size,
        context=shape.context,
        rope_theta=shape.rope_theta,
        norm_eps=shape.norm_eps,
    )


def _of_bundle(manifest: "BundleManifest", directory: Path) -> Planned:
    draft, notes = manifest.draft, list[str]()
    if draft is None:
        packaged = packaged_config()
        if packaged is not None and packaged.target_fingerprint == manifest.target_fingerprint:
            draft = packaged
        whose = "the packaged draft" if draft is not None else "a draft as train makes it by default"
        notes.append(f"{directory} has no draft; it is planned as if it had {whose}")
    tau, tau_note = _tau_of(draft, "this bundle's draft" if manifest.draft is not None else "the packaged draft")
    tokenizer = directory / "tokenizer.json"
    return Planned(
        name=manifest.model,
        shape=manifest.shape,
        tau=tau,
        tau_note=tau_note,
        precision=manifest.precision,
        context=manifest.context,
        static=manifest.static,
        draft=draft,
        tokenizer=tokenizer.stat().st_size if tokenizer.is_file() else None,
        notes=tuple(notes),
    )


def _tau_of(draft: DraftConfig | None, whose: str) -> tuple[str, str]:
    """What --tau would say for a draft by its own evaluation, or for one that nothing is known of; and why."""
    if (measured := _measured_tau(draft)) is not None:
        return measured[0], f"of {whose} {measured[1]}, without n-grams"
    known = _measured_tau(packaged_config())
    note = f"what the packaged draft of {NAME} reaches: an assumption for this model"
    return (_TAU if known is None else known[0]), note


def _measured_tau(draft: DraftConfig | None) -> tuple[str, str] | None:
    """Of a chain of 4, by replay where the draft's evaluation has that, and how it was measured."""
    evaluation = None if draft is None else draft.training.get("evaluation")
    if not isinstance(evaluation, Mapping):
        return None
    name, replayed = f"chain-{_CHAIN}", evaluation.get("tau")
    by_replay = replayed.get(name) if isinstance(replayed, Mapping) else None
    for value, how in (
        (by_replay, "by replay of held-out answers"),
        (evaluation.get("tau_chain4"), "on held-out text"),
    ):
        if isinstance(value, (int, float)) and 1 <= value <= _CHAIN + 1:
            return f"{name}={value:.4g}", how
    return None


def _of_config(file: Path, name: str) -> Planned:
    if file.suffix == ".gguf":
        raise ModelError(f"{file}: plan reads a config.json; export the model, then plan its bundle")
    config = read_json_object(file, ModelError, remedy="plan reads a model's config.json")
    read = read_plain_shape(file, config)
    tokenizer = file.parent / "tokenizer.json"
    known = _shipped(name)
    if known is not None and known.shape != read.shape:
        known = None
    tau, note = _tau_of(None, "") if known is None else (known.tau, known.tau_note)
    return Planned(
        name=name,
        shape=read.shape,
        tau=tau,
        tau_note=note,
        draft=None if known is None else known.draft,
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
            draft = packaged_config() if names[0] == NAME else None
            if draft is not None:
                tau, note = _tau_of(draft, "the packaged draft")
            return Planned(name=names[0], shape=read.shape, tau=tau, tau_note=note, draft=draft, notes=read.notes)
    return None


def _configs() -> Path:
    return Path(str(importlib.resources.files("elsi_edge.data").joinpath("configs")))
