"""A conversation as OpenAI's chat API writes it, for `messages` wherever they are taken."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from .base import Record
from .limits import MAX_IMAGE_TEXT, MAX_MESSAGES, Label, Text


class TextPart(Record, tag_field="type", tag="text"):
    text: Text


class ImageUrl(Record):
    """An image itself, as a `data:` URL of a PNG or JPEG file: URLs are not fetched."""

    url: Annotated[str, msgspec.Meta(max_length=MAX_IMAGE_TEXT)]
    detail: Literal["auto"] | None = None


class ImagePart(Record, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class ChatMessage(Record):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart | ImagePart], msgspec.Meta(max_length=MAX_MESSAGES)]
    name: Label | None = None
    refusal: None = None


#: A conversation has at least one message.
Conversation = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]

#: A message as chat templates know it: `role`, `content` and perhaps `name`; content with images is a list of parts.
PlainMessage = dict[str, Any]


def characters_of(messages: Iterable[PlainMessage]) -> int:
    """Of all texts in these messages."""
    return sum(_characters(value) for message in messages for value in message.values())


def _characters(value: str | list[dict[str, str]]) -> int:
    return len(value) if isinstance(value, str) else sum(len(part.get("text", "")) for part in value)
