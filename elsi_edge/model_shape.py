"""A target's numbers, read once from its configuration and checked against its weights.

Field names go through optimum's normalised configurations, so that a family's spelling (`n_head` for
`num_attention_heads`) matters nowhere else. config.json is read as it is; only for a value that it leaves to its
class's default are transformers (and with it torch) imported.
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
    text = config.get("text_config")
    raw = {**config, **text} if isinstance(text, Mapping) else dict(config)
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise ModelError(f"{directory / 'config.json'} names no model_type; it is not a language model's configuration")
    reader = _Reader(directory, raw, _normalised(family))
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
        mlp_width=reader.number(*_MLP, otherwise=lambda: 4 * width),
        vocab_size=reader.number("vocab_size"),
        context=reader.number(*_CONTEXT),
        tied_embeddings=bool(reader.value("tie_word_embeddings")),
        rope_theta=theta,
        norm_eps=reader.positive(*_EPS),
    )
    return ReadShape(shape=shape, notes=notes)


class _Reader:
    """Values by any of their spellings: normalised name, raw key, and last the class's own default."""

    def __init__(self, directory: Path, raw: Mapping[str, Any], normalise: Callable[[Any], Any]) -> None:
        self.directory = directory
        self.raw = raw
        self._normalise = normalise
        self._view = normalise(SimpleNamespace(**raw))

    def find(self, *names: str) -> Any:
        """The first of `names` that config.json gives, or None."""
        return next((found for name in names if (found := getattr(self._view, name, None)) is not None), None)

    def value(self, *names: str) -> Any:
        """As `find`, then the default of the configuration's class. Raises ModelError when there is neither."""
        if (found := self.find(*names)) is not None:
            return found
        view = self._normalise(class_config(self.directory))
        if (found := next((v for name in names if (v := getattr(view, name, None)) is not None), None)) is not None:
            return found
        raise ModelError(f"{self.directory / 'config.json'} gives no {names[0]}, and its class has no default for it")

    def number(self, *names: str, otherwise: Callable[[], int] | None = None) -> int:
        """An integer; `otherwise` stands in before the class's default is asked."""
        found = self.find(*names)
        if found is None:
            found = otherwise() if otherwise is not None else self.value(*names)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise ModelError(
                f"{self.directory / 'config.json'}: {names[0]} is {found!r}, it must be a positive whole number"
            )
        return found

    def positive(self, *names: str) -> float:
        """A number above 0."""
        found = self.value(*names)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 < found < math.inf:
            raise ModelError(f"{self.directory / 'config.json'}: {names[0]} is {found!r}, it must be a number above 0")
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


def _head_width(reader: _Reader, tensors: Mapping[str, TensorRef], width: int, heads: int, kv_heads: int) -> int:
    stated = reader.find("head_dim")
    rows = next((ref.shape[0] for name, ref in tensors.items() if _KEY_WEIGHT.search(name)), None)
    measured = rows // kv_heads if rows is not None and rows % kv_heads == 0 else None
    if stated is not None and measured is not None and stated != measured:
        raise ModelError(
            f"{reader.directory / 'config.json'} says head_dim {stated}, but the key weights have {rows} rows for "
            f"{kv_heads} kv heads, {measured} each; the configuration belongs to another model"
        )
    if stated is not None or measured is not None:
        return int(stated if stated is not None else measured)  # type: ignore[arg-type]
    if width % heads:
        raise ModelError(
            f"{reader.directory / 'config.json'} gives no head_dim, and {heads} heads do not divide {width}"
        )
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
    default = _class_theta(class_config(reader.directory))
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
