"""Reads images of conversations from `data:` URLs, bounds them, and matches them with the
placeholders that the chat template wrote.
"""

import base64
import binascii
import re
from collections.abc import Sequence

from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.chat import ImagePart
from ....schemas.prompts.images import ImageError, ImageRef, check_image, digest_of

_DATA = re.compile(r"data:image/(?:png|jpe?g);base64,", re.ASCII | re.IGNORECASE)
_ALLOWED = "data:image/png;base64,… or data:image/jpeg;base64,…"


def read_image(part: ImagePart, at: str) -> bytes:
    """Return the image file in a message part. Raises a 400 naming the field below `at`."""
    url = part.image_url.url
    field = f"{at}.image_url.url"
    start = _DATA.match(url)
    if start is None:
        why = (
            "URLs are not fetched: send the image itself"
            if url[:5].lower().startswith("http")
            else "is not the image of a PNG or JPEG file"
        )
        raise invalid(field, why, allowed=_ALLOWED)
    try:
        data = base64.b64decode(url[start.end() :], validate=True)
        check_image(data)
    except binascii.Error as error:
        raise invalid(field, f"is not base64: {error}", allowed=_ALLOWED) from None
    except ImageError as error:
        raise invalid(field, str(error)) from None
    return data


def check_number(images: Sequence[bytes], at: str, model: ModelInfo) -> None:
    """Raises a 400 if the model takes fewer images in one prompt."""
    if images and not model.images:
        raise invalid(
            at,
            (
                f"{model.name!r} takes no images: "
                f"{model.images_refused or 'the model takes text only'}"
            ),
            allowed="text parts",
        )
    if len(images) > model.images:
        raise invalid(
            at,
            f"has {len(images)} images",
            allowed=f"at most {model.images} in one conversation (setting images_per_prompt)",
        )


def placed(
    ids: Sequence[int], images: Sequence[bytes], at: str, model: ModelInfo
) -> list[ImageRef]:
    """Return each image with the place of its placeholder in the chat template's tokens.

    Raises a 400 if there are more or fewer placeholders than images: a text may contain one, and a
    template may drop images.
    """
    if not images:
        return []
    image_placeholder = model.image_placeholder
    starts = []
    place = 0
    while place + len(image_placeholder) <= len(ids):
        if list(ids[place : place + len(image_placeholder)]) == image_placeholder:
            starts.append(place)
            place += len(image_placeholder)
        else:
            place += 1
    if len(starts) != len(images):
        raise invalid(
            at,
            f"the model's chat template gives {len(starts)} placeholders for {len(images)} images",
            allowed=(
                "a chat template that takes image parts, and no placeholder of images in the text"
            ),
        )
    return [
        ImageRef(digest=digest_of(data), start=start, stop=start + len(image_placeholder))
        for data, start in zip(images, starts, strict=True)
    ]
