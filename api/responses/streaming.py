"""Streams completions: tokens from the job's event stream, then the last chunk, held until
everything requested is settled.

What was sent to the client is compared with the job's output: see `sent`.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...schemas.access.keys import Caller
from ...schemas.artifacts.probes import TokenScores
from ...schemas.base.errors import MidstreamError, Problem
from ...schemas.base.records import to_json
from ...schemas.jobs.jobs import Event, JobView
from ..context import AppContext
from ..web import problems
from ..web.key_watch import HeldKey
from . import events, openai_shapes
from .openai_shapes import AnswerShape, ChoicePart, WantedParts
from .outcome import failure_of, is_over, result_of
from .sent import Sent

END = b"data: [DONE]\n\n"


@dataclass
class StreamedRequest:
    """One streamed request.

    `until`: whether a view is settled enough to end the stream; `with_extras`: whether the last
    chunk has `capture_results` and `determinism`.
    """

    context: AppContext
    shape: AnswerShape
    job_id: str
    model: str
    created: float
    choices: int  # in all
    wanted: WantedParts
    caller: Caller
    until: Callable[[JobView], bool]
    with_usage: bool
    with_extras: Callable[[JobView], bool]
    readings: Sequence[str] = ()  # fields of the result that the request asked for
    policies: Sequence[str] = ()  # that it names
    sent: dict[int, Sent] = field(default_factory=dict)
    attempt: int = 0
    scores: list[TokenScores] = field(default_factory=list)  # of tokens that were not sent yet

    async def body(self) -> AsyncIterator[bytes]:
        """Yield chunks, then `[DONE]`; or chunks and then an error event, which ends the stream."""
        try:
            with self.context.key_watch.of(self.caller) as held_key:
                deadline = time.monotonic() + self.context.settings.max_wait_s
                async for batch in self._tokens(deadline, held_key):
                    yield batch
                view = await self._look(deadline, held_key)
                while not self.until(view):
                    yield events.PING
                    view = await self._look(deadline, held_key)
            if is_over(view):
                await self.context.waiting.patiently(self.context.ledger.written)
            problem = failure_of(view)
            if problem is not None:
                yield error_event(problem)
                return
            yield await self._ending(view)
        except MidstreamError as error:
            yield error_event(error.problem(self.context.job_url(self.job_id)))

    async def _tokens(self, deadline: float, held_key: HeldKey) -> AsyncIterator[bytes]:
        """Yield chunks as text is generated, until every choice is complete or the job is over."""
        finished: set[int] = set()
        async for batch in events.follow(
            self.context, self.job_id, events.BEGINNING, deadline, held_key
        ):
            chunks = []
            for event in batch:
                if event.attempt > self.attempt:
                    self._restart(event.attempt)
                    finished.clear()
                if event.event == "score":
                    self.scores.append(msgspec.convert(event.data, TokenScores))
                elif event.event == "token":
                    chunks += self._chunks(event)
                elif event.event == "output":
                    finished.add(_index_of(event))
            yield b"".join(chunks) if chunks else events.PING
            if len(finished) == self.choices:
                return
            self._check(deadline)
        self._check(deadline)

    def _restart(self, attempt: int) -> None:
        self.attempt = attempt
        self.scores.clear()
        for sent in self.sent.values():
            sent.restart()

    def _chunks(self, event: Event) -> list[bytes]:
        index = _index_of(event)
        return self._chunks_of(index, self._of(index).unsent(event, self.wanted))

    def _chunks_of(self, index: int, part: ChoicePart) -> list[bytes]:
        chunks = []
        if self.shape.opening is not None and not self._of(index).opened:
            self._of(index).opened = True
            ids = (
                {"prompt_token_ids": part.prompt.token_ids}
                if part.prompt is not None and self.wanted.token_ids
                else {}
            )
            chunks.append(self._chunk([self.shape.opening(index, self.wanted)], **ids))
            part = replace(part, prompt=None)
        if part:
            chunks.append(self._chunk([self.shape.delta(index, part, self.wanted)]))
        return chunks

    def _of(self, index: int) -> Sent:
        return self.sent.setdefault(index, Sent())

    async def _look(self, deadline: float, held_key: HeldKey) -> JobView:
        """Return the job once `until` holds, or as it is when a keep-alive is due."""
        self._check(deadline)
        outcome = await self.context.waiting.outcome(
            self.job_id,
            self.until,
            min(events.PING_S, deadline - time.monotonic()),
            with_result=False,
            held_key=held_key,
        )
        return outcome.view

    def _check(self, deadline: float) -> None:
        """Raises when the stream cannot be held any longer; the job continues."""
        if self.context.waiting.closing:
            raise MidstreamError(
                "unavailable",
                (
                    f"the server is stopping; job {self.job_id} continues: follow it with GET "
                    f"/v1/jobs/{self.job_id}/events"
                ),
            )
        if time.monotonic() >= deadline:
            raise MidstreamError(
                "unavailable",
                f"responses are held for at most {self.context.settings.max_wait_s:g} s; job "
                f"{self.job_id} continues: follow it with "
                f"GET /v1/jobs/{self.job_id}/events",
            )

    async def _ending(self, view: JobView) -> bytes:
        """Return the last chunks: the rest of the texts, the finish reasons, the usage and the
        captures.
        """
        result = await result_of(self.context, self.job_id)
        more = openai_shapes.extras(
            result, self.with_extras(view), is_over(view), self.readings, self.policies
        )
        outputs = sorted(result.outputs, key=lambda output: output.index)
        chunks = [
            chunk
            for output in outputs
            for chunk in self._chunks_of(
                output.index,
                self._of(output.index).upto(openai_shapes.whole_part(output), self.wanted),
            )
        ]
        last = {} if self.with_usage else more
        for output in outputs:
            choice = self.shape.finish(output, self.wanted)
            chunks.append(self._chunk([choice], **(last if output is outputs[-1] else {})))
        if self.with_usage:
            chunks.append(
                self._chunk([], counted=openai_shapes.usage(outputs, self.wanted.n), **more)
            )
        return b"".join([*chunks, END])

    def _chunk(self, choices: list[Any], **more: Any) -> bytes:
        if self.with_usage:
            more.setdefault("counted", None)
        if self.scores:
            more["scores"] = self.scores
            self.scores = []
        return b"data: %b\n\n" % to_json(
            openai_shapes.piece(self.shape, self.job_id, self.created, self.model, choices, **more)
        )


def error_event(problem: Problem) -> bytes:
    """Return a failure in the middle of a stream in OpenAI's format, with the problem inside."""
    return b"data: %b\n\n" % to_json(
        {"error": {**msgspec.structs.asdict(problems.openai_error(problem)), "problem": problem}}
    )


def _index_of(event: Event) -> int:
    value = event.data.get("index")
    return value if isinstance(value, int) else 0
