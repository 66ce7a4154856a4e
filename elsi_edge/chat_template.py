"""A model's chat template: found in its directory, compiled in a sandbox, rendered as transformers renders it."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from elsi_edge.errors import ModelError, PromptError

_OWN_NAMES = frozenset({"messages", "add_generation_prompt"})  # what a caller's template arguments may not replace


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Template text and where it came from. An empty text means that the model has none."""

    text: str = ""
    source: str = ""  # e.g. "chat_template.jinja", for `inspect`
    special_tokens: Mapping[str, str] = field(
        default_factory=dict
    )  # bos_token, eos_token, ...: visible to the template

    def render(self, messages: Sequence[Mapping[str, str]], template_args: Mapping[str, Any] | None = None) -> str:
        """The conversation as one string, ending where the assistant's answer begins.

        Raises PromptError with the template's own message when it refuses the conversation, and when it drops a
        system message without a word; ModelError when the template itself cannot be compiled.
        """
        arguments = dict(template_args or {})
        if taken := sorted(_OWN_NAMES & set(arguments)):
            raise PromptError(f"the template argument {taken[0]!r} is set by elsi-edge itself; leave it out")
        template = _compile(self.text, self.source)
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **arguments}
        try:
            text = template.render(messages=[dict(m) for m in messages], add_generation_prompt=True, **values)
        except jinja2.TemplateError as error:
            raise PromptError(_refusal(str(error), messages)) from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise PromptError(_refusal(f"{type(error).__name__}: {error}", messages)) from error
        _require_system(text, messages)
        return text


def find_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, str]:
    """Text and source of a model directory's template, both empty without one.

    `chat_template.jinja` wins over the tokenizer configuration's key, as in transformers; of a list of named templates
    `default` is taken. Nothing is made up for a model that has none.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), file.name
    value: Any = tokenizer_config.get("chat_template")
    if isinstance(value, str):
        return value, "tokenizer_config.json"
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        default = named.get("default")
        if isinstance(default, str):
            return default, "tokenizer_config.json, 'default' of " + ", ".join(map(str, named))
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        stored = json.loads(legacy.read_text(encoding="utf-8"))
        if isinstance(stored, Mapping) and isinstance(stored.get("chat_template"), str):
            return stored["chat_template"], legacy.name
    return "", ""


def _refusal(message: str, messages: Sequence[Mapping[str, str]]) -> str:
    has_system = any(m.get("role") == "system" for m in messages)
    remedy = "leave out --system" if has_system else "let user and assistant turns alternate, beginning with the user"
    return f"the model's chat template refuses this conversation: {' '.join(message.split())}; {remedy}, or use --raw"


def _require_system(text: str, messages: Sequence[Mapping[str, str]]) -> None:
    for message in messages:
        if message.get("role") == "system" and message["content"].strip() not in text:
            raise PromptError(
                "the model's chat template drops the system message; leave out --system, or put it into the prompt"
            )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which some templates use to mark answers: the body as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(text: str, source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{source}: the chat template is broken at line {error.lineno}: {error.message}") from error
