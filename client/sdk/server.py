"""Calls on the server itself: its models, their tokens, whether it is ready, its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...schemas.base.errors import MidstreamError
from ...schemas.prompts.chat import ChatMessage
from ...schemas.prompts.tokens import Detokenized, DetokenizeRequest, Tokenized
from ...schemas.requests.specs import CaptureSpec
from ...schemas.service.status import ServiceStatus
from ..values import checked
from . import wire
from .answers.positions import SelectedTokens, TokenAt
from .calls import Calls, M, call
from .fields import Chat, Positions
from .wire import HttpCall


class ServerCalls(Calls[M]):
    """Calls on the server itself."""

    @call
    async def models(self) -> list[str]:
        """Return the names of the served models."""
        return await self._models()

    @call
    async def model(self, name: str) -> dict[str, Any]:
        """Return the facts of one model, as `GET /v1/models/{name}` gives them. Raises
        `not_found`.
        """
        return await self._get(wire.path("models", name), dict[str, Any])

    @call
    async def ready(self) -> bool:
        """Return whether a live worker serves a model.

        An unreachable server counts as not ready and raises nothing.
        """
        try:
            return (await self._send(HttpCall("GET", "/readyz", timeout=5.0))).status_code == 200
        except MidstreamError:
            return False

    @call
    async def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Chat | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """Return the token ids that a job would have for a text or a conversation, and the text of
        each token (`token_strs`).
        """
        body = {
            "model": model,
            "add_special_tokens": add_special_tokens,
            **wire.given(prompt=prompt, messages=None if messages is None else list(messages)),
        }
        return await self._ask(HttpCall("POST", "/v1/tokenize", body=body), Tokenized)

    @call
    async def positions(
        self,
        prompt: Any,
        positions: Positions = "all_prompt",
        *,
        model: str | None = None,
    ) -> SelectedTokens:
        """Return the tokens that `positions` (as of a capture) select in a prompt, before anything
        runs.

        `prompt`: text, token ids, or a conversation; `model`: null for the only served one. Raises
        MidstreamError for positions that a job would refuse.
        """
        chat = len(prompt) > 0 and isinstance(prompt[0], Mapping | ChatMessage)
        body = {
            "messages" if chat else "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "positions": checked({"positions": positions}, CaptureSpec).positions,
            **wire.given(model=model),
        }
        answer = await self._ask(HttpCall("POST", "/v1/tokenize", body=body), Tokenized)
        return SelectedTokens(
            (
                TokenAt(at, answer.token_strs[at], answer.tokens[at])
                for at in answer.positions or ()
            ),
            answer.generated,
        )

    @call
    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        """Return the text of token ids (`prompt`), with special tokens, and the text of each token
        (`token_strs`).
        """
        body = DetokenizeRequest(model=model, tokens=[int(token) for token in tokens])
        return await self._ask(HttpCall("POST", "/v1/detokenize", body=body), Detokenized)

    @call
    async def status(self) -> ServiceStatus:
        """Return the state of queues, workers, relay, webhooks and Redis.

        Raises `forbidden` without the scope `observe`.
        """
        return await self._ask(HttpCall("GET", "/v1/status", timeout=10.0), ServiceStatus)
