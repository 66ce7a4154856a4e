"""Text to ids and back: one BOS, one template, every end token, and streams that never take anything back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from elsi_edge import models as sources
from elsi_edge.errors import BundleError, ModelError, PromptError
from elsi_edge.text import TextCodec, require_clean
from tests.tiny_text import CHATML, build_tokenizer, write_text_files

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_tokens.json").read_text(encoding="utf-8"))
MARKS = "a  b\t3141 [[PART]]7<unit> naïve 🙂\r\n"
FAMILY = "x👩‍👩‍👧‍👦y🇫🇷"


def chat(text: str, system: str | None = None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system is not None else []
    return [*head, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("text")
    write_text_files(directory, build_tokenizer(added=("[[PART]]", "<unit>")))
    return TextCodec.from_model_dir(directory)


@pytest.mark.parametrize("reopened", [False, True])
def test_one_bos_and_never_a_second(tmp_path: Path, reopened: bool) -> None:
    counts = {}
    for name, head in (("writes", "{{ bos_token }}"), ("silent", "")):
        directory = tmp_path / name
        write_text_files(directory, build_tokenizer(bos=True), template=head + CHATML)
        codec = TextCodec.from_model_dir(directory)
        if reopened:
            codec.save(tmp_path / f"bundle-{name}")
            codec = TextCodec.open(tmp_path / f"bundle-{name}")
        counts[name] = (codec.encode_chat(chat("Once")).count(1), codec.encode_raw("Once").count(1))
    assert counts == {"writes": (1, 1), "silent": (0, 1)}


def test_reopened_codec_is_the_same(tmp_path: Path, codec: TextCodec) -> None:
    codec.save(tmp_path)
    again = TextCodec.open(tmp_path)
    assert again.settings == codec.settings
    assert (again.tokenizer_sha256, again.template_sha256) == (codec.tokenizer_sha256, codec.template_sha256)
    assert again.encode_chat(chat(MARKS)) == codec.encode_chat(chat(MARKS))


@pytest.mark.parametrize(
    ("jinja", "key", "expected", "source"),
    [
        ("file", None, "file", "chat_template.jinja"),
        ("file", "key", "file", "chat_template.jinja"),
        (None, "key", "key", "tokenizer_config.json"),
        (
            None,
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
            "d",
            "tokenizer_config.json, 'default' of tool_use, default",
        ),
        (None, None, "", ""),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, jinja: str | None, key: Any, expected: str, source: str) -> None:
    extra = {} if key is None else {"chat_template": key}
    write_text_files(tmp_path, build_tokenizer(), template=jinja, tokenizer_config=extra)
    codec = TextCodec.from_model_dir(tmp_path)
    assert (codec.settings.template, codec.settings.template_source) == (expected, source)
    assert codec.has_template is bool(expected)


def test_no_template_is_made_up(tmp_path: Path) -> None:
    write_text_files(tmp_path, build_tokenizer(), template=None)
    codec = TextCodec.from_model_dir(tmp_path)
    assert codec.template_sha256 == ""
    with pytest.raises(PromptError, match="no chat template; use --raw"):
        codec.encode_chat(chat("Hi"))


def test_end_tokens_are_the_union_and_defaults_are_only_shown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    write_text_files(
        tmp_path,
        build_tokenizer(),
        tokenizer_config={"eos_token": "<|turn|>"},
        generation_config={"eos_token_id": [2, 5], "temperature": 0.7, "repetition_penalty": 1.3, "use_cache": True},
    )
    codec = TextCodec.from_model_dir(tmp_path)
    assert codec.eos_ids == {2, 3, 5}
    assert codec.settings.eos_sources == {
        "config.json": [2],
        "generation_config.json": [2, 5],
        "tokenizer_config.json": [3],
    }
    assert codec.settings.unused_defaults == {"temperature": 0.7, "repetition_penalty": 1.3}


# --- templates -----------------------------------------------------------------------------------------------------


def with_template(directory: Path, template: str) -> TextCodec:
    write_text_files(directory, build_tokenizer(), template=template)
    return TextCodec.from_model_dir(directory)


def test_a_refusing_template_speaks_for_itself(tmp_path: Path) -> None:
    text = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    codec = with_template(tmp_path, text)
    assert codec.render_chat(chat("Hi")) == "ok"
    with pytest.raises(PromptError, match=r"System role not supported; leave out --system") as caught:
        codec.encode_chat(chat("Name a river.", "Answer in one word."))
    assert "\n" not in str(caught.value)


def test_a_dropped_system_message_is_an_error(tmp_path: Path) -> None:
    codec = with_template(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(PromptError, match="drops the system message"):
        codec.encode_chat(chat("Hi", "Be brief."))


def test_templates_render_as_in_transformers(tmp_path: Path) -> None:
    text = (
        "{%- for m in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ {'a': m.content} | tojson }}{% generation %}!{% endgeneration %}\n"
        "    {% if tools is none and lang is defined %}\n"
        "{{ lang }}{{ bos_token }}{{ strftime_now('%Y')[:2] }}\n"
        "    {% endif %}\n"
        "{%- endfor %}"
    )
    codec = with_template(tmp_path, text)
    messages = chat("<é>") + chat("b")
    # trim_blocks and lstrip_blocks: block lines leave neither indentation nor newline.
    assert codec.render_chat(messages, {"lang": "en"}) == '{"a": "<é>"}!en<s>20\n'
    with pytest.raises(PromptError, match="'messages' is set by elsi-edge"):
        codec.render_chat(messages, {"messages": []})


@pytest.mark.parametrize(
    "text",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].missing.more }}", "{{ 1 + 'a' }}"],
)
def test_what_a_template_may_not_do(tmp_path: Path, text: str) -> None:
    with pytest.raises(PromptError, match="refuses this conversation"):
        with_template(tmp_path, text).encode_chat(chat("Hi"))


def test_a_broken_template_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat_template.jinja: the chat template is broken at line 2"):
        with_template(tmp_path, "a\n{% if %}").encode_chat(chat("Hi"))


# --- prompts that cannot be run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [("caf\udce9 au lait", "byte 0xe9 at character 4"), ("\ud83d", r"lone surrogate U\+D83D at character 1")],
)
def test_unclean_text_names_the_place(codec: TextCodec, text: str, place: str) -> None:
    for encode in (
        codec.encode_raw,
        lambda given: codec.encode_chat(chat(given)),
        lambda given: require_clean(given, "x"),
    ):
        with pytest.raises(PromptError, match=place):
            encode(text)


def test_emptiness_is_decided_on_tokens(tmp_path: Path, codec: TextCodec) -> None:
    with pytest.raises(PromptError, match="no tokens"):
        codec.encode_raw("")
    assert codec.encode_raw("\n") and codec.encode_chat(chat(""))
    write_text_files(tmp_path, build_tokenizer(bos=True))
    assert TextCodec.from_model_dir(tmp_path).encode_raw("") == [1]


def test_too_long_prompts_are_refused_without_encoding_them_whole(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PromptError, match="has 11 tokens, 10 fit"):
        codec.encode_raw("Q" * 11, limit=10)
    assert len(codec.encode_raw("Q" * 10, limit=10)) == 10
    encoded: list[int] = []
    inner = codec._tokenizer

    class Counting:
        def encode(self, text: str, **options: Any) -> Any:
            encoded.append(len(text))
            return inner.encode(text, **options)

    monkeypatch.setattr(codec, "_tokenizer", Counting())
    with pytest.raises(PromptError, match=r"about 5000000 tokens, 100 fit"):
        codec.encode_raw("Q" * 5_000_000, limit=100)
    assert sum(encoded) < 100_000


def test_saved_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    write_text_files(tmp_path, tokenizer)
    codec = TextCodec.from_model_dir(tmp_path)
    assert codec.decode(codec.encode_raw("QQQQQQQQQQ")) == "QQQQQQQQQQ" and len(codec.encode_raw("QQQQQQQQQQ")) == 10


# --- ids to text -----------------------------------------------------------------------------------------------------


def test_round_trip_and_special_tokens(codec: TextCodec) -> None:
    ids = codec.encode_raw(MARKS)
    assert codec.decode(ids) == MARKS
    assert codec.token_id("[[PART]]") in ids and codec.token_id("<unit>") in ids
    assert codec.decode([*ids, 2, 3]) == MARKS and {2, 3} <= codec.special_ids
    assert codec.decode([10_000]) == ""  # logits may be wider than the vocabulary


def test_stream_holds_back_unfinished_characters(codec: TextCodec) -> None:
    ids = codec.encode_raw(FAMILY)
    assert len(ids) > len(FAMILY), "the emoji must be split over tokens for this test to say anything"
    stream = codec.stream()
    pieces = [stream.push(token) for token in ids]
    assert "" in pieces and "�" not in "".join(pieces)
    assert "".join(pieces) == FAMILY and stream.finish() == ""


def test_stream_ends_with_a_mark_for_a_character_cut_off(codec: TextCodec) -> None:
    ids = codec.encode_raw("🙂")[:-1]
    stream = codec.stream()
    assert "".join(stream.push(token) for token in ids) == "" and stream.finish() == "�"
    assert codec.decode(ids) == "�"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 310), max_size=30))
def test_stream_equals_decode_and_tokenizers(codec: TextCodec, ids: list[int]) -> None:
    stream = codec.stream()
    text = "".join(stream.push(token) for token in ids) + stream.finish()
    assert text == codec.decode(ids) == codec._tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode_raw(text)) == text or any(f"<{name}" in text for name in ("s", "/s", "|", "unk"))


def sentencepiece_like() -> Tokenizer:
    words = ["<unk>", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_sentencepiece_like_tokens(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like()
    write_text_files(tmp_path, tokenizer)
    codec = TextCodec.from_model_dir(tmp_path)
    ids = [1, 2, 3, *(4 + byte for byte in "🙂é".encode()), 1]
    stream = codec.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == codec.decode(ids) == tokenizer.decode(ids) == "Hello world!🙂é Hello"
    # tokenizers would turn the é that was emitted into two marks once a stray byte follows.
    assert codec.decode([*(4 + byte for byte in "é".encode()), 4 + 0xE2]) == "é�"


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    write_text_files(tmp_path, tokenizer)
    with pytest.raises(ModelError, match="decoder"):
        TextCodec.from_model_dir(tmp_path)


# --- files that are not as they should be ----------------------------------------------------------------------------


def test_broken_directories_get_one_line(tmp_path: Path, codec: TextCodec) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        TextCodec.from_model_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        TextCodec.from_model_dir(tmp_path)
    with pytest.raises(BundleError, match=r"has no text\.json"):
        TextCodec.open(tmp_path)
    codec.save(tmp_path)
    stored = json.loads((tmp_path / "text.json").read_text())
    for broken, message in (
        ({**stored, "format_version": 2}, "format version 2"),
        ({**stored, "surprise": 1}, "unknown key 'surprise'"),
    ):
        (tmp_path / "text.json").write_text(json.dumps(broken))
        with pytest.raises(BundleError, match=message):
            TextCodec.open(tmp_path)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        TextCodec.open(tmp_path)


# --- the built-in model against llama.cpp ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> TextCodec:
    return TextCodec.from_model_dir(sources.resolve(sources.BUILTIN).directory)


@pytest.mark.model
def test_ids_equal_llama_cpp(smollm2: TextCodec) -> None:
    for case in GOLDEN["texts"]:
        assert smollm2.encode_raw(case["text"]) == case["ids"], case["text"]
        if "<|im_start|>" not in case["text"]:
            assert smollm2.decode(case["ids"]) == case["text"]


@pytest.mark.model
def test_chats_equal_llama_cpp_and_begin_once(smollm2: TextCodec) -> None:
    start = smollm2.token_id("<|im_start|>")
    for case in GOLDEN["chats"]:
        ids = smollm2.encode_chat(case["messages"])
        assert ids == case["ids"]
        assert ids[0] == start and ids[1] != start
    assert len(GOLDEN["chats"][0]["ids"]) == 38
    assert smollm2.eos_ids == {smollm2.token_id("<|im_end|>")}
