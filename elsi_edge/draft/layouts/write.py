"""A draft of ours into another tool's layout."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from elsi_edge.artifacts import DraftConfig
from elsi_edge.draft.checkpoint import LoadedDraft
from elsi_edge.draft.layouts.spec import (
    CONFIG,
    OUTER_NAMES,
    PROVENANCE,
    WEIGHTS,
    Layout,
    Target,
    block_names,
    require_taps,
    to_mask,
    to_offsets,
)
from elsi_edge.draft.shapes import block_prefixes
from elsi_edge.errors import DraftError
from elsi_edge.fsio import new_directory, write_bytes, write_json

LAYOUT_VERSION = "0.3.0"  # of the speculators library, whose layout this is
PROVENANCE_FORMAT = "elsi-edge-draft-provenance"
_PROPOSED = 3  # tokens of a greedy proposal, as the library writes by default


def export_draft(
    draft: LoadedDraft, out: Path, layout: Layout, target: Target, *, replace: bool = False
) -> dict[str, tuple[int, ...]]:
    """Write `config.json` and `model.safetensors` (float16, bit for bit ours) to `out`; gives each tensor's shape.

    The embedding table is left out: its loaders take the target's. Beside them `elsi-edge.json` keeps our own
    configuration, so that an import brings everything back. Raises DraftError for what the layout cannot say,
    SelectionError, StorageError.
    """
    check_representable(draft.config, layout)
    tensors = convert(draft, layout)
    data = save(tensors, metadata={"format": "pt"})
    provenance = {
        "format": PROVENANCE_FORMAT,
        "format_version": 1,
        "weights_sha256": hashlib.sha256(data).hexdigest(),
        "draft": draft.config.to_json(),
    }
    with new_directory(out, replace=replace) as directory:
        write_bytes(directory / WEIGHTS, data)
        write_json(directory / CONFIG, layout_config(draft.config, layout, target))
        write_json(directory / PROVENANCE, provenance)
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_representable(config: DraftConfig, layout: Layout) -> None:
    """Raise DraftError, SelectionError for a draft that the layout has no way to write."""
    if config.selection.state == "final-norm":
        raise DraftError(
            f"this draft sees {config.selection.describe()}, the layout {layout.name!r} knows residual states alone; "
            "train a draft on a tap"
        )
    require_taps(layout, config.selection.taps)
    for tap in config.selection.taps:
        layout.layer_id(tap)
    if config.width != config.embedding_width:
        raise DraftError(
            f"this draft is {config.width} wide and its target {config.embedding_width}; the layout {layout.name!r} "
            "has one width for embeddings and states; train one with --width 0"
        )
    if config.depth > layout.depth:
        raise DraftError(
            f"this draft has {config.depth} blocks, the layout {layout.name!r} has room for {layout.depth}; "
            "choose --format speculators"
        )


def convert(draft: LoadedDraft, layout: Layout) -> dict[str, NDArray[Any]]:
    """The draft's tensors under the layout's names, float16; `d2t` int64 [U], `t2d` bool [V]."""
    config = draft.config
    queries, pairs = config.heads * config.head_width, config.kv_heads * config.head_width
    wide: dict[str, NDArray[Any]] = {theirs: draft.tensors[ours] for ours, theirs in OUTER_NAMES.items()}
    for block, prefix in enumerate(block_prefixes(config)):
        ours = {name: draft.tensors[f"{prefix}{name}.weight"] for name in _BLOCK}
        rows = np.split(draft.tensors[f"{prefix}qkv.weight"], (queries, queries + pairs))
        ours |= dict(zip(("q", "k", "v"), rows, strict=True))
        if block == 0:
            ours["embed_norm"] = draft.tensors["embed_norm.weight"]
        wide |= {theirs: ours[name] for name, theirs in block_names(layout, block).items()}
    stored: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(tensor, dtype=np.float16) for name, tensor in wide.items()
    }
    ids = draft.draft_to_target_ids
    return stored | {"d2t": to_offsets(ids), "t2d": to_mask(ids, config.target_vocab_size)}


_BLOCK = ("o", "mlp_norm", "state_norm", "gate", "up", "down")


def layout_config(config: DraftConfig, layout: Layout, target: Target) -> dict[str, Any]:
    """What the layout's `config.json` says."""
    block: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": config.target_vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    ids = [layout.layer_id(tap) for tap in config.selection.taps]
    if layout.name == "speculators":
        return _speculators(block, ids, config, target)
    shared = {"draft_vocab_size": config.draft_vocab_size, "torch_dtype": "float16", "use_cache": True}
    flat: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **block, **shared}
    if layout.name == "openvino":
        return {**flat, "hidden_layers_list": ids}
    return {**flat, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


def _speculators(block: dict[str, Any], ids: list[int], config: DraftConfig, target: Target) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": LAYOUT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": _PROPOSED,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target.model, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": block,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": config.embedding_width,
        "eagle_aux_hidden_state_layer_ids": ids,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
