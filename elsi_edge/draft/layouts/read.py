"""A draft of another tool into ours. What our network cannot compute is refused by name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.artifacts import DraftConfig, LayerSelection
from elsi_edge.draft.layouts.foreign import ForeignConfig, read_config
from elsi_edge.draft.layouts.spec import (
    CONFIG,
    EMBEDDINGS,
    OUTER_NAMES,
    PROVENANCE,
    WEIGHTS,
    Layout,
    Target,
    block_names,
    default_taps,
    expected_shapes,
    from_offsets,
    to_mask,
)
from elsi_edge.draft.layouts.tensors import read_floats, read_integers, read_mask
from elsi_edge.draft.layouts.write import PROVENANCE_FORMAT
from elsi_edge.draft.shapes import block_prefixes
from elsi_edge.draft.vocab import ids_sha256
from elsi_edge.errors import DraftError, ElsiError, ModelError
from elsi_edge.fsio import sha256_file, storage_errors
from elsi_edge.weights import TensorRef, list_tensors

_MAPS = ("d2t", "t2d")
_LEFT_ALONE = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")  # the target's, or derived
_SAME_TABLE = 1e-2  # largest difference of two embedding tables that are one, in units of the table's largest entry


@dataclass(frozen=True, kw_only=True)
class ImportedDraft:
    """A foreign draft in our terms, ready for `save_draft`."""

    layout: str
    config: DraftConfig
    tensors: dict[str, NDArray[np.float32]]
    draft_to_target_ids: NDArray[np.int64]  # [U], ascending
    notes: tuple[str, ...]  # what was assumed, sentences for the user


def import_draft(directory: Path, target: Target, *, taps: Sequence[int] | None = None) -> ImportedDraft:
    """Read a draft in the layout of speculators or SpecForge for a target; `taps` overrules the ids that it names.

    Rows of the head and columns of `fc` are reordered where ids or states do not ascend; nothing else changes. Raises
    DraftError naming what our network has no place for, or what differs from the target; SelectionError, StorageError.
    """
    foreign = read_config(directory / CONFIG)
    refs = _tensors(directory, foreign.layout)
    notes: list[str] = []
    _require_same_sizes(foreign, target)
    order, tap_list = _taps(foreign, refs, target, taps, notes)
    ids = _vocabulary(foreign, refs, target)
    by_id = np.argsort(ids)
    config = _config(foreign, target, tap_list, ids[by_id])
    _require_shapes(config, foreign.layout, refs)
    _require_same_embeddings(refs, target, notes)
    tensors = _convert(config, foreign.layout, refs)
    columns = tensors["projection.weight"].reshape(config.width, config.m, -1)[:, order]
    tensors["projection.weight"] = np.ascontiguousarray(columns.reshape(config.width, -1))
    tensors["head.weight"] = tensors["head.weight"][by_id]
    config = _with_provenance(directory, config, notes)
    return ImportedDraft(
        layout=foreign.layout.name,
        config=config,
        tensors=tensors,
        draft_to_target_ids=ids[by_id],
        notes=tuple(notes),
    )


def _tensors(directory: Path, layout: Layout) -> dict[str, TensorRef]:
    """The checkpoint's tensors; the first block is called "midlayer" and "layers.0" by turns, in both layouts."""
    try:
        refs = list_tensors(directory)
    except ModelError as error:
        raise DraftError(str(error)) from error
    found = {}
    for name, ref in refs.items():
        name = name.removeprefix("model.")
        for first in ("midlayer.", "layers.0."):
            if name.startswith(first):
                name = layout.first_block + name.removeprefix(first)
                break
        found[name] = ref
    return found


def _require_same_sizes(foreign: ForeignConfig, target: Target) -> None:
    shape = target.shape
    for what, has, wants in (
        ("vocab_size", foreign.vocab_size, shape.vocab_size),
        ("hidden_size", foreign.width, shape.width),
        ("target_hidden_size", foreign.target_width, shape.width),
    ):
        if has != wants:
            raise DraftError(
                f"{foreign.source}: {what} is {has}, the target {target.model} has {wants}; this draft is for another "
                "target, or reads embeddings of its own, which is not supported"
            )


