"""A byte-level tokenizer and Hugging Face directories of a few kilobytes, made without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from elsi_edge.weights import write_tensors

PAGE = (
    "Marn keeps a small ferry on the river Ull. Every morning she counts the planks, coils the rope, and waits for the "
    "first bell. The mill on the far bank needs flour sacks carried over, and the children need a way to school. "
    "In winter the river freezes, and Marn walks across with a long pole. Once, on the ninth of March, 1742, the ice "
    "broke; she lay flat, as her mother had taught her, and the pole held. 'Never trust blue ice,' she tells them. "
) * 3
CHATML = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|stop|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "</s>", "<|turn|>", "<|stop|>", "<|end|>")  # ids 0 to 5


def build_tokenizer(*, vocab_size: int = 300, bos: bool = False, added: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE trained on `PAGE`; with `bos` its post-processor prepends `<s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PAGE], trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_text_files(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    template: str | None = CHATML,
    tokenizer_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """The tokenizer's part of a model directory; `template` goes into `chat_template.jinja`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **(tokenizer_config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "vocab_size": 300,
    "eos_token_id": 2,
}


def llama_weights(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random float32 weights of a tied Llama, by Hugging Face name."""
    draw = np.random.default_rng(seed)
    width, mlp = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for block in range(config["num_hidden_layers"]):
        at = f"model.layers.{block}."
        shapes |= {
            at + "input_layernorm.weight": (width,),
            at + "post_attention_layernorm.weight": (width,),
            at + "self_attn.q_proj.weight": (queries, width),
            at + "self_attn.k_proj.weight": (keys, width),
            at + "self_attn.v_proj.weight": (keys, width),
            at + "self_attn.o_proj.weight": (width, queries),
            at + "mlp.gate_proj.weight": (mlp, width),
            at + "mlp.up_proj.weight": (mlp, width),
            at + "mlp.down_proj.weight": (width, mlp),
        }
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_model_dir(
    directory: Path,
    *,
    config: Mapping[str, Any] = CONFIG,
    shards: tuple[str, ...] = (),
    weights: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """A whole tiny Llama directory; with `shards` the tensors go into those files by turns, with an index."""
    tensors = weights if weights is not None else llama_weights({**CONFIG, **config})
    write_text_files(directory, build_tokenizer())
    (directory / "config.json").write_text(json.dumps(dict(config)))
    if not shards:
        write_file(directory / "model.safetensors", tensors)
        return directory
    place = {name: shards[index % len(shards)] for index, name in enumerate(sorted(tensors))}
    for file in shards:
        write_file(directory / file, {name: tensors[name] for name in place if place[name] == file})
    index = {"metadata": {}, "weight_map": place}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_file(file: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """One safetensors file."""
    write_tensors(file, {name: array.shape for name, array in tensors.items()}, tensors.items())
