"""`elsi-edge inspect`: what an artefact is, whichever stage made it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elsi_edge.cli import options as opt

if TYPE_CHECKING:
    from elsi_edge.artifacts import LayerSelection, ModelShape
    from elsi_edge.text import TextCodec

_LABEL = 16  # columns
_SIZES = ("bytes", "kv_cache_bytes_per_token", "target weights", "target graphs", "draft", "tokenizer", "other")


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A bundle, selection file, draft or shard directory, or a model's name or directory."
        ),
    ],
    json: opt.Json = False,
) -> None:
    """Show what a bundle, selection, draft, shard set or model holds; a bundle's and a draft's files are checked."""
    from elsi_edge.cli import common

    found = describe(path)
    if json:
        common.emit_json(found)
        return
    for line in _lines(found):
        common.out.print(line, soft_wrap=True)
    if follows := found.get("next"):
        common.next_command(str(follows))


def describe(reference: str) -> dict[str, Any]:
    """Everything that `inspect` shows, as plain values; `kind` names what it is. Sizes in bytes."""
    place = Path(reference).expanduser()
    if reference and place.is_dir():
        for name, read in (("manifest.json", _manifest), ("draft.json", _draft), ("config.json", None)):
            if (place / name).is_file():
                return read(place) if read is not None else _model(reference)
        from elsi_edge.cli.inspect_directory import holdings

        if holds := holdings(place):
            return {"kind": "directory", "path": str(place), "holds": holds}
    if place.is_file() and place.suffix == ".json":
        return _selection(place)
    return _model(reference)


def read_selection(path: Path, *, inside: str | None = None) -> "LayerSelection":
    """A selection file, or what another JSON file holds under the key `inside`. Raises SelectionError naming it."""
    import json

    from elsi_edge.artifacts import LayerSelection
    from elsi_edge.errors import ElsiError, SelectionError

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SelectionError(f"{path} cannot be read ({error}); calibrate again") from error
    if inside is not None and isinstance(value, dict):
        value = value.get(inside)
    if not isinstance(value, dict) or value.get("format") != "elsi-edge-selection":
        raise SelectionError(f"{path} is no selection; make one with: elsi-edge calibrate MODEL")
    if value.get("format_version") != 1:
        raise SelectionError(f"{path} has format version {value.get('format_version')!r}, this elsi-edge reads 1")
    try:
        return LayerSelection.from_json(value, str(path))
    except ElsiError as error:
        raise SelectionError(f"{error}; calibrate again") from error


def _manifest(directory: Path) -> dict[str, Any]:
    """A bundle or a shard set: both keep a manifest.json."""
    import json

    try:
        value = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = None
    if isinstance(value, Mapping) and value.get("format") == "elsi-edge-shards":
        return _shards(directory)
    return _bundle(directory)


def _bundle(directory: Path) -> dict[str, Any]:
    from elsi_edge.bundle import Bundle
    from elsi_edge.cli.bundle_report import components
    from elsi_edge.text import TextCodec

    manifest = Bundle.load(directory).manifest
    sizes = components(manifest)
    selection = manifest.selection
    draft = manifest.draft
    place = shlex.quote(str(directory))
    return {
        "kind": "bundle",
        "path": str(directory),
        "model": manifest.model,
        "precision": manifest.precision,
        "quantisation": dict(manifest.quantisation),
        "licence": manifest.licence,
        "context": manifest.context,
        "kv_cache_bytes_per_token": manifest.shape.kv_bytes_per_token(),
        "plain_only": manifest.plain_only,
        "taps": None if selection is None else selection.taps,
        "tap_convention": manifest.tap_convention,
        "selection": None if selection is None else _selection_values(selection),
        "draft": None
        if draft is None
        else {
            "draft_vocab_size": draft.draft_vocab_size,
            "vocab_coverage": draft.vocab_coverage,
            "draft_to_target_sha256": draft.draft_to_target_sha256,
            "head": draft.head,
        },
        "graphs": dict(manifest.graphs),
        "bytes": sum(sizes.values()),
        "components": sizes,
        "text": _text_values(TextCodec.open(directory)),
        "parity": dict(manifest.parity),
        "shape": _shape_values(manifest.shape),
        "target_fingerprint": manifest.target_fingerprint,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "template_sha256": manifest.template_sha256,
        "created_by": manifest.created_by,
        "format_version": manifest.format_version,
        "next": f"elsi-edge bench {place}" if draft is not None else f"elsi-edge generate {place} 'Hello'",
    }


def _selection(path: Path) -> dict[str, Any]:
    from elsi_edge.cli.inspect_directory import format_of

    # The numbers behind a report hold the selection that was made.
    kind = "calibration" if format_of(path) == "elsi-edge-calibration" else "selection"
    selection = read_selection(path, inside="selection" if kind == "calibration" else None)
    return {"kind": kind, "path": str(path), **_selection_values(selection), "entropy": selection.entropy}


def _selection_values(selection: "LayerSelection") -> dict[str, Any]:
    return {
        "taps": selection.taps,
        "m": selection.m,
        "method": selection.method,
        "state": selection.state,
        "joint_entropy": selection.joint_entropy,
        "keep": selection.keep,
        "prompts": selection.prompts,
        "tokens": selection.tokens,
        **{key: selection.settings[key] for key in ("tokens_read", "eligible_positions") if key in selection.settings},
        "blocks": selection.blocks,
        "target_fingerprint": selection.target_fingerprint,
        "model": selection.model,
    }


def _draft(directory: Path) -> dict[str, Any]:
    from elsi_edge.artifacts import to_plain
    from elsi_edge.cli.extras import TORCH, require_build

    require_build("reading a draft", TORCH)
    from elsi_edge.draft.checkpoint import WEIGHTS, load_draft

    config = load_draft(directory).config
    values = to_plain(config)
    return {
        "kind": "draft",
        "path": str(directory),
        "bytes": (directory / WEIGHTS).stat().st_size,
        **{key: value for key, value in values.items() if key not in ("selection", "training")},
        "selection": _selection_values(config.selection),
        "training": values["training"],
    }


def _shards(directory: Path) -> dict[str, Any]:
    from elsi_edge.cli.extras import TORCH, require_build

    require_build("reading shards", TORCH)
    from elsi_edge.draft.shards import ShardManifest

    manifest = ShardManifest.load(directory)
    return {
        "kind": "shards",
        "path": str(directory),
        "model": manifest.model,
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "answer_tokens": manifest.answer_tokens,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "counts": dict(manifest.counts),
        "settings": dict(manifest.settings),
        "selection": _selection_values(manifest.selection),
        "target_fingerprint": manifest.target_fingerprint,
    }


def _model(reference: str) -> dict[str, Any]:
    from elsi_edge.models import read_source, resolve
    from elsi_edge.text import TextCodec

    source = resolve(reference)
    return {
        "kind": "model",
        "model": reference,
        "path": str(source.directory),
        "origin": source.origin,
        "licence": read_source(source.directory).get("licence", "unknown"),
        "context": source.shape.context,
        "kv_cache_bytes_per_token": source.shape.kv_bytes_per_token(),
        "bytes": sum(file.stat().st_size for file in source.directory.glob("*.safetensors")),
        "text": _text_values(TextCodec.from_model_dir(source.directory)),
        "shape": _shape_values(source.shape),
        "notes": source.notes,
        "target_fingerprint": source.fingerprint,
        "next": f"elsi-edge calibrate {shlex.quote(reference)}",
    }


def _text_values(codec: "TextCodec") -> dict[str, Any]:
    settings = codec.settings
    return {
        "template": settings.template_source or "none; prompts are continued as they are",
        "end_tokens": settings.eos_ids,
        "end_token_sources": dict(settings.eos_sources),
        "generation_defaults_not_used": dict(settings.unused_defaults),
        "vocab_size": codec.vocab_size,
    }


def _shape_values(shape: "ModelShape") -> dict[str, Any]:
    from elsi_edge.artifacts import to_plain

    values: dict[str, Any] = to_plain(shape)
    return values


def _lines(found: Mapping[str, Any]) -> list[str]:
    """Values for people: one a line, nested ones indented below their name."""
    lines: list[str] = []
    for key, value in found.items():
        if key == "next":
            continue
        if key == "holds":
            lines += [
                line for each in value for line in (f"  {each['path']}: {each['what']}", f"    {each['command']}")
            ]
        elif isinstance(value, Mapping):
            entries = [f"  {_name(name, key)}: {_shown(name, item)}" for name, item in value.items()]
            lines += [_labelled(key, "" if entries else "none"), *entries]
        else:
            lines.append(_labelled(_name(key, found.get("kind")), _shown(key, value)))
    return lines


def _name(key: str, of: Any) -> str:
    """A value's name for people; a selection counts under "tokens" the positions that it kept."""
    return "kept positions" if key == "tokens" and of in ("selection", "calibration") else key.replace("_", " ")


def _labelled(key: str, text: str) -> str:
    return f"{key.replace('_', ' '):<{_LABEL}}{'' if len(key) < _LABEL else ' '}{text}".rstrip()


def _shown(key: str, value: Any) -> str:
    from elsi_edge.cli import common

    if value is None:
        return "none"
    if (key, value) == ("method", "explicit"):
        return "given by number, not chosen by a rule"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key in _SIZES:
        return common.size_text(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown("", item) for item in value) or "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_shown(name, item)}" for name, item in value.items()) or "none"
    return str(value)