def _taps(
    foreign: ForeignConfig, refs: Mapping[str, TensorRef], target: Target, given: Sequence[int] | None, notes: list[str]
) -> tuple[list[int], tuple[int, ...]]:
    """The order that makes the taps ascend, and the taps in it."""
    blocks = target.shape.blocks
    if given is not None:
        taps = tuple(given)
    elif foreign.layer_ids is not None:
        taps = tuple(foreign.layout.tap(layer_id) for layer_id in foreign.layer_ids)
    elif foreign.unclear_ids is not None:
        raise DraftError(
            f"{foreign.source}: eagle_aux_hidden_state_layer_ids {list(foreign.unclear_ids)} stands outside "
            "eagle_config, and tools count differently there; say which states they are with --taps (tap t enters "
            "block t)"
        )
    else:
        taps = default_taps(blocks)
        notes.append(f"the draft names no states; taken as EAGLE-3's own, taps {', '.join(map(str, taps))}")
    if len(set(taps)) != len(taps) or min(taps) < 0 or max(taps) > blocks:
        raise DraftError(
            f"{foreign.source}: taps {list(taps)} must be different and lie in 0..{blocks}, the target's number of "
            "blocks; give the right ones with --taps"
        )
    fc = refs.get("fc.weight")
    columns = 0 if fc is None or len(fc.shape) != 2 else fc.shape[1]
    if fc is not None and columns != len(taps) * target.shape.width:
        raise DraftError(
            f"fc.weight reads {columns} columns, {len(taps)} taps of width {target.shape.width} make "
            f"{len(taps) * target.shape.width}; give the taps that it was trained on with --taps"
        )
    order = sorted(range(len(taps)), key=lambda place: taps[place])
    return order, tuple(taps[place] for place in order)


def _vocabulary(foreign: ForeignConfig, refs: Mapping[str, TensorRef], target: Target) -> NDArray[np.int64]:
    """Absolute ids in the head's order, [U]."""
    size, target_size = foreign.draft_vocab_size, target.shape.vocab_size
    if "d2t" not in refs:
        if size != target_size:
            raise DraftError(
                f"d2t is missing and the draft's vocabulary is {size}, the target's {target_size}: which tokens it "
                "says is not known"
            )
        return np.arange(size, dtype=np.int64)
    offsets = read_integers(refs["d2t"])
    if offsets.shape != (size,):
        raise DraftError(f"d2t is {list(offsets.shape)}, config.json says draft_vocab_size {size}")
    ids = from_offsets(offsets)
    if ids.min() < 0 or ids.max() >= target_size or len(np.unique(ids)) != size:
        raise DraftError(
            f"d2t names ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different ones for {size} tokens; "
            f"they must be different and below {target_size}: are these absolute ids instead of offsets?"
        )
    if "t2d" in refs and not np.array_equal(mask := read_mask(refs["t2d"]), to_mask(ids, target_size)):
        raise DraftError(
            f"t2d marks {int(mask.sum())} of {len(mask)} target ids, d2t names {size} of {target_size}, and the two "
            "are not the same tokens; download the draft again"
        )
    return ids


def _config(foreign: ForeignConfig, target: Target, taps: tuple[int, ...], ids: NDArray[np.int64]) -> DraftConfig:
    shape = target.shape
    selection = LayerSelection(
        taps=taps,
        method="explicit",
        blocks=shape.blocks,
        width=shape.width,
        target_fingerprint=target.fingerprint,
        model=target.model,
    )
    try:
        return DraftConfig(
            selection=selection,
            width=foreign.width,
            heads=foreign.heads,
            kv_heads=foreign.kv_heads,
            head_width=foreign.head_width,
            mlp_width=foreign.mlp_width,
            draft_vocab_size=len(ids),
            target_vocab_size=shape.vocab_size,
            context=foreign.context,
            rope_theta=foreign.rope_theta,
            norm_eps=foreign.norm_eps,
            depth=foreign.depth,
            target_fingerprint=target.fingerprint,
            tokenizer_sha256=target.tokenizer_sha256,
            template_sha256=target.template_sha256,
            draft_to_target_sha256=ids_sha256(ids),
            training={"imported": {"layout": foreign.layout.name, "verifier": foreign.verifier}},
        )
    except ElsiError as error:
        raise DraftError(f"{foreign.source}: {error}") from error


