"""A target's numbers, read once from its configuration and checked against its weights.

Field names go through optimum's normalised configurations, so that a family's spelling (`n_head` for
`num_attention_heads`) matters nowhere else. config.json is read as it is; only for a value that it leaves to its
class's default are transformers (and with it torch) imported. `read_plain_shape` does without all of them, for the
families that are exported, which spell their fields alike.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elsi_edge.artifacts import ModelShape
from elsi_edge.errors import MissingExtraError, ModelError
from elsi_edge.weights import TensorRef

_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_MLP = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon")
_KEY_WEIGHT = re.compile(r"\.0\.self_attn\.k_proj\.weight\Z")

# Families whose graphs were compared with transformers, block by block, in tests/test_export_families.py.
SUPPORTED_FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")

# What transformers' classes of those families fill in, as far as it matters to a shape.
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "smollm3": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen2": {"num_key_value_heads": 32},
    "mistral": {"num_key_value_heads": 8},
}  # llama and phi3 without num_key_value_heads have as many as query heads
_OWN_NAMES = {"num_layers": "num_hidden_layers"}  # of optimum's names, where config.json has another


@dataclass(frozen=True, kw_only=True)
class ReadShape:
    """A shape, and what had to be assumed to get it: sentences for the user."""

    shape: ModelShape
    notes: tuple[str, ...] = ()


def read_shape(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> ReadShape:
    """The shape of the model in `directory`, whose config.json holds `config`.

    Raises ModelError for a number that is missing, odd, or contradicted by the weights; MissingExtraError without
    optimum.
    """
    file = directory / "config.json"
    family, raw = _raw(file, config)
    reader = _Reader(file, raw, _normalised(family), lambda: class_config(directory))
    return _read(reader, family, tensors)


def read_plain_shape(file: Path, config: Mapping[str, Any]) -> ReadShape:
    """The shape that `config`, the content of `file`, gives by itself: without weights, optimum and transformers.

    Raises ModelError naming the field: missing, odd, or contradicting another; or a family that is not exported.
    """
    family, raw = _raw(file, config)
    require_family(family)
    known = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, **_CLASS_DEFAULTS.get(family, {})}
    raw = {**known, **{name: value for name, value in raw.items() if value is not None}}
    reader = _Reader(file, raw, _plain_names, None)
    read = _read(reader, family, {})
    shape = read.shape
    if shape.heads % shape.kv_heads:
        raise ModelError(
            f"{file}: num_key_value_heads is {shape.kv_heads}, it must divide num_attention_heads, {shape.heads}"
        )
    return read


def require_family(family: str) -> None:
    """Raise ModelError for a family that is not exported."""
    if family not in SUPPORTED_FAMILIES:
        raise ModelError(f"models of type {family!r} are not exported; checked are: {', '.join(SUPPORTED_FAMILIES)}")


def _raw(file: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family, and the configuration of the text model inside."""
    text = config.get("text_config")
    raw = {**config, **text} if isinstance(text, Mapping) else dict(config)
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise ModelError(f"{file} names no model_type; it is not a language model's configuration")
    return family, raw


