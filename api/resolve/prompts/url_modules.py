"""Translates the URL's parameter `module`, by which tools that send only OpenAI's fields name
modules, into entries of `steering`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_MODULE_TEXT, NAME_PATTERN
from ....schemas.requests.specs import SteeringSpec
from .request_parsing import ParsedRequest

FIELD = "module"
_SCALE = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?", re.ASCII)


def modules_of(texts: Sequence[str]) -> list[dict[str, str | float]]:
    """Return the equivalent entries of `steering`. Raises a 400 naming `module`."""
    return [_entry(text) for text in texts]


def _entry(text: str) -> dict[str, str | float]:
    if len(text) > MAX_MODULE_TEXT:
        raise invalid(FIELD, f"has {len(text)} characters", allowed=f"at most {MAX_MODULE_TEXT}")
    name, colon, scale = text.partition(":")
    if re.match(NAME_PATTERN, name) is None:
        raise invalid(
            FIELD,
            f"{text!r} does not begin with a module's name",
            allowed="NAME or NAME:SCALE, such as joy:2.5",
        )
    if not colon:
        return {"module": name}
    if _SCALE.fullmatch(scale) is None or not math.isfinite(float(scale)):
        raise invalid(
            FIELD,
            f"{scale!r} in {text!r} is not a scale",
            allowed="a finite number, such as 2.5 or -1",
        )
    return {"module": name, "scale": float(scale)}


def with_modules(parsed: ParsedRequest, entries: Sequence[dict[str, str | float]]) -> ParsedRequest:
    """Return the request with these modules after its own steering."""
    first = len(parsed.steering)
    specs = [
        SteeringSpec(
            module=str(entry["module"]),
            scale=entry.get("scale"),  # type: ignore[arg-type]
        )
        for entry in entries
    ]
    written = {f"steering[{first + index}]": FIELD for index in range(len(specs))}
    return replace(
        parsed, steering=[*parsed.steering, *specs], written={**parsed.written, **written}
    )


@contextmanager
def as_written(parsed: ParsedRequest) -> Iterator[None]:
    """Make errors name the field that the client sent, where it was translated into another."""
    try:
        yield
    except MidstreamError as error:
        for key, value in parsed.written.items():
            if error.field is not None and (
                error.field == key or error.field.startswith((f"{key}.", f"{key}["))
            ):
                raise error.at(value) from error
        raise
