"""Which tokens stand for a part of a text, worked out from the tokens' own bytes: the reference for
spans.

Knows nothing of offsets: a token is spelled as bytes, the bytes of all tokens are the text's UTF-8,
and a token overlaps a span when one of its bytes lies in it. (A token with a part of a character
counts for the whole character.)
"""

from midstream.schemas.prompts.selectors import Span

#: GPT-2's byte alphabet: printable bytes stand for themselves, the others from U+0100 on, in order.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PLAIN} | {
    chr(0x100 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PLAIN)))
}


def byte_level(token: str, added: set[str]) -> bytes:
    """A token of a byte-level vocabulary; added tokens are spelled out."""
    return token.encode() if token in added else bytes(_BYTE_OF[sign] for sign in token)


def fallback(token: str) -> bytes:
    """A token of a vocabulary with `▁` for spaces and `<0x..>` for bytes."""
    if token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def overlapping(spelled: list[bytes], text: str, span: Span) -> list[int]:
    """Indices of the tokens that overlap the span.

    `spelled`: each token's bytes; empty for one that the text does not contain.
    """
    starts = [at for at in range(len(text)) if text.startswith(span.text, at)]
    apart: list[int] = []
    for start in starts:
        if not apart or start >= apart[-1] + len(span.text):
            apart.append(start)
    chosen = apart if span.occurrence is None else [apart[span.occurrence]]
    return covering(spelled, text, [(start, start + len(span.text)) for start in chosen])


def covering(spelled: list[bytes], text: str, pieces: list[tuple[int, int]]) -> list[int]:
    """Indices of the tokens that overlap one of these ranges of characters."""
    assert b"".join(spelled) == text.encode(), "the tokens spell the text"
    wanted = {
        byte
        for start, stop in pieces
        for byte in range(len(text[:start].encode()), len(text[:stop].encode()))
    }
    found = []
    at = 0
    for index, token in enumerate(spelled):
        if wanted & set(_whole_characters(text, at, at + len(token))):
            found.append(index)
        at += len(token)
    return found


def _whole_characters(text: str, start: int, stop: int) -> range:
    """The bytes `[start, stop)` of the text's UTF-8, and the rest of the characters that they
    belong to.
    """
    raw = text.encode()
    if start == stop:
        return range(0)
    while raw[start] & 0xC0 == 0x80:
        start -= 1
    while stop < len(raw) and raw[stop] & 0xC0 == 0x80:
        stop += 1
    return range(start, stop)
