"""Text to token ids and back, with the tokenizer of a served model: the calls of both clients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from ...schemas.tokens import Detokenized, DetokenizeRequest, Tokenized
from . import wire
from .wire import Call


def _tokenize(model: str, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None, add_special_tokens: bool) -> Call:
    given = {"prompt": prompt, "messages": None if messages is None else list(messages)}
    body = {"model": model, "add_special_tokens": add_special_tokens, **{name: value for name, value in given.items() if value is not None}}
    return Call("POST", "/v1/tokenize", body=body)


def _detokenize(model: str, tokens: Sequence[int]) -> Call:
    return Call("POST", "/v1/detokenize", body=DetokenizeRequest(model=model, tokens=[int(token) for token in tokens]))


class TokenCalls(ABC):
    """Of the blocking client."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """Token ids of a text or of a conversation, as a job of it has them, and how each reads (`token_strs`)."""
        return wire.decode(self._send(_tokenize(model, prompt, messages, add_special_tokens)), Tokenized)

    def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        """The text of token ids (`prompt`), special tokens included, and how each reads (`token_strs`)."""
        return wire.decode(self._send(_detokenize(model, tokens)), Detokenized)


class AsyncTokenCalls(ABC):
    """Of the client that awaits."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """As `TokenCalls.tokenize`."""
        return wire.decode(await self._send(_tokenize(model, prompt, messages, add_special_tokens)), Tokenized)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        """As `TokenCalls.detokenize`."""
        return wire.decode(await self._send(_detokenize(model, tokens)), Detokenized)
