"""Attention patterns of a prompt in one call, of both clients: a job that captures queries and keys, and what follows from them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ...schemas.jobs import JobResult
from ...schemas.selectors import LayerSelector
from ..captures.patterns import Attention, attention_of
from ..captures.reader import CaptureReader
from .wire import JobLike


def capture_fields(prompt: str | Sequence[int], layers: LayerSelector, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a job that captures the queries and keys of a prompt as attention uses them, after any edit of them.

    `fields`: others of the job, such as `model` and `steering`.
    """
    capture = {"hooks": {"q": layers, "k": layers}, "positions": "all_prompt", "at": "after"}
    return {"sampling": {"max_tokens": 1}, **fields, "prompts": [prompt if isinstance(prompt, str) else list(prompt)], "capture": capture}


class AttentionCalls(ABC):
    """Of the blocking client."""

    @abstractmethod
    def run(self, *, timeout: float | None = None, progress: bool = True, **fields: Any) -> JobResult: ...
    @abstractmethod
    def capture(self, job_id: JobLike) -> CaptureReader: ...

    def attention(
        self, prompt: str | Sequence[int], *, layers: LayerSelector = "all", heads: LayerSelector | None = None, **fields: Any
    ) -> Attention:
        """What each token of a prompt attends to: patterns `[heads, query, key]` of `layers`.

        `prompt`: text or token ids. `heads`: by default all. `fields`: of the job that computes them, such as `model`, `steering`
        or `lora`; edits at `q` and `k` are in the patterns. The job's capture stays on the server, see `Attention.job`.
        Raises what the job raises, and what `CaptureReader.attention` raises.
        """
        with self.capture(self.run(progress=False, **capture_fields(prompt, layers, fields))) as reader:
            return attention_of(reader, layers, heads)


class AsyncAttentionCalls(ABC):
    """Of the client that awaits."""

    @abstractmethod
    async def run(self, *, timeout: float | None = None, progress: bool = True, **fields: Any) -> JobResult: ...
    @abstractmethod
    async def capture(self, job_id: JobLike) -> CaptureReader: ...

    async def attention(
        self, prompt: str | Sequence[int], *, layers: LayerSelector = "all", heads: LayerSelector | None = None, **fields: Any
    ) -> Attention:
        """As `AttentionCalls.attention`."""
        with await self.capture(await self.run(progress=False, **capture_fields(prompt, layers, fields))) as reader:
            return await asyncio.to_thread(attention_of, reader, layers, heads)
