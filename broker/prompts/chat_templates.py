"""Renders conversations by chat templates, in a sandboxed jinja2 environment as in transformers."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ...schemas.base.errors import Translated, invalid
from ...schemas.jobs.models import TokenizerBundle
from ...schemas.prompts.chat import PLAIN, PlainMessage, Rendering

#: Marks the end of a message that should be continued, so that the ending that the template adds
#: after it can be cut off.
_CONTINUED = "\ue000continued\ue000"  # of a private use area: no template strips it


class _Generation(jinja2.ext.Extension):
    """Renders the content of `{% generation %}`, which marks the assistant's text for training,
    unchanged.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> jinja2.Environment:
    """Return the environment that `transformers.utils.chat_template_utils` gives templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Replace jinja2's filter, which escapes HTML: templates expect plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A model's chat template. It comes with the model, from the operator, never from a client."""

    def __init__(self, bundle: TokenizerBundle):
        self._bundle = bundle

    def special_token(self, name: str) -> str:
        """Return the text of a special token, such as `bos_token`; empty without one."""
        return self._bundle.special_tokens.get(name, "")

    def render(self, messages: Sequence[PlainMessage], rendering: Rendering = PLAIN) -> str:
        """Return the text of a conversation. Raises a 400 naming `messages` without a template, or
        if it rejects the conversation.
        """
        template = self._template
        given = {
            **self._bundle.special_tokens,
            **rendering.options,
            "tools": rendering.tools,
            "documents": None,
        }
        if rendering.continued:
            messages = [*messages[:-1], _to_be_continued(messages[-1])]
        # a template may raise any exception to reject a conversation
        with Translated(
            Exception,
            lambda error: invalid(
                "messages", f"the model's chat template rejects the conversation: {error}"
            ),
        ):
            if self._bundle.parts:
                messages = [
                    {**message, "content": [{"type": "text", "text": message["content"]}]}
                    if message["role"] != "tool" and isinstance(message["content"], str)
                    else message
                    for message in messages
                ]
            text = template.render(
                messages=messages, add_generation_prompt=rendering.opened, **given
            )
        return _cut(text) if rendering.continued else text

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._bundle.chat_template is None:
            raise invalid("messages", "this model has no chat template", hint="use /v1/completions")
        with Translated(
            jinja2.TemplateSyntaxError,
            lambda error: invalid(
                "messages",
                f"this model's chat template is broken: {error}",
                hint="use /v1/completions",
            ),
        ):
            return template_environment().from_string(self._bundle.chat_template)


def _to_be_continued(message: PlainMessage) -> PlainMessage:
    if not isinstance(message["content"], str):
        raise invalid(
            "continue_final_message",
            "the last message has parts",
            allowed="a last message with text",
        )
    return {**message, "content": message["content"] + _CONTINUED + " "}


def _cut(text: str) -> str:
    before, mark, after = text.rpartition(_CONTINUED)
    if not mark:
        raise invalid(
            "continue_final_message", "the model's chat template leaves out the last message's end"
        )
    return before if after.startswith(" ") else before.rstrip()  # the template strips messages
