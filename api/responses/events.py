"""Server-sent events of a job, from its event stream; resumable by id."""

import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing

from litestar.response import Stream

from ...broker.ledger.jobs.watch import EventBatch
from ...schemas.access.keys import Caller
from ...schemas.base.errors import STATUS_OF_KIND, MidstreamError, Problem, invalid
from ...schemas.base.records import to_json
from ...schemas.jobs.jobs import PROBLEM_EVENT, TERMINAL, Event
from ..context import AppContext
from ..web.key_watch import ALWAYS, HeldKey

MEDIA_TYPE = "text/event-stream"
#: Keep proxies from buffering a stream.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

#: Seconds of silence after which proxies and clients may consider the connection dead.
PING_S = 15.0
PING = b": ping\n\n"
#: Begins a stream: milliseconds that its client should wait before it reconnects.
RETRY = b"retry: 3000\n\n"

#: Ids are those of the Redis stream.
_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
MAX_ID = (1 << 64) - 1  # of each of the two numbers
BEGINNING = "0-0"


def resume_point(header: str | None) -> str:
    """Return the event id to resume from, of `Last-Event-ID`; raises a 400 for an invalid one."""
    if header is None or header == "":
        return BEGINNING
    if not (match := _ID.fullmatch(header)) or max(map(int, match.groups())) > MAX_ID:
        raise invalid(
            "Last-Event-ID",
            f"{header[:40]!r} is not an event id",
            allowed="an `id` of this stream, such as 1700000000000-0",
        )
    return header


async def follow(
    context: AppContext,
    job_id: str,
    after: str,
    deadline: float = math.inf,
    held_key: HeldKey = ALWAYS,
) -> AsyncIterator[EventBatch]:
    """Yield batches of events after the id `after`, in order, up to `done`; an empty batch is a
    keep-alive.

    Also ends when the job is over and has no further events (they were trimmed), when the server
    stops, and at `deadline` (of `time.monotonic`). Raises `unauthorized` when `held_key` ends.
    """
    last_sign = time.monotonic()
    over = False
    while True:
        held_key.check()
        batch = await context.waiting.patiently(
            lambda after=after: context.watcher.events(job_id, after)  # type: ignore[misc]
        )
        if batch:
            done = any(event.event == "done" for event in batch)
            if done:
                await context.waiting.patiently(context.ledger.written)
            yield batch
            if done:
                return
            after = batch[-1].id
            last_sign = time.monotonic()
            continue
        if over or context.waiting.closing or time.monotonic() >= deadline:
            return
        remaining = min(last_sign + PING_S, deadline) - time.monotonic()
        if remaining <= 0:
            yield EventBatch()
            last_sign = time.monotonic()
            # Read the state before the events, so that no event between the two reads is lost.
            over = (
                await context.waiting.patiently(lambda: context.ledger.view(job_id))
            ).state in TERMINAL
        else:
            await context.waiting.or_closing(
                context.watcher.has_events(job_id, after, remaining), held_key
            )


def encode(event: Event) -> bytes:
    """Return a server-sent event; its data has the attempt, which shows readers that a job
    restarted.
    """
    data = to_json({**event.data, "attempt": event.attempt})
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), event.event.encode(), data)


def encode_problem(problem: Problem) -> bytes:
    """Return the event that ends a stream early.

    It has no id, so a client that is authorized again resumes where it was.
    """
    return b"event: %b\ndata: %b\n\n" % (PROBLEM_EVENT.encode(), to_json(problem))


async def of_job(
    context: AppContext, job_id: str, after: str, held_key: HeldKey
) -> AsyncGenerator[bytes]:
    """Yield the events of `GET /v1/jobs/{id}/events`."""
    async for batch in follow(context, job_id, after, held_key=held_key):
        if batch.sent is None:
            batch.sent = b"".join(map(encode, batch)) or PING
        yield batch.sent


def stream(
    context: AppContext,
    caller: Caller,
    url: str,
    events: Callable[[HeldKey], AsyncGenerator[bytes]],
    kinds: Collection[str] = STATUS_OF_KIND,
) -> Stream:
    """Return the answer with these server-sent events. An error of one of `kinds`, such as the end
    of the caller's key, becomes the last event: a problem at `url`.
    """

    async def body() -> AsyncIterator[bytes]:
        with context.key_watch.of(caller) as held_key:
            yield RETRY
            try:
                async with aclosing(events(held_key)) as sending:
                    async for sent in sending:
                        yield sent
            except MidstreamError as error:
                if error.kind not in kinds:
                    raise
                yield encode_problem(error.problem(url))

    return Stream(body(), media_type=MEDIA_TYPE, headers=HEADERS)
