"""Bounds the number of values in a JSON document before it is decoded.

Decoding holds the GIL and builds every value before a list's `max_length` is checked, so a body of a few MB of `{},` would stop the
event loop for seconds. Counting bytes takes a few milliseconds per 8 MiB.
"""

from .limits import MAX_JSON_CONTAINERS, MAX_JSON_VALUES

#: What counts nothing and bounds nothing.
_PLAIN = bytes(set(range(256)) - set(b'",{['))

_BEGINNING = 1 << 20


class TooManyValues(ValueError):
    """The document holds more values than are decoded; the message says which limit."""


def check_json(raw: bytes) -> None:
    """Raises TooManyValues for a document with more values or containers than `schemas.limits` allows.

    What is inside strings does not count. What is not JSON may pass: the decoder refuses it.
    """
    if not _too_many(raw):
        return  # an upper bound: it counts what is inside strings as well
    for part in (raw[:_BEGINNING], raw):  # most of what is refused is refused for its beginning
        if found := _too_many_outside(part):
            raise TooManyValues(found)


def _too_many_outside(raw: bytes) -> str:
    """As `_too_many`, of what is not inside strings. `raw` may be the beginning of a document."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # without escaped quotes, so that quotes alone begin and end strings
    bare = bare.translate(None, _PLAIN).replace(b'""', b"")  # strings that now hold nothing change nothing for the others
    if bare.count(b'"') > 4 * MAX_JSON_VALUES:  # a member has two strings
        return f"it holds more than {2 * MAX_JSON_VALUES} strings"
    return _too_many(b"".join(bare.split(b'"')[::2]))


def _too_many(raw: bytes) -> str:
    """Which limit is exceeded; empty for none."""
    if raw.count(b"{") + raw.count(b"[") > MAX_JSON_CONTAINERS:
        return f"it holds more than {MAX_JSON_CONTAINERS} objects and arrays"
    if raw.count(b",") >= MAX_JSON_VALUES:  # n commas separate n + 1 values
        return f"it holds more than {MAX_JSON_VALUES} values"
    return ""
