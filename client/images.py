"""Puts images (files, bytes or Pillow images) into the messages of a conversation."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..schemas.base.errors import Translated, invalid
from ..schemas.prompts.images import ImageError, check_image


def image_part(image: Path | str | bytes | Any, field: str = "images") -> dict[str, Any]:
    """Return the content part for a PNG or JPEG file (its path or bytes), or for a Pillow image.

    Raises MidstreamError naming the field.
    """
    data = image
    if isinstance(image, str | Path):
        with Translated(OSError, lambda error: invalid(field, f"cannot be read: {error}")):
            data = Path(image).read_bytes()
    elif hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        data = file.getvalue()
    if not isinstance(data, bytes):
        raise invalid(
            field, f"is a {type(image).__name__}", allowed="a path, bytes, or a Pillow image"
        )
    with Translated(ImageError, lambda error: invalid(field, str(error)), hidden=True):
        kind = check_image(data).lower()
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"},
    }


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> list[Mapping[str, Any]]:
    """Return the conversation with `images` before the text of its last user message.

    Raises MidstreamError naming the field.
    """
    if not images:
        return list(messages)
    last = max(
        (number for number, message in enumerate(messages) if message.get("role") == "user"),
        default=None,
    )
    if last is None:
        raise invalid("images", "the conversation has no user message to put them in")
    content = messages[last].get("content", "")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    added = [image_part(image, f"images[{number}]") for number, image in enumerate(images)]
    return [
        *messages[:last],
        {**messages[last], "content": [*added, *parts]},
        *messages[last + 1 :],
    ]
