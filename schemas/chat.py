"""A conversation as OpenAI's chat API writes it, for `messages` wherever they are taken."""

from typing import Annotated, Literal

import msgspec

from .base import Record
from .limits import MAX_MESSAGES, Label, Text


class TextPart(Record):
    type: Literal["text"]
    text: Text


class ChatMessage(Record):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], msgspec.Meta(max_length=MAX_MESSAGES)]
    name: Label | None = None
    refusal: None = None


#: A conversation has at least one message.
Conversation = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