def _read(reader: "_Reader", family: str, tensors: Mapping[str, TensorRef]) -> ReadShape:
    width, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    kv_heads = reader.number("num_key_value_heads", otherwise=lambda: heads)
    theta, notes = _rope_theta(reader)
    shape = ModelShape(
        family=family,
        blocks=reader.number("num_layers"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=_head_width(reader, tensors, width, heads, kv_heads),
        mlp_width=reader.number(*_MLP, otherwise=None if reader.defaults is None else lambda: 4 * width),
        vocab_size=reader.number("vocab_size"),
        context=reader.number(*_CONTEXT),
        tied_embeddings=bool(reader.value("tie_word_embeddings")),
        rope_theta=theta,
        norm_eps=reader.positive(*_EPS),
    )
    return ReadShape(shape=shape, notes=notes)


class _Reader:
    """Values by any of their spellings: normalised name, raw key, and last the class's own default."""

    def __init__(
        self,
        file: Path,
        raw: Mapping[str, Any],
        normalise: Callable[[Any], Any],
        defaults: Callable[[], Any] | None,
    ) -> None:
        self.file = file
        self.raw = raw
        self._normalise = normalise
        self.defaults = defaults  # what its class fills in; None where nothing may be
        self._view = normalise(SimpleNamespace(**raw))

    def find(self, *names: str) -> Any:
        """The first of `names` that config.json gives, or None."""
        return next((found for name in names if (found := getattr(self._view, name, None)) is not None), None)

    def value(self, *names: str) -> Any:
        """As `find`, then the default of the configuration's class. Raises ModelError when there is neither."""
        if (found := self.find(*names)) is not None:
            return found
        if self.defaults is None:
            raise ModelError(f"{self.file} gives no {_OWN_NAMES.get(names[0], names[0])}, which its size depends on")
        view = self._normalise(self.defaults())
        if (found := next((v for name in names if (v := getattr(view, name, None)) is not None), None)) is not None:
            return found
        raise ModelError(f"{self.file} gives no {names[0]}, and its class has no default for it")

    def number(self, *names: str, otherwise: Callable[[], int] | None = None) -> int:
        """An integer; `otherwise` stands in before the class's default is asked."""
        found = self.find(*names)
        if found is None:
            found = otherwise() if otherwise is not None else self.value(*names)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            name = _OWN_NAMES.get(names[0], names[0]) if self.defaults is None else names[0]
            raise ModelError(f"{self.file}: {name} is {found!r}, it must be a positive whole number")
        return found

    def positive(self, *names: str) -> float:
        """A number above 0."""
        found = self.value(*names)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 < found < math.inf:
            raise ModelError(f"{self.file}: {names[0]} is {found!r}, it must be a number above 0")
        return float(found)


def class_config(directory: Path) -> Any:
    """The configuration as transformers builds it, defaults filled in; imports torch. Raises ModelError."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingExtraError("reading a model", extra="build", module="transformers") from error
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return config.get_text_config()
    except Exception as error:  # of several libraries, depending on what is odd
        raise ModelError(f"{directory / 'config.json'}: {_in_one_line(error)}") from error


def _normalised(family: str) -> Callable[[Any], Any]:
    try:
        from optimum.utils import NormalizedConfigManager
        from optimum.utils.normalized_config import NormalizedTextConfigWithGQA
    except ImportError as error:
        raise MissingExtraError("reading a model", extra="build", module="optimum") from error
    try:
        known: Callable[[Any], Any] = NormalizedConfigManager.get_normalized_config_class(family)
    except KeyError:
        known = NormalizedTextConfigWithGQA  # e.g. Gemma 3, which optimum 2.3 does not list
    return known


def _plain_names(raw: Any) -> SimpleNamespace:
    """A configuration under optimum's names, by the spelling that the exported families share."""
    values = vars(raw)
    return SimpleNamespace(**{**values, **{name: values.get(own) for name, own in _OWN_NAMES.items()}})


def _head_width(reader: _Reader, tensors: Mapping[str, TensorRef], width: int, heads: int, kv_heads: int) -> int:
    stated = None if reader.find("head_dim") is None else reader.number("head_dim")
    rows = next((ref.shape[0] for name, ref in tensors.items() if _KEY_WEIGHT.search(name)), None)
    measured = rows // kv_heads if rows is not None and rows % kv_heads == 0 else None
    if stated is not None and measured is not None and stated != measured:
        raise ModelError(
            f"{reader.file} says head_dim {stated}, but the key weights have {rows} rows for "
            f"{kv_heads} kv heads, {measured} each; the configuration belongs to another model"
        )
    if stated is not None or measured is not None:
        return stated if stated is not None else int(measured or 0)
    if width % heads:
        raise ModelError(f"{reader.file} gives no head_dim, and {heads} heads do not divide {width}")
    return width // heads


def _rope_theta(reader: _Reader) -> tuple[float, tuple[str, ...]]:
    """The base of the rotary embedding in any of transformers' spellings, for full attention where there are two."""
    raw = reader.raw
    candidates: list[Any] = [raw.get("rope_theta")]
    for key in ("rope_parameters", "rope_scaling"):
        nested = raw.get(key)
        if isinstance(nested, Mapping):
            by_type = [v.get("rope_theta") for v in _full_attention_first(nested) if isinstance(v, Mapping)]
            candidates += [nested.get("rope_theta"), *by_type]
    candidates.append(raw.get("rotary_emb_base"))
    for value in candidates:
        if isinstance(value, (int, float)) and value > 0:
            return float(value), ()
    if reader.defaults is None:
        return 0.0, ("config.json gives no rope_theta; nothing that is planned depends on it",)
    default = _class_theta(reader.defaults())
    if default is None:
        return 0.0, ("config.json has no rope_theta: taken as a model without rotary embedding",)
    return default, (f"config.json gives no rope_theta: {default:g}, the default of its class, is used",)


def _full_attention_first(nested: Mapping[str, Any]) -> Iterable[Any]:
    return [nested[name] for name in sorted(nested, key=lambda name: name != "full_attention")]


def _class_theta(config: Any) -> float | None:
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping):
        values = [parameters, *(v for v in _full_attention_first(parameters) if isinstance(v, Mapping))]
        found = next((v["rope_theta"] for v in values if isinstance(v.get("rope_theta"), (int, float))), None)
        if found:
            return float(found)
    value = getattr(config, "rope_theta", None)
    return float(value) if isinstance(value, (int, float)) else None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
