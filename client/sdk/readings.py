"""Code shared by the calls that read one prompt: the lens and features."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx

from ...schemas.prompts.tokens import Detokenized
from . import wire

#: As `positions` of a capture: a name, numbers, a span.
Positions = str | Sequence[Any] | Mapping[str, Any]


def one_prompt(prompt: Any, max_tokens: int, sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of a job of one prompt: text, token ids, or a conversation."""
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    return {
        ("messages" if chat else "prompts"): [prompt],
        "sampling": {"max_tokens": max_tokens, **(sampling or {})},
    }


def words(tokens: Iterable[int], texts: httpx.Response) -> dict[int, str]:
    """Token id → its text. `texts`: the answer to `_detokenize` of the same tokens."""
    return dict(zip(tokens, wire.decode(texts, Detokenized).token_strs, strict=True))