def _require_shapes(config: DraftConfig, layout: Layout, refs: Mapping[str, TensorRef]) -> None:
    shapes = expected_shapes(config, layout)
    unknown = sorted(set(refs) - set(shapes) - {*_MAPS, EMBEDDINGS, *_LEFT_ALONE})
    if unknown:
        raise DraftError(f"the draft has the weight {unknown[0]!r}, which our network has no place for")
    for name, shape in shapes.items():
        if name not in refs:
            raise DraftError(f"the draft lacks the weight {name!r}; is it an EAGLE-3 draft of one or two blocks?")
        if refs[name].shape != shape:
            raise DraftError(f"{name!r} is {list(refs[name].shape)}, config.json and target ask for {list(shape)}")


def _require_same_embeddings(refs: Mapping[str, TensorRef], target: Target, notes: list[str]) -> None:
    """A table of the draft's own must be the target's: ours reads that one."""
    if EMBEDDINGS not in refs:
        return
    own, theirs = read_floats(refs[EMBEDDINGS]), target.embeddings()
    if theirs is None:
        notes.append("the target's embedding table was not found: it is taken to be the draft's own")
        return
    rows = min(len(own), len(theirs))
    if own.ndim != 2 or own.shape[1] != theirs.shape[1] or rows < target.shape.vocab_size:
        raise DraftError(f"{EMBEDDINGS} is {list(own.shape)}, the target's table {list(theirs.shape)}")
    apart = float(np.abs(own[:rows] - theirs[:rows]).max())
    limit = _SAME_TABLE * float(np.abs(theirs).max())
    if not apart <= limit:
        raise DraftError(
            f"{EMBEDDINGS} differs from the target's table by up to {apart:.3g} (at most {limit:.3g} passes): this "
            "draft has embeddings of its own, ours reads the target's"
        )


def _convert(config: DraftConfig, layout: Layout, refs: Mapping[str, TensorRef]) -> dict[str, NDArray[np.float32]]:
    tensors = {ours: read_floats(refs[theirs]) for ours, theirs in OUTER_NAMES.items()}
    for block, prefix in enumerate(block_prefixes(config)):
        theirs = {name: read_floats(refs[place]) for name, place in block_names(layout, block).items()}
        fused = np.concatenate([theirs.pop(name) for name in ("q", "k", "v")])
        tensors[f"{prefix}qkv.weight"] = fused
        tensors |= {f"{prefix}{name}.weight": tensor for name, tensor in theirs.items()}
    return tensors


def _with_provenance(directory: Path, config: DraftConfig, notes: list[str]) -> DraftConfig:
    """The configuration that an export of ours left beside, where it is of these weights and this target."""
    path = directory / PROVENANCE
    if not path.is_file() or not (directory / WEIGHTS).is_file():
        return config
    try:
        with storage_errors(path):
            value: Any = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(value, dict) and value.get("format") == PROVENANCE_FORMAT
        kept = DraftConfig.from_json(value["draft"], str(path)) if known else None
    except (ValueError, KeyError, ElsiError) as error:
        raise DraftError(f"{path} cannot be read ({error}); delete it to import without it") from error
    if kept is None or value.get("weights_sha256") != sha256_file(directory / WEIGHTS):
        notes.append(f"{PROVENANCE} is of other weights than {WEIGHTS}; it was not used")
        return config
    if kept.target_fingerprint != config.target_fingerprint:
        raise DraftError(
            f"{path} says that this draft was trained for the target {kept.target_fingerprint[:12]}, the model given "
            f"is {config.target_fingerprint[:12]}; give that model"
        )
    return kept if kept.selection.same_taps(config.selection) else config
