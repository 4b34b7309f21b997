"""Images of prompts: their stored form, and positions in a prompt whose images have not been
expanded yet.

A prompt is stored *as written*: its token ids have one placeholder for each image. Only the model's
processor, on the worker, knows how many tokens an image takes. So positions of such a prompt count
its tokens as written: the place of a placeholder stands for all tokens of its image, and `inside`
gives the place of a single token of an image. The worker maps places to positions when it expands
the prompt.
"""

import hashlib
import struct
from typing import Literal

from ..base.limits import MAX_IMAGE_PIXELS
from ..base.records import Record

#: Places from `_INSIDE` are tokens of images: `_INSIDE` + image · `_STRIDE` + token. No prompt is
#: long enough to reach them.
_INSIDE = 1 << 40
_STRIDE = 1 << 20
#: The most tokens of one image that have places.
MAX_IMAGE_TOKENS = _STRIDE

ImageFormat = Literal["PNG", "JPEG"]


class ImageRef(Record):
    """An image of a stored prompt; its bytes are a blob whose name is `digest`."""

    digest: str  # SHA-256 of the file, hexadecimal
    start: int  # of its placeholder among the prompt's tokens as written: `[start, stop)`
    stop: int


class ImageSpan(Record):
    """The positions `[start, stop)` of an image in the expanded prompt, including separators
    between the image's rows.
    """

    digest: str
    start: int
    stop: int


class ImageError(ValueError):
    """The bytes are not a valid image; the message gives the reason."""


def inside(image: int, token: int) -> int:
    """Return the place of one token of an image, both counted from 0."""
    return _INSIDE + image * _STRIDE + token


def of_image(place: int) -> tuple[int, int] | None:
    """Return (image, token) of a place from `inside`; None for a place of the prompt as written."""
    return divmod(place - _INSIDE, _STRIDE) if place >= _INSIDE else None


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_image(data: bytes) -> ImageFormat:
    """Return the format of an image file, from only its header.

    Raises ImageError for another format, or for more than `MAX_IMAGE_PIXELS` pixels.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 24:
        name: ImageFormat = "PNG"
        width, height = struct.unpack(">II", data[16:24])
    elif data.startswith(b"\xff\xd8\xff"):
        name = "JPEG"
        width, height = _jpeg_size(data)
    else:
        raise ImageError("is not a PNG or JPEG file")
    check_size(width, height)
    return name


def check_size(width: int, height: int) -> None:
    """Raises ImageError for an image without pixels, or with more than `MAX_IMAGE_PIXELS`."""
    if not 0 < width * height <= MAX_IMAGE_PIXELS:
        raise ImageError(
            f"has {width} × {height} pixels; an image has 1 to {MAX_IMAGE_PIXELS} pixels"
        )


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Return width and height from the first frame header."""
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xFF:  # a fill byte
            place += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[place + 5 : place + 9])
            return width, height
        else:
            place += 2 + max(length, 2)
    raise ImageError("is a JPEG file without a frame header")
