"""OpenAI-style calls: completions and chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ...schemas.jobs.jobs import JobView
from ...schemas.jobs.openai import ChatRequest, CompletionRequest
from ..images import with_images
from . import wire
from .calls import Awaits, Calls, M, call
from .fields import Chat, ChatFields, CompletionFields, PromptInput
from .jobs import Jobs
from .wire import Answer, HttpCall


class Completions(Calls[M]):
    """OpenAI-style calls."""

    @call
    async def completion(
        self,
        /,
        model: str,
        prompt: PromptInput | Sequence[PromptInput],
        **fields: Unpack[CompletionFields],
    ) -> Answer:
        """Call `POST /v1/completions` with OpenAI's and Midstream's fields."""
        body = {**fields, "model": model, "prompt": prompt}
        return await self._held("/v1/completions", wire.openai_body(CompletionRequest, body))

    @call
    async def chat(
        self,
        /,
        model: str,
        messages: Chat,
        *,
        images: Sequence[Any] = (),
        **fields: Unpack[ChatFields],
    ) -> Answer:
        """Call `POST /v1/chat/completions` with OpenAI's and Midstream's fields.

        `images`: paths of PNG or JPEG files, their bytes, or Pillow images; they are placed before
        the text of the last user message.
        """
        body = {**fields, "model": model, "messages": with_images(messages, images)}
        return await self._held("/v1/chat/completions", wire.openai_body(ChatRequest, body))

    async def _held(self, path: str, body: dict[str, Any]) -> Answer:
        """Return the answer to a held request. If the server stops holding it, wait for its job,
        and return the answer from the job's result.
        """
        response = await self._send(HttpCall("POST", path, body=body, timeout=wire.HELD_S))
        if response.status_code != 202:
            return wire.answer(response)
        jobs, view = Jobs[Awaits](self._io), wire.decode(response, JobView)
        await jobs.wait(view.id)
        return wire.answer_from_result(await jobs.result(view.id))
