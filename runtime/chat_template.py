"""Chat templates: a conversation rendered to the text that a chat model was trained on.

Rendering equals transformers' `apply_chat_template` on plain messages. Templates come with the
bundle and are not trusted: they run in jinja2's sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvconv.errors import BundleError, PromptError
from kvconv.names import CHAT_TEMPLATE_FILE
from kvconv.runtime.bundle import Bundle

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# A template is a program of somebody else: whatever it trips over is its statement.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

# What templates call the switch that lets a model think before it answers.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
# Names under which a message's reasoning is found; the first is what most templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
"""At least `role` and `content`."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The jinja2 source.
        special_tokens: Name -> text of tokens that templates refer to, such as `bos_token`.
        tool_use_source: Of the template for conversations with tools; None for the same.

    Raises:
        PromptError: A source does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_use_source: str | None = None
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._source = source
        environment = _environment()
        try:
            self._template = self._tool_use = environment.from_string(source)
            if tool_use_source is not None:
                self._tool_use = environment.from_string(tool_use_source)
        except jinja2.TemplateError as error:
            raise PromptError(
                f"The bundle's chat template does not compile: {error}. Render the conversation "
                f"yourself and pass the text as the prompt."
            ) from error

    @classmethod
    def open(cls, bundle: Bundle) -> "ChatTemplate":
        """Read a bundle's chat template.

        Raises:
            PromptError: It has none, or one that does not compile.
        """
        has_config = TOKENIZER_CONFIG_FILE in bundle
        config = bundle.read_json(TOKENIZER_CONFIG_FILE) if has_config else {}
        if CHAT_TEMPLATE_FILE in bundle:
            source: Any = bundle.file(CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        tool_use_source = None
        if isinstance(source, list):
            named = _named_templates(source)
            source, tool_use_source = named.get("default"), named.get("tool_use")
        if not isinstance(source, str):
            raise PromptError(
                f"The bundle {bundle.path} has no chat template: the model was not made for "
                f"conversations. Pass plain text, without --chat-template or --chat."
            )
        return cls(source, _special_tokens(config), tool_use_source=tool_use_source)

    def thinking(self, is_on: bool) -> dict[str, bool]:
        """Return the variables that let a model think before it answers, or keep it from it.

        Raises:
            PromptError: The template has no such switch.
        """
        names = jinja2.meta.find_undeclared_variables(_environment().parse(self._source))
        switches = {name: is_on for name in _THINKING_SWITCHES if name in names}
        if not switches:
            raise PromptError(
                f"The bundle's chat template has no switch for thinking: it reads neither "
                f"{' nor '.join(_THINKING_SWITCHES)}. Leave --thinking and --no-thinking out."
            )
        return switches

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as text.

        Args:
            messages: In order; each has `role` and `content`.
            add_generation_prompt: End with what opens the model's answer.
            tools: JSON schemas of functions that the model may call.
            variables: More names for the template, such as those of `thinking`.

        Raises:
            PromptError: The template refuses the conversation.
        """
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": [_plain_message(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return (self._template if tools is None else self._tool_use).render(names)
        except _TEMPLATE_ERRORS as error:
            raise PromptError(
                f"The bundle's chat template refuses this conversation: {error}. Change the "
                f"messages, or pass plain text."
            ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks an answer: renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's name and type are jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's `namespace()` without names that Python itself looks up."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As jinja2 does it, so that a template may even store something called `self`.
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump as JSON; jinja2's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.datetime.now().strftime(template)


def _plain_message(message: Message) -> dict[str, Any]:
    """Return what a template sees of a message: no empty fields, reasoning by all its names."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[field] for field in _REASONING_FIELDS if field in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _named_templates(entries: Sequence[Any]) -> dict[str, Any]:
    try:
        return {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError) as error:
        raise BundleError(
            f"chat_template in {TOKENIZER_CONFIG_FILE} is a list of something else than names and "
            f"templates. Export the model again.",
            file=TOKENIZER_CONFIG_FILE,
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens, each written as text or as an object with its `content`."""
    entries = {name: value for name, value in config.items() if name.endswith("_token")}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(name), dict):
            entries |= config[name]
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in entries.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
