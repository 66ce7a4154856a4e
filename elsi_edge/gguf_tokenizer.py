"""The tokenizer inside a GGUF file, rebuilt so that its ids equal llama.cpp's, or refused by name.

GGUF stores tokens, merges and the *name* of a pre-tokenizer; how text is split lies in llama.cpp's source
(`llama-vocab.cpp`). Only names whose split is reproduced here are read: a wrong one gives plausible, wrong ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from elsi_edge import fsio
from elsi_edge.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_REMEDY = "use the model's Hugging Face directory or hub id instead"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> GGUF's


def write_tokenizer(path: Path, fields: Mapping[str, Any], out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja (when there is one) into `out`.

    Raises ModelError naming the tokenizer kind or pre-tokenizer that is not supported, StorageError.
    """
    tokenizer = build_tokenizer(path, fields)
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # A named class would rebuild the pre-tokenizer by its own rules; this one takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields.get(f"{fields['general.architecture']}.context_length", 0)),
    }
    for name, key in _SPECIAL.items():
        if (token := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None and token < len(tokens):
            config[f"{name}_token"] = tokens[token]
    fsio.write_text(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    fsio.write_json(out / "tokenizer_config.json", config)
    if template := fields.get("tokenizer.chat_template"):
        fsio.write_text(out / "chat_template.jinja", template)


def build_tokenizer(path: Path, fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF's fields. Raises ModelError for a kind that is not reproduced."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{path}: its tokenizer is of the kind {kind!r}, only 'gpt2' (byte-level BPE) is read; {_REMEDY}"
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{path}: {len(tokens) - len(vocabulary)} of its {len(tokens)} tokens appear twice; {_REMEDY}")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = _pre_tokenizer(path, pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, fields.get("tokenizer.ggml.token_type", []))
    if fields.get("tokenizer.ggml.add_bos_token", pre in _WHOLE_WORDS):
        bos = tokens[fields["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # take a word that is a token before merging, and add a BOS


def _pre_tokenizer(path: Path, pre: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _WHOLE_WORDS or pre == "qwen2":
        digits = r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}"
        split = pre_tokenizers.Split(Regex(_WORDS + digits + _REST), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(("gpt-2", "smollm", "qwen2", *_WHOLE_WORDS))
    raise ModelError(f"{path}: its pre-tokenizer {pre!r} is not known (known: {known}); {_REMEDY}")


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
