"""A conversation as OpenAI's chat API writes it, for `messages` wherever they are taken."""

from typing import Annotated, Literal

import msgspec

from .base import Record


class TextPart(Record):
    type: Literal["text"]
    text: str


class ChatMessage(Record):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None


#: A conversation has at least one message.
Conversation = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
