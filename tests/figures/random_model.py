"""A model of a real shape with random weights: what calibration costs on a model that cannot be fetched here.

`python -m tests.figures.random_model DIR --like qwen3-4b --blocks 8` (or `llama-1b`) writes bfloat16 safetensors, one
file for what stands outside the blocks and one for each block, a few megabytes in memory at a time, with the tokenizer
of the built-in model, whose ids lie below every vocabulary here.
"""

import argparse
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsi_edge.weights import INDEX_FILE

_DRAWN = 1 << 22  # values at a time: 16 MB
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "eos_token_id": 2,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    # Llama-3.2-1B's numbers, its rotary scaling left out
    "llama-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
    },
    # 20 million parameters, to try a script on
    "llama-20m": {
        **_LLAMA,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 56000,
    },
    # 150 million parameters: small enough for a test of what loading holds
    "qwen3-150m": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000,
        "vocab_size": 56000,
    },
}


def config(like: str, blocks: int | None = None) -> dict[str, Any]:
    """config.json of a shape, cut to so many blocks."""
    return {**SHAPES[like], **({} if blocks is None else {"num_hidden_layers": blocks})}


def parameter_shapes(config: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Name to shape of the tensors of each file: what stands outside the blocks, then each block."""
    width, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    normed = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if config["model_type"] == "qwen3" else {}
    block = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        **normed,
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    outside = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    return [
        outside,
        *(
            {f"model.layers.{index}.{name}.weight": shape for name, shape in block.items()}
            for index in range(config["num_hidden_layers"])
        ),
    ]


def write(directory: Path, config: Mapping[str, Any], *, seed: int = 0) -> int:
    """Write config.json and the weights; the parameters written."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1))
    draw, size = np.random.default_rng(seed), 0
    place: dict[str, str] = {}
    groups = parameter_shapes(config)
    for number, shapes in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        size += _write_shard(directory / file, shapes, draw, config["num_hidden_layers"])
        place |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": 2 * size}, "weight_map": place}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return size


def _write_shard(file: Path, shapes: Mapping[str, tuple[int, ...]], draw: np.random.Generator, blocks: int) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            left = int(np.prod(shape))
            while left:
                values = draw.standard_normal(min(left, _DRAWN), dtype=np.float32)
                handle.write(_bfloat16(_scaled(values, name, shape, blocks)).data)
                left -= len(values)
    return offset // 2


def _scaled(values: NDArray[np.float32], name: str, shape: tuple[int, ...], blocks: int) -> NDArray[np.float32]:
    """Norms around 1, matrices of unit gain, and what enters the residual stream small, so that it grows slowly."""
    if len(shape) == 1:
        return 1.0 + np.float32(0.1) * values
    gain = 0.02 if "embed" in name else shape[1] ** -0.5
    if "o_proj" in name or "down_proj" in name:
        gain *= (2 * blocks) ** -0.5
    return values * np.float32(gain)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves: rounded toward zero, which random weights do not mind."""
    return (np.ascontiguousarray(values, dtype="<f4").view("<u4") >> 16).astype("<u2")


def copy_tokenizer(directory: Path) -> None:
    """The tokenizer files of the built-in model."""
    from elsi_edge.models import resolve

    source = resolve("smollm2-135m-instruct").directory
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def main() -> None:
    """Write the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--like", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the real one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size = write(options.directory, config(options.like, options.blocks), seed=options.seed)
    copy_tokenizer(options.directory)
    print(f"{options.directory}: {size:,} parameters, {2 * size / 1e9:.2f} GB")  # noqa: T201 - a script's result


if __name__ == "__main__":
    main()
