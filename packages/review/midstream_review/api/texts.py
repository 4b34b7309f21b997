"""The text around a token."""

from collections.abc import Sequence

from midstream.api.resolve.prompts.tokenizer import Codec

from ..records import HitWords

#: Tokens before the token, and after it, that are shown.
BEFORE = 48
AFTER = 16


async def around(codec: Codec, token_ids: Sequence[int], place: int) -> HitWords:
    """Return the text around the token at `place`."""
    first = max(0, place - BEFORE)
    _, words = await codec.decode(token_ids[first : place + 1 + AFTER])
    own = place - first
    return HitWords(before="".join(words[:own]), token=words[own], after="".join(words[own + 1 :]))
