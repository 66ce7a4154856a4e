"""A `.gguf` file to a Hugging Face directory: every tensor and every setting read, or the file refused by name.

Weights are dequantised to float32 one at a time. llama.cpp stores query and key rows permuted for its rotary layout
(`LlamaModel.permute` in its converter), which is undone here.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge import fsio
from elsi_edge.errors import MissingExtraError, ModelError
from elsi_edge.gguf_tokenizer import write_tokenizer
from elsi_edge.weights import write_tensors

SUPPORTED = ("llama",)

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.weight\Z")
# Everything under "llama." that is understood; another key could change what the weights mean.
_KEYS = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
        *("expert_count", "expert_used_count"),
    }
)
_REMEDY = "use the model's Hugging Face directory or hub id instead"


@dataclass(frozen=True, kw_only=True)
class GgufShape:
    """The numbers of a llama-architecture file."""

    blocks: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    context: int
    rope_theta: float
    norm_eps: float


def check(path: Path) -> None:
    """Raise ModelError when the file is broken or not supported; reads its header only."""
    with _reader(path) as reader:
        _checked_names(path, reader, _shape(path, _fields(reader)))


def convert(path: Path, out: Path, source: Mapping[str, Any]) -> None:
    """Write config, weights, tokenizer, template and `source.json` of `path` into the directory `out`.

    Raises ModelError naming the tensor, key, tensor type or pre-tokenizer that is not supported; StorageError.
    """
    with _reader(path) as reader:
        fields = _fields(reader)
        shape = _shape(path, fields)
        names = _checked_names(path, reader, shape)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {hf: [int(n) for n in reversed(tensors[name].shape)] for hf, name in names.items()}
        config = _config(
            fields, shape, vocab=shapes["model.embed_tokens.weight"][0], tied="lm_head.weight" not in names
        )
        write_tensors(out / "model.safetensors", shapes, _arrays(path, tensors, names, shape))
    fsio.write_json(out / "config.json", config)
    eos = sorted({fields[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in fields})
    if eos:
        fsio.write_json(out / "generation_config.json", {"eos_token_id": eos if len(eos) > 1 else eos[0]})
    write_tokenizer(path, fields, out)
    fsio.write_json(out / "source.json", {"origin": f"GGUF {path.name}", **source})


@contextlib.contextmanager
def _reader(path: Path) -> Iterator[Any]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtraError("reading a .gguf file", extra="build", module="gguf") from error
    with fsio.storage_errors(path), path.open("rb") as handle:
        magic = handle.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # numpy's and gguf's own, depending on where the file ends
        raise ModelError(
            f"{path} is a broken or truncated GGUF file ({' '.join(str(error).split())}); get it again"
        ) from error
    yield reader


def _fields(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _shape(path: Path, fields: Mapping[str, Any]) -> GgufShape:
    architecture = fields.get("general.architecture")
    if architecture not in SUPPORTED:
        raise ModelError(
            f"{path}: {architecture} from GGUF is not supported (supported: {', '.join(SUPPORTED)}); {_REMEDY}"
        )
    for name in fields:
        key = name.removeprefix(f"{architecture}.")
        if key != name and key not in _KEYS:
            raise ModelError(f"{path}: its setting {name} ({fields[name]}) is not supported from GGUF; {_REMEDY}")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{path}: the key {architecture}.{key} is missing; {_REMEDY}")
        if not isinstance(value, (int, float, str)):
            raise ModelError(f"{path}: {architecture}.{key} differs between blocks, which is not supported; {_REMEDY}")
        return value

    heads, width = get("attention.head_count"), get("embedding_length")
    head_width = get("attention.key_length", width // heads)
    for key, only in (
        ("rope.dimension_count", head_width),
        ("attention.value_length", head_width),
        ("rope.scaling.type", "none"),
        ("expert_count", 0),
    ):
        if (value := get(key, only)) != only:
            raise ModelError(f"{path}: {architecture}.{key} is {value}, only {only} is supported from GGUF; {_REMEDY}")
    return GgufShape(
        blocks=get("block_count"),
        width=width,
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_width=head_width,
        mlp_width=get("feed_forward_length"),
        context=get("context_length"),
        rope_theta=float(get("rope.freq_base", 10000.0)),  # the format's documented default
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
    )


def _checked_names(path: Path, reader: Any, shape: GgufShape) -> dict[str, str]:
    """Hugging Face name to GGUF name, in the order of writing; exactly the tensors of the architecture."""
    names: dict[str, str] = {}
    for tensor in reader.tensors:
        hf = _hf_name(tensor.name)
        if hf is None:
            raise ModelError(
                f"{path}: its tensor {tensor.name} is not supported from GGUF and would be left unread; {_REMEDY}"
            )
        names[hf] = tensor.name
    wanted = [f"{name}.weight" for name in ("model.embed_tokens", "model.norm")]
    wanted += [f"model.layers.{block}.{name}.weight" for block in range(shape.blocks) for name in _BLOCK.values()]
    if missing := [name for name in wanted if name not in names]:
        raise ModelError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}; get the file again")
    if extra := sorted(set(names) - set(wanted) - {"lm_head.weight"}):
        raise ModelError(f"{path}: {extra[0]} lies beyond its {shape.blocks} blocks; {_REMEDY}")
    return dict(sorted(names.items()))


def _hf_name(name: str) -> str | None:
    match = _TENSOR.match(name)
    if match is None:
        return None
    block, kind = match.groups()
    if block is None:
        return f"{_GLOBAL[kind]}.weight" if kind in _GLOBAL else None
    return f"model.layers.{int(block)}.{_BLOCK[kind]}.weight" if kind in _BLOCK else None


def _arrays(
    path: Path, tensors: Mapping[str, Any], names: Mapping[str, str], shape: GgufShape
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    for hf, name in names.items():
        tensor = tensors[name]
        try:
            array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{path}: tensor {name} is of type {kind}, which cannot be read; {_REMEDY}") from error
        if hf.endswith("q_proj.weight"):
            array = unpermute(array, shape.heads)
        elif hf.endswith("k_proj.weight"):
            array = unpermute(array, shape.kv_heads)
        yield hf, array


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's interleaving of a head's two rotary halves.

    `rows`: [heads * D, E]; llama.cpp keeps row pairs (0, D/2), (1, D/2 + 1), ... next to each other.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _config(fields: Mapping[str, Any], shape: GgufShape, *, vocab: int, tied: bool) -> dict[str, Any]:
    ids = {
        f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.blocks,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.mlp_width,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,  # transformers before 5 reads it here
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "vocab_size": vocab,
        "dtype": "float32",
        **ids,
    }
