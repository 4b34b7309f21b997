"""Bounds the number of values in a JSON document before it is decoded, while it arrives.

Decoding holds the GIL and builds every value before a list's `max_length` is checked, so a few MB
of `{},` would block the event loop for seconds. Counting takes a few milliseconds per MiB and is
done piece by piece.
"""

from .limits import MAX_JSON_CONTAINERS, MAX_JSON_VALUES

#: Bytes that neither count nor delimit values.
_PLAIN = bytes(set(range(256)) - set(b'",{['))

#: Bytes counted at a time.
PIECE = 1 << 16


class TooManyValues(ValueError):
    """The document has too many values to be decoded; the message names the limit."""


class JsonCounter:
    """Counts the values of a document that arrives in pieces. Contents of strings do not count.

    Invalid JSON may pass: the decoder rejects it.
    """

    def __init__(self) -> None:
        self._commas = 0  # n commas separate n + 1 values
        self.items = 0  # texts, objects and lists: what takes long to decode and to resolve
        self._containers = 0
        self._in_string = 0
        # a backslash at the end of the previous piece, which escapes the next byte
        self._held = b""

    def feed(self, piece: bytes) -> None:
        """Count the next piece. Raises TooManyValues if the document now has more values or
        containers than `schemas.base.limits` allows.
        """
        piece = self._held + piece
        self._held = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        bare = piece[: len(piece) - len(self._held)]
        # remove escaped quotes: each remaining quote begins or ends a string
        bare = bare.replace(b"\\\\", b"").replace(b'\\"', b"")
        # drop strings that are empty now: each has two quotes, so the others stay paired
        bare = bare.translate(None, _PLAIN)
        quotes = bare.count(b'"')
        bare = bare.replace(b'""', b"")
        parts = bare.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= (len(parts) - 1) & 1
        self._commas += outside.count(b",")
        containers = outside.count(b"{") + outside.count(b"[")
        self._containers += containers
        self.items += quotes // 2 + containers
        if self._containers > MAX_JSON_CONTAINERS:
            raise TooManyValues(f"more than {MAX_JSON_CONTAINERS} objects and arrays")
        if self._commas >= MAX_JSON_VALUES:
            raise TooManyValues(f"more than {MAX_JSON_VALUES} values")


def check_json(raw: bytes) -> None:
    """Check a whole document. Raises TooManyValues as `JsonCounter.feed` does."""
    counter = JsonCounter()
    for at in range(0, len(raw), PIECE):
        counter.feed(raw[at : at + PIECE])
