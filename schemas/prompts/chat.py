"""Conversations in the form of OpenAI's chat API, for every field `messages`."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..base.limits import (
    MAX_IMAGE_TEXT,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_SCHEMA,
    MAX_TOOLS,
    Label,
    Name,
    Text,
)
from ..base.records import JsonObject, Record


class TextPart(Record, tag_field="type", tag="text"):
    text: Text
    # a hint to other servers' caches
    cache_control: Annotated[dict[Label, Label], msgspec.Meta(max_length=4)] | None = None


class ImageUrl(Record):
    """An image as a `data:` URL of a PNG or JPEG file. Other URLs are not fetched."""

    url: Annotated[str, msgspec.Meta(max_length=MAX_IMAGE_TEXT)]
    detail: Literal["auto"] | None = None


class ImagePart(Record, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class FunctionCall(Record):
    name: Name
    arguments: Text  # JSON, as the model wrote it


class ToolCall(Record):
    """A call of a tool, in a response and repeated in a later message."""

    id: Label
    function: FunctionCall
    type: Literal["function"] = "function"


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(Record):
    role: Role
    #: Only an assistant's message may have no content.
    content: (
        Text | Annotated[list[TextPart | ImagePart], msgspec.Meta(max_length=MAX_MESSAGES)] | None
    ) = None
    name: Label | None = None
    # of an assistant's message
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Label | None = None  # of a message with role `tool`: the call that it answers
    reasoning: Text | None = None  # of an assistant's message, for templates that read it
    reasoning_content: Text | None = None  # the same, under its older name
    # fields of a response's message that OpenAI's clients send back
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], msgspec.Meta(max_length=0)] | None = None


class FunctionDefinition(Record):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    description: Annotated[str, msgspec.Meta(max_length=MAX_SCHEMA)] | None = None
    parameters: msgspec.Raw | UnsetType = UNSET  # a JSON schema; null: none
    strict: bool | None = None


class Tool(Record):
    function: FunctionDefinition
    type: Literal["function"] = "function"


ToolList = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class NamedFunction(Record):
    name: Name


class NamedTool(Record):
    function: NamedFunction
    type: Literal["function"] = "function"


class ToolUse(Record):
    """The tools of a job for vLLM's parser: JSON in the form of OpenAI's API, already validated."""

    tools: bytes
    choice: str  # auto | none | required, or the name of a tool: see `named`
    named: bool = False
    parallel: bool = True  # false: only the first call counts


class Rendering(Record):
    """Inputs of a chat template other than the messages, and how the conversation ends."""

    tools: list[JsonObject] | None = None
    options: JsonObject = {}  # further variables of the template
    opened: bool = True  # ends with the start of the assistant's turn
    continued: bool = False  # the last message is left open, to be continued


#: A conversation that ends with the start of the assistant's turn, without tools and options.
PLAIN = Rendering()


#: A conversation has at least one message.
Conversation = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]

#: A message as chat templates get it: `role`, `content` and perhaps `name`; content with images is
#: a list of parts.
PlainMessage = dict[str, Any]


def characters_of(messages: Iterable[PlainMessage]) -> int:
    """Return the number of characters of all texts in these messages."""
    return sum(_characters(value) for message in messages for value in message.values())


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value, without names of fields."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
