"""Does a request at any of its limits leave the event loop to others?

Each job is at one limit, or is refused by it. Counted are calls of functions, of Python's and of
C's, between two turns of the event loop: from the body to what is sent to Redis.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from litestar import Litestar
from litestar.di import Provide
from refusal_kit import refuses
from test_large_bodies import MODEL, SETTINGS, WORDS, accepted, codec, sent

from midstream.api.context import AppContext
from midstream.api.resolve.admission import admission
from midstream.api.resolve.admission.names import NO_NAMES, Referents
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.routes.jobs import Submission, submit_job
from midstream.api.web import problems
from midstream.api.web.body import JsonRequest
from midstream.api.web.request_context import CURRENT, ApiCall
from midstream.broker.telemetry.traces import TraceSpan
from midstream.schemas.access.keys import EVERYBODY
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.limits import (
    MAX_ENTRIES,
    MAX_FORMAT_CHOICES,
    MAX_POSITIONS,
    MAX_PROMPTS,
    MAX_REGEX,
    MAX_SEQUENCES,
)
from midstream.schemas.base.records import to_json
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo

#: Calls in one turn of the event loop: a few milliseconds.
MOST_CALLS = 30_000
VECTOR = {"dtype": "float32", "shape": [8], "data": "AAAAPwAAAD8AAAA/AAAAPwAAAD8AAAA/AAAAPwAAAD8="}
LONG = {"prompts": [[1] * 4000]}
SHORT = {"prompts": [[1] * 4] * MAX_PROMPTS}
CHATS = {"messages": [[{"role": "user", "content": word}] for word in WORDS[:MAX_PROMPTS]]}
ZEROS = {"layers": 0, "positions": [0], "source": {"zeros": True}}
EDIT = {"layers": 0, "vector": VECTOR}
#: What is at its limit → the fields.
EXTREMES: dict[str, dict[str, Any]] = {
    "prompts": {"prompts": WORDS[:MAX_PROMPTS]},
    "equal prompts": {"prompts": WORDS[:1] * MAX_PROMPTS},
    "token ids": {"prompts": [[1] * 400] * MAX_PROMPTS},
    "token ids of fewer prompts": {"prompts": [[1] * 60] * 1000},
    "conversations": CHATS,
    "messages": {"messages": [[{"role": "user", "content": "a"}] * 4000]},
    "turns of conversations": CHATS | {"capture": {"positions": [{"role": "user"}]}},
    "turns": CHATS | {"capture": {"positions": [{"turn": at} for at in range(MAX_POSITIONS)]}},
    "all turns": CHATS | {"capture": {"positions": [{"part": "all"}] * 1000}},
    "spans": {
        "prompts": [" ".join(WORDS[:1000])],
        "capture": {"positions": [{"text": word} for word in WORDS[:1000]]},
    },
    "spans of prompts": {
        "prompts": ["word1"] * MAX_PROMPTS,
        "capture": {"positions": {"text": "word1"}},
    },
    "positions": LONG | {"capture": {"positions": [*range(4000)] * 16}},
    "positions of prompts": SHORT | {"capture": {"positions": [0, 1] * 512}},
    "entries": LONG | {"steering": [EDIT | {"positions": [at]} for at in range(3999)]},
    "entries of prompts": SHORT | {"steering": [EDIT] * 15},
    "entries and prompts": SHORT | {"steering": [EDIT] * MAX_ENTRIES},
    "positions of entries": LONG | {"steering": [EDIT | {"positions": [*range(1000)]}] * 1000},
    "patches": LONG | {"patch": [ZEROS | {"positions": [at]} for at in range(3999)]},
    "patches of prompts": SHORT | {"patch": [ZEROS] * MAX_ENTRIES},
    "masks": LONG | {"patch": [ZEROS | {"mask": [at % 8]} for at in range(MAX_ENTRIES)]},
    "triggers": LONG
    | {"steering": [EDIT | {"trigger": {"token_ids": [[1] * 256] * MAX_SEQUENCES}}] * 4},
    "token ids that are allowed": LONG
    | {"sampling": {"allowed_token_ids": [*range(1, len(WORDS))]}},
    "regular expression": LONG
    | {"sampling": {"structured_outputs": {"regex": "(a|" * 1000 + "b" + ")" * 1000}}},
    "choices of an output": LONG
    | {
        "sampling": {
            "structured_outputs": {"choice": ["a" * (MAX_REGEX // 4)] * MAX_FORMAT_CHOICES}
        }
    },
}


@contextmanager
def calls_by_turn() -> Iterator[list[int]]:
    """Count the calls in each turn of the event loop of this thread."""
    counts: list[int] = []
    run = asyncio.Handle._run
    here = threading.get_ident()

    def note(_: object, event: str, __: object) -> None:
        if event in ("call", "c_call"):
            counts[-1] += 1

    def counted(handle: asyncio.Handle) -> None:
        if threading.get_ident() != here:
            run(handle)
            return
        counts.append(0)
        sys.setprofile(note)
        try:
            run(handle)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", counted)
        yield counts


SENT = MidstreamError("conflict", "what a job costs before it is accepted has been counted")


class Context(AppContext):
    """What `AppContext.submit` takes, up to what is sent to Redis."""

    def __init__(self, tokenizer: Codec):
        self.settings = SETTINGS
        self._tokenizer = tokenizer
        self.ledger = self.served = self.names = self  # type: ignore[assignment]

    async def watched_model(self, name: str) -> tuple[ModelInfo, list[str]]:
        return MODEL, []

    async def usable(self, name: str, info: ModelInfo) -> ModelInfo:
        return info

    async def resolve(self, *_: object) -> Referents:
        return NO_NAMES

    async def codec(self, info: ModelInfo) -> Codec:
        return self._tokenizer

    async def accept(self, job: Job, *_: object) -> str:  # type: ignore[override]
        await sent(job)
        raise SENT


def app_of(tokenizer: Codec) -> Any:
    async def submission(request: JsonRequest) -> Submission:
        return Submission(request, Context(tokenizer), EVERYBODY, None, None)

    return Litestar(
        [submit_job],
        dependencies={"submission": Provide(submission)},
        request_class=JsonRequest,
        request_max_body_size=1 << 23,
        exception_handlers=problems.HANDLERS,
    )


async def post(app: Any, body: bytes) -> int:
    """Send the body to the route of jobs; returns the status."""
    CURRENT.set(ApiCall(TraceSpan(""), 0.0, "POST"))
    transport = httpx2.ASGITransport(app=app)
    headers = {"content-type": "application/json"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.post("/v1/jobs", content=body, headers=headers)).status_code


@pytest.mark.parametrize("limit", EXTREMES)
def test_a_request_at_a_limit_keeps_the_event_loop_for_few_calls(limit: str) -> None:
    body = to_json({"model": MODEL.name, **EXTREMES[limit]})
    app = app_of(codec())
    asyncio.run(post(app, to_json({"model": MODEL.name, "prompts": [WORDS[0]]})))
    with calls_by_turn() as counts:
        status = asyncio.run(post(app, body))
    assert status in (SENT.status, 400)
    assert max(counts) < MOST_CALLS


async def test_the_positions_of_a_span_count_for_each_entry_that_names_it() -> None:
    span = {"text": WORDS[0], "occurrence": None}
    entries = {"steering": [EDIT | {"positions": span}] * 2000}
    body = to_json({"model": MODEL.name, "prompts": [f"{WORDS[0]} " * 4000], **entries})
    with refuses("selects too many positions over all prompts", field="steering[1999].positions"):
        await accepted(body, codec())


async def test_ranges_with_a_step_cost_what_they_are_written_out_as() -> None:
    ranges = [{"start": at % 1000, "stop": 3999, "every": 2} for at in range(4000)]
    body = to_json({"model": MODEL.name, **LONG, "capture": {"positions": ranges}})
    with refuses("selects too many positions over all prompts", field="capture.positions"):
        await accepted(body, codec())


@pytest.mark.parametrize("around", [{"text": WORDS[0]}, {"token_ids": [[1, 2], [3]]}])
async def test_a_window_around_tokens_is_no_span_to_search_for(around: dict[str, Any]) -> None:
    capture = {"capture": {"positions": {"around": around}}}
    await accepted(to_json({"model": MODEL.name, "prompts": [WORDS[0]], **capture}), codec())


async def test_large_jobs_are_resolved_in_one_thread_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    resolve = admission.resolve_captures

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return resolve(*arguments)

    monkeypatch.setattr(admission, "resolve_captures", noted)
    body = to_json({"model": MODEL.name, **EXTREMES["positions"]})
    tokenizer = codec()
    await asyncio.gather(*(accepted(body, tokenizer) for _ in range(4)))
    assert threads == ["midstream-aside"] * 4
