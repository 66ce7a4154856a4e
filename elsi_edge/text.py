"""Text to token ids and back, the same way in every stage: one tokenizer, one template, one set of end tokens.

Needs tokenizers and jinja2 only. A bundle stores `tokenizer.json` (byte for byte the source's) and `text.json`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from elsi_edge import fsio
from elsi_edge.artifacts import from_plain, to_plain
from elsi_edge.chat_template import ChatTemplate, find_template
from elsi_edge.errors import BundleError, ElsiError, ModelError, PromptError
from elsi_edge.stream import StreamDecoder, TokenBytes, decode_all, token_bytes_of

TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE = "text.json"

_PROBE_CHARACTERS = 1 << 16  # a longer text is first encoded in part when there is a limit to hold
# generation_config.json keys that are not sampling defaults
_NOT_DEFAULTS = ("_from_model_config", "transformers_version", "use_cache", "output_", "return_dict")


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """What `text.json` holds beside the tokenizer."""

    template: str = ""  # Jinja source, empty when the model has no chat template
    template_source: str = ""  # the file or key it was read from
    special_tokens: Mapping[str, str] = field(
        default_factory=dict
    )  # bos_token, eos_token, ... as the template sees them
    eos_ids: tuple[int, ...] = ()  # ascending: the union of what follows
    eos_sources: Mapping[str, Any] = field(default_factory=dict)  # file -> ids that it names
    unused_defaults: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json: shown, never applied
    format_version: int = 1


class TextCodec:
    """A model's tokenizer, chat template and end tokens. Build it with `from_model_dir` or `open`."""

    def __init__(self, tokenizer_json: bytes, settings: TextSettings, source: str) -> None:
        self.settings = settings
        self._json = tokenizer_json
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception for anything it cannot parse
            raise ModelError(f"{source}: not a tokenizer that can be read: {error}") from error
        # Saved limits would silently cut or pad prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(
            text=settings.template, source=settings.template_source, special_tokens=settings.special_tokens
        )
        known = token_bytes_of(self._tokenizer)
        if known is None:
            raise ModelError(
                f"{source}: its decoder is of a kind that elsi-edge does not know (byte-level BPE or Metaspace)"
            )
        self._token_bytes: TokenBytes = known

    @classmethod
    def from_model_dir(cls, directory: Path) -> "TextCodec":
        """Read a Hugging Face model directory. Raises ModelError when there is no `tokenizer.json`."""
        file = directory / TOKENIZER_FILE
        if not file.is_file():
            raise ModelError(
                f"{directory} has no {TOKENIZER_FILE}; save one there with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        data = file.read_bytes()
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(tokenizer_config, _read_json(directory / "special_tokens_map.json"))
        template, template_source = find_template(directory, tokenizer_config)
        codec = cls(data, TextSettings(), str(file))
        eos = _end_tokens(directory, codec.token_id(special.get("eos_token", "")))
        settings = TextSettings(
            template=template,
            template_source=template_source,
            special_tokens=special,
            eos_ids=tuple(sorted({token for ids in eos.values() for token in ids})),
            eos_sources=eos,
            unused_defaults=_unused_defaults(_read_json(directory / "generation_config.json")),
        )
        return cls(data, settings, str(file))

    @classmethod
    def open(cls, directory: Path) -> "TextCodec":
        """Read what `save` wrote. Raises BundleError for a missing or broken file."""
        for name in (TOKENIZER_FILE, TEXT_FILE):
            if not (directory / name).is_file():
                raise BundleError(f"{directory} has no {name}; export the bundle again")
        file = directory / TEXT_FILE
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            version = stored.get("format_version")
            if version != 1:
                raise BundleError(f"{file}: format version {version}, this elsi-edge reads 1; install a newer one")
            settings = from_plain(TextSettings, stored, str(file), ignore=("format",))
            return cls((directory / TOKENIZER_FILE).read_bytes(), settings, str(directory / TOKENIZER_FILE))
        except (ValueError, AttributeError) as error:
            raise BundleError(f"{file} cannot be read: {error}; export the bundle again") from error
        except BundleError:
            raise
        except ElsiError as error:
            raise BundleError(f"{error}; export the bundle again") from error

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and `text.json`. Raises StorageError."""
        fsio.write_bytes(directory / TOKENIZER_FILE, self._json)
        fsio.write_json(directory / TEXT_FILE, {"format": "elsi-edge-text", **to_plain(self.settings)})

    # --- text to ids ---------------------------------------------------------------------------------------------

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        template_args: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation through the chat template, up to where the answer begins.

        `messages` are {"role", "content"}. No special token is added to what the template writes, so a template that
        writes the first token itself does not get a second one. With `limit` (tokens), a longer prompt is refused.
        Raises PromptError: no template, a conversation that the template refuses, text that is not clean, no tokens.
        """
        if not self.has_template:
            raise PromptError("this model has no chat template; use --raw to let it continue the text as it is")
        if not messages:
            raise PromptError("the conversation is empty; give a prompt")
        for message in messages:
            require_clean(message["content"], f"the {message['role']} message")
        return self._encode(self._template.render(messages, template_args), special=False, limit=limit)

    def encode_raw(self, text: str, *, limit: int | None = None) -> list[int]:
        """Token ids of a text as it is, with what the tokenizer's own post-processor adds (a BOS, for some models).

        With `limit` (tokens), a longer text is refused. Raises PromptError: text that is not clean, no tokens.
        """
        require_clean(text, "the prompt")
        return self._encode(text, special=True, limit=limit)

    def render_chat(self, messages: Sequence[Mapping[str, str]], template_args: Mapping[str, Any] | None = None) -> str:
        """The text that `encode_chat` encodes."""
        return self._template.render(messages, template_args)

    def _encode(self, text: str, *, special: bool, limit: int | None) -> list[int]:
        if limit is not None and len(text) > _PROBE_CHARACTERS:
            self._refuse_huge(text, limit)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        if not ids:
            raise PromptError("the prompt has no tokens; give at least one character")
        if limit is not None and len(ids) > limit:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, {limit} fit; shorten it or use a bundle with a longer context"
            )
        return ids

    def _refuse_huge(self, text: str, limit: int) -> None:
        # Encoding megabytes takes seconds and hundreds of MB, only to be refused afterwards.
        count = done = 0
        while done < len(text) and count <= 2 * limit:
            count += len(self._tokenizer.encode(text[done : done + _PROBE_CHARACTERS], add_special_tokens=False).ids)
            done += _PROBE_CHARACTERS
        if count > 2 * limit:
            estimate = round(count * len(text) / min(done, len(text)))
            raise PromptError(f"the prompt has about {estimate} tokens, {limit} fit; shorten it")

    # --- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens give none, a broken character becomes U+FFFD."""
        return decode_all(self._token_bytes, ids)

    def stream(self) -> StreamDecoder:
        """A decoder for one answer, token by token."""
        return StreamDecoder(self._token_bytes)

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        """Whether the model came with a chat template."""
        return bool(self.settings.template)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the union of what config, generation config and tokenizer name."""
        return frozenset(self.settings.eos_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens with text, added ones included; the logits may be wider."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def template_sha256(self) -> str:
        """Of the template's text; empty when there is none."""
        return fsio.sha256_text(self.settings.template) if self.has_template else ""

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Of the bytes of `tokenizer.json`."""
        return hashlib.sha256(self._json).hexdigest()

    def token_id(self, token: str) -> int | None:
        """Id of a token's exact name, or None."""
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that give no text."""
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)


def require_clean(text: str, what: str) -> None:
    """Raise PromptError naming the place when `text` cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # The interpreter hides undecodable bytes of arguments and files as U+DC80..U+DCFF.
        what_is = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"lone surrogate U+{code:04X}"
        raise PromptError(
            f"{what} is not clean UTF-8: {what_is} at character {error.start + 1}; re-encode it"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    return fsio.read_json_object(path, ModelError) if path.is_file() else {}


def _special_tokens(tokenizer_config: Mapping[str, Any], token_map: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for values in (token_map, tokenizer_config):
        for name, value in values.items():
            content = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(content, str):
                found[name] = content
    return found


def _end_tokens(directory: Path, tokenizer_eos: int | None) -> dict[str, list[int]]:
    config = _read_json(directory / "config.json")
    sources = {"config.json": config.get("eos_token_id")}
    if sources["config.json"] is None and isinstance(config.get("text_config"), Mapping):
        sources["config.json"] = config["text_config"].get("eos_token_id")
    sources["generation_config.json"] = _read_json(directory / "generation_config.json").get("eos_token_id")
    sources["tokenizer_config.json"] = tokenizer_eos
    found = {
        name: value if isinstance(value, list) else [value] for name, value in sources.items() if value is not None
    }
    return {name: [token for token in ids if isinstance(token, int)] for name, ids in found.items()}


def _unused_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in generation_config.items()
        if not name.startswith(_NOT_DEFAULTS) and not name.endswith("_token_id") and value is not None
    }
