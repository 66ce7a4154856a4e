"""Token ids to text, one token at a time: nothing is emitted before it is final, and nothing emitted changes."""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from tokenizers import Tokenizer

TokenBytes = Callable[[int, bool], bytes]  # (token id, whether it is the first of the text) -> its bytes

_REMEMBERED = 1 << 14  # tokens whose bytes are kept: answers say the same words again
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class StreamDecoder:
    """Text of one answer as its tokens arrive; bytes of an unfinished character are held back.

    The pieces joined equal `TextCodec.decode` of the whole list. Special tokens give no text, other added tokens
    give their content.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        # "replace" gives one U+FFFD for each maximal broken part, as Rust's lossy decoding in tokenizers does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True

    def push(self, token_id: int) -> str:
        """Text that became final with this token; empty while a character is incomplete."""
        piece = self._token_bytes(token_id, self._first)
        self._first = self._first and not piece
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that never became complete, else nothing."""
        return self._utf8.decode(b"", final=True)


def decode_all(token_bytes: TokenBytes, token_ids: Iterable[int]) -> str:
    """The text of a whole token list, by the same rules as the stream."""
    stream = StreamDecoder(token_bytes)
    return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()


def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes | None:
    """How a tokenizer's tokens become bytes, or None for a decoder whose tokens have no text of their own.

    Known are byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece-like ones (Llama 2, Gemma), where a space
    is written as U+2581 and `<0xNN>` stands for a byte.
    """
    steps = _decoder_steps(tokenizer)
    kinds = [step.get("type") for step in steps]
    added = tokenizer.get_added_tokens_decoder()
    if kinds == ["ByteLevel"]:
        plain: Callable[[str, bool], bytes] = _byte_level
    elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        plain = _sentencepiece(steps)
    else:
        return None

    @lru_cache(maxsize=_REMEMBERED)
    def token_bytes(token_id: int, first: bool) -> bytes:
        if (token := added.get(token_id)) is not None:
            return b"" if token.special else token.content.encode()
        text = tokenizer.id_to_token(token_id)  # None for ids of a padded vocabulary
        return b"" if text is None else plain(text, first)

    return token_bytes


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    if tokenizer.decoder is None:
        return []
    stored = json.loads(tokenizer.decoder.__getstate__())
    steps = stored["decoders"] if stored.get("type") == "Sequence" else [stored]
    return [step for step in steps if isinstance(step, dict)]


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


@lru_cache(maxsize=1)
def _byte_characters() -> dict[int, str]:
    """For str.translate: stand-ins to the characters of their bytes; what would pass for a byte becomes none."""
    alphabet = byte_alphabet()
    strange = {code: "\uffff" for code in range(256) if chr(code) not in alphabet}
    return strange | {ord(character): chr(byte) for character, byte in alphabet.items()}


def _byte_level(token: str, first: bool) -> bytes:
    try:
        return token.translate(_byte_characters()).encode("latin-1")
    except UnicodeEncodeError:  # an added token's own text
        return token.encode()


def _sentencepiece(steps: list[dict[str, object]]) -> Callable[[str, bool], bytes]:
    replacements: list[tuple[str, str]] = []
    strip = ""  # what one leading character of the whole text is dropped for
    for step in steps:
        pattern = step.get("pattern")
        if step["type"] == "Replace" and isinstance(pattern, dict) and "String" in pattern:
            replacements.append((str(pattern["String"]), str(step["content"])))
        elif step["type"] == "Metaspace":
            replacements.append((str(step["replacement"]), " "))
            strip = " " if step.get("prepend_scheme") != "never" else strip
        elif step["type"] == "Strip" and step.get("start"):
            strip = str(step["content"])

    def plain(token: str, first: bool) -> bytes:
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.removeprefix(strip).encode() if first and strip else token.encode()

    return plain
