"""GGUF files: the same model as their Hugging Face form, or refused by the name of what is not read."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from elsi_edge import cache, gguf_source, models
from elsi_edge.errors import ModelError
from elsi_edge.text import TextCodec
from tests.tiny_text import CHATML, CONFIG, SPECIAL, build_tokenizer, llama_weights, write_file, write_text_files

gguf = pytest.importorskip("gguf")

ADDED = ("[[PART]]", "<unit>")
TEXT = "a  b\t3141 [[PART]]7<unit> naïve 🙂\r\n"
VOCAB = 302  # of the tokenizer below, added tokens included
SHAPE = {**CONFIG, "vocab_size": VOCAB}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.HOME_VARIABLE, str(tmp_path / "home"))


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """As llama.cpp's converter writes query and key rows (`LlamaModel.permute`)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    table = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in table:
        return f"{table[stem]}.weight"
    _, _, block, kind = stem.split(".", 3)
    inverse = {hf: ours for ours, hf in gguf_source._BLOCK.items()}
    return f"blk.{block}.{inverse[kind]}.weight"


def write_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[np.float32]],
    tokenizer: Tokenizer,
    *,
    pre: str = "gpt-2",
    architecture: str = "llama",
    extra: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """A tiny Llama as llama.cpp's converter would write it, float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (
        ("block_count", SHAPE["num_hidden_layers"]),
        ("context_length", SHAPE["max_position_embeddings"]),
        ("embedding_length", SHAPE["hidden_size"]),
        ("feed_forward_length", SHAPE["intermediate_size"]),
        ("attention.head_count", SHAPE["num_attention_heads"]),
        ("attention.head_count_kv", SHAPE["num_key_value_heads"]),
        ("rope.dimension_count", SHAPE["head_dim"]),
    ):
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", SHAPE["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", SHAPE["rope_theta"])
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL else 4 if t in ADDED else 1 for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    extra(writer)
    for name, array in tensors.items():
        heads = {"q_proj": SHAPE["num_attention_heads"], "k_proj": SHAPE["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        writer.add_tensor(gguf_name(name), array if heads is None else np.ascontiguousarray(permute(array, heads)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer() -> Tokenizer:
    return build_tokenizer(added=ADDED)


def test_a_gguf_is_the_same_model_as_its_directory(tmp_path: Path) -> None:
    tensors = llama_weights(SHAPE)
    write_text_files(tmp_path / "hf", tokenizer())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**SHAPE, "rms_norm_eps": float(np.float32(1e-5))}))
    write_file(tmp_path / "hf" / "model.safetensors", tensors)
    source = models.resolve(str(tmp_path / "hf"))
    file = write_gguf(tmp_path / "Tiny model.F32.gguf", tensors, tokenizer())
    model = models.resolve(str(file))
    assert model.shape == source.shape
    assert model.fingerprint == source.fingerprint
    assert (model.slug, model.gguf) == ("Tiny-model.F32", file)
    ours, theirs = TextCodec.from_model_dir(model.directory), TextCodec.from_model_dir(source.directory)
    assert ours.encode_raw(TEXT) == theirs.encode_raw(TEXT) and ours.decode(ours.encode_raw(TEXT)) == TEXT
    assert {300, 301} <= set(ours.encode_raw(TEXT))
    assert ours.encode_chat([{"role": "user", "content": TEXT}]) == theirs.encode_chat(
        [{"role": "user", "content": TEXT}]
    )
    assert ours.eos_ids == {2}
    # Found in the cache the second time, by content.
    moved = file.rename(tmp_path / "moved.gguf")
    assert models.resolve(str(moved)).directory == model.directory


def test_a_written_out_head_and_a_second_end_token(tmp_path: Path) -> None:
    tensors = llama_weights(SHAPE)
    tensors["lm_head.weight"] = np.ones((VOCAB, SHAPE["hidden_size"]), np.float32)

    def extra(writer: Any) -> None:
        writer.add_eot_token_id(4)
        writer.add_add_bos_token(True)

    model = models.resolve(str(write_gguf(tmp_path / "m.gguf", tensors, tokenizer(), extra=extra)))
    assert not model.shape.tied_embeddings
    codec = TextCodec.from_model_dir(model.directory)
    assert codec.eos_ids == {2, 4}
    assert codec.encode_raw("Q")[0] == 1 and codec.encode_chat([{"role": "user", "content": "Q"}])[0] != 1


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_known_pre_tokenizers_split_digits_their_own_way(tmp_path: Path, pre: str) -> None:
    model = models.resolve(str(write_gguf(tmp_path / "m.gguf", llama_weights(SHAPE), tokenizer(), pre=pre)))
    stored = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    pieces = [piece for piece, _ in stored.pre_tokenizer.pre_tokenize_str("A 12345's ½x")]
    assert (
        pieces
        == {
            "gpt-2": ["A", "Ġ12345", "'s", "ĠÂ½", "x"],
            "smollm": ["A", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "Â½", "x"],
            "qwen2": ["A", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "Â½", "x"],
            "llama-bpe": ["A", "Ġ", "123", "45", "'s", "Ġ", "Â½", "x"],
        }[pre]
    )
    codec = TextCodec.from_model_dir(model.directory)
    assert codec.encode_raw("A")[0] == (1 if pre == "llama-bpe" else codec.token_id("A"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, r"gemma3 from GGUF is not supported \(supported: llama\)"),
        ({"pre": "deepseek-coder"}, r"its pre-tokenizer 'deepseek-coder' is not known \(known: gpt-2, smollm"),
        (
            {"extra": lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32))},
            r"its tensor rope_freqs\.weight is not supported from GGUF and would be left unread",
        ),
        (
            {"extra": lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))},
            r"its tensor blk\.0\.attn_q\.bias",
        ),
        (
            {"extra": lambda w: w.add_tensor("blk.7.attn_norm.weight", np.ones(64, np.float32))},
            r"layers\.7\..* beyond its 2",
        ),
        (
            {"extra": lambda w: w.add_string("llama.rope.scaling.type", "linear")},
            r"rope\.scaling\.type is linear, only none",
        ),
        ({"extra": lambda w: w.add_float32("llama.logit_scale", 2.0)}, r"its setting llama\.logit_scale \(2\.0\)"),
        ({"extra": lambda w: w.add_uint32("llama.expert_count", 8)}, r"llama\.expert_count is 8, only 0"),
        ({"extra": lambda w: w.add_uint32("llama.attention.value_length", 8)}, r"value_length is 8, only 16"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama_weights(SHAPE), tokenizer(), **options)
    with pytest.raises(ModelError, match=message) as caught:
        models.resolve(str(file))
    assert "\n" not in str(caught.value) and "use the model's Hugging Face directory" in str(caught.value)
    assert not list((tmp_path / "home").glob("models/*"))


def test_missing_tensors_and_broken_files(tmp_path: Path) -> None:
    tensors = llama_weights(SHAPE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    file = write_gguf(tmp_path / "m.gguf", tensors, tokenizer())
    with pytest.raises(ModelError, match=r"1 tensors are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        models.resolve(str(file))
    whole = file.read_bytes()
    for size in (8, 100, len(whole) // 2, len(whole) - 4):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="broken or truncated GGUF"):
            models.resolve(str(file))
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        models.resolve(str(file))
