"""The `config.json` of another tool's EAGLE-3 draft, checked for what our network computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elsi_edge.draft.layouts.spec import LAYOUTS, Layout
from elsi_edge.errors import DraftError
from elsi_edge.fsio import read_json_object

# What a Llama configuration means where it leaves a key out; the speculators library leaves out what is so.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Switches that change the network: name -> why ours cannot follow.
_REFUSED: Mapping[str, str] = {
    "norm_before_residual": "our network adds attention to the state before its norm (norm_before_residual false)",
    "norm_before_fc": "our network projects the target's states without a norm before",
    "fc_norm": "our network projects the target's states without a norm before",
    "norm_output": "our network hands on its state before the final norm",
    "attention_bias": "our network has no biases",
    "mlp_bias": "our network has no biases",
    "qkv_bias": "our network has no biases",
}


@dataclass(frozen=True, kw_only=True)
class ForeignConfig:
    """What a foreign configuration says, in our words."""

    source: str  # the file, for messages
    layout: Layout
    vocab_size: int  # V
    draft_vocab_size: int  # U
    width: int
    target_width: int  # E
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    depth: int  # blocks
    context: int  # tokens
    norm_eps: float
    rope_theta: float
    layer_ids: tuple[int, ...] | None  # in the layout's own numbers; None where it names none
    unclear_ids: tuple[int, ...] | None  # ids of which nothing says in whose numbers they are
    verifier: str  # the target's name there


def read_config(path: Path) -> ForeignConfig:
    """Read and check a configuration. Raises DraftError naming the key that our network cannot follow."""
    if not path.is_file():
        raise DraftError(f"{path.parent} holds no draft of another tool ({path.name} is missing)")
    value = read_json_object(path, DraftError, remedy="download the draft again")
    layout = _layout(value, path)
    nested = layout.name == "speculators"
    block = value.get("transformer_layer_config", {}) if nested else value
    if not isinstance(block, Mapping):
        raise DraftError(f"{path}: transformer_layer_config is {block!r:.40}, an object is expected")
    outer = {name: item for name, item in value.items() if name not in ("model_type", "hidden_act")}
    _require_ours({**outer, **block}, path)
    numbers = {name: _number(block, name, default, path) for name, default in _DEFAULTS.items()}
    heads, width = int(numbers["num_attention_heads"]), int(numbers["hidden_size"])
    return ForeignConfig(
        source=str(path),
        layout=layout,
        vocab_size=int(numbers["vocab_size"]),
        draft_vocab_size=int(_number(value, "draft_vocab_size", 32000 if nested else numbers["vocab_size"], path)),
        width=width,
        target_width=int(_number(value, "target_hidden_size", width, path)),
        heads=heads,
        kv_heads=int(_number(block, "num_key_value_heads", heads, path)),
        head_width=int(_number(block, "head_dim", width // heads, path)),
        mlp_width=int(numbers["intermediate_size"]),
        depth=_depth(int(numbers["num_hidden_layers"]), layout, path),
        context=int(numbers["max_position_embeddings"]),
        norm_eps=float(numbers["rms_norm_eps"]),
        rope_theta=_rope_theta(block, float(numbers["rope_theta"]), path),
        layer_ids=_layer_ids(value, layout, path),
        unclear_ids=None if nested else _ids(value.get("eagle_aux_hidden_state_layer_ids"), path),
        verifier=_verifier(value),
    )


def _layout(value: Mapping[str, Any], path: Path) -> Layout:
    if (kind := value.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise DraftError(f"{path}: speculators_model_type is {kind!r}; only 'eagle3' can be imported")
        return LAYOUTS["speculators"]
    architectures = value.get("architectures") or ()
    if "hidden_layers_list" in value:
        return LAYOUTS["openvino"]
    if any(name in _FLAT for name in architectures) or "draft_vocab_size" in value:
        return LAYOUTS["specforge"]
    raise DraftError(
        f"{path} has neither speculators_model_type nor draft_vocab_size (architectures {list(architectures)}): it is "
        "no EAGLE-3 draft"
    )


def _require_ours(value: Mapping[str, Any], path: Path) -> None:
    for name, why in _REFUSED.items():
        if value.get(name):
            raise DraftError(f"{path}: {name} is {value[name]!r}, which cannot be imported: {why}")
    for name, wanted in (("model_type", "llama"), ("hidden_act", "silu")):
        if value.get(name, wanted) != wanted:
            raise DraftError(f"{path}: {name} is {value[name]!r}, our network computes {wanted!r} alone")
    if value.get("quantization_config"):
        raise DraftError(f"{path}: the draft is quantised already; give the original weights")
    auxiliary = value.get("eagle_config")
    if isinstance(auxiliary, Mapping) and auxiliary.get("use_aux_hidden_state") is False:
        raise DraftError(f"{path}: use_aux_hidden_state is false: this draft sees the final state, not taps")


def _depth(blocks: int, layout: Layout, path: Path) -> int:
    if not 1 <= blocks <= layout.depth:
        raise DraftError(f"{path}: num_hidden_layers is {blocks}, a draft of this layout has 1 to {layout.depth} here")
    return blocks


def _rope_theta(block: Mapping[str, Any], plain: float, path: Path) -> float:
    """The base frequency, from either place that transformers' versions write it to."""
    theta = plain
    for name in ("rope_scaling", "rope_parameters"):
        value = block.get(name)
        if not value:
            continue
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, Mapping) else value
        if kind != "default":
            raise DraftError(f"{path}: {name} is of type {kind!r}, our network rotates without scaling")
        theta = float(_number(value, "rope_theta", theta, path))
    return theta


def _layer_ids(value: Mapping[str, Any], layout: Layout, path: Path) -> tuple[int, ...] | None:
    auxiliary = value.get("eagle_config") or {}
    if layout.name == "speculators":
        found = value.get("eagle_aux_hidden_state_layer_ids")
    elif layout.name == "openvino":
        found = value["hidden_layers_list"]
    else:
        found = auxiliary.get("eagle_aux_hidden_state_layer_ids") if isinstance(auxiliary, Mapping) else None
    return _ids(found, path)


def _ids(found: Any, path: Path) -> tuple[int, ...] | None:
    if found is None:
        return None
    whole = isinstance(found, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in found)
    if not whole or not found:
        raise DraftError(f"{path}: the ids of the states are {found!r}, a list of numbers is expected")
    return tuple(found)


def _verifier(value: Mapping[str, Any]) -> str:
    config = value.get("speculators_config") or {}
    verifier = config.get("verifier") if isinstance(config, Mapping) else None
    return str(verifier.get("name_or_path") or "") if isinstance(verifier, Mapping) else ""


def _number(value: Mapping[str, Any], name: str, default: Any, path: Path) -> Any:
    found = value.get(name)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > 0:
        raise DraftError(f"{path}: {name} is {found!r}, a number above 0 is expected")
    return found
