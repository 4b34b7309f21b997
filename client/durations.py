"""Parses durations as users write them: `90d`, `12h`, `30m`, `45s`, or seconds."""

import re
from typing import Any

from ..schemas.base.errors import invalid

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?)([{''.join(_UNITS)}]?)")


def seconds(value: Any, field: str) -> Any:
    """Convert a text such as `90d` to seconds; return any other value unchanged.

    Raises MidstreamError that names the field.
    """
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None:
        raise invalid(
            field, f"{value!r} is not a duration", allowed="such as 90d, 12h, 30m or 600 (seconds)"
        )
    return float(match[1]) * _UNITS[match[2]]
