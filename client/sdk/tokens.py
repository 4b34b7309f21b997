"""Text to token ids and back, with the tokenizer of a served model."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...schemas.prompts.tokens import Detokenized, DetokenizeRequest, Tokenized
from . import wire
from .calls import Calls, call
from .wire import Call


def _tokenize(
    model: str,
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    add_special_tokens: bool,
) -> Call:
    given = wire.given(prompt=prompt, messages=None if messages is None else list(messages))
    return Call(
        "POST",
        "/v1/tokenize",
        body={"model": model, "add_special_tokens": add_special_tokens, **given},
    )


def _detokenize(model: str, tokens: Sequence[int]) -> Call:
    return Call(
        "POST",
        "/v1/detokenize",
        body=DetokenizeRequest(model=model, tokens=[int(token) for token in tokens]),
    )


class TokenCalls(Calls):
    @call
    async def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """Token ids of a text or of a conversation, as a job of it has them, and how each reads
        (`token_strs`).
        """
        return await self._ask(_tokenize(model, prompt, messages, add_special_tokens), Tokenized)

    @call
    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        """The text of token ids (`prompt`), special tokens included, and how each reads
        (`token_strs`).
        """
        return await self._ask(_detokenize(model, tokens), Detokenized)
