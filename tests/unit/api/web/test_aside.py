"""Is what large requests take computed beside the loop that answers calls, with the same answers,
errors and cancellations?
"""

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from model_kit import model
from test_tokenizer import BUNDLE, PLAIN

from midstream.api.resolve.admission.served import Served
from midstream.api.web.aside import aside, call_aside, on
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.settings.settings import Settings


async def test_the_loop_of_the_caller_goes_on_while_work_is_computed_aside() -> None:
    seen = threading.Event()
    said = threading.Event()

    def work() -> str:
        seen.set()
        assert said.wait(60)
        return threading.current_thread().name

    asked = asyncio.create_task(call_aside(work))
    assert await asyncio.to_thread(seen.wait, 60)
    said.set()
    assert await asked == "midstream-aside"


async def test_work_aside_may_await_the_loop_of_its_caller_and_itself() -> None:
    here = asyncio.get_running_loop()

    async def answer() -> int:
        return threading.get_ident()

    async def work() -> list[int]:
        return [await on(here, answer()), await aside(answer()), threading.get_ident()]

    asked, nested, own = await aside(work())
    assert asked == threading.get_ident() != own
    assert nested == own


async def test_errors_and_cancellations_pass_between_the_loops() -> None:
    begun = asyncio.Event()
    ended = threading.Event()
    here = asyncio.get_running_loop()

    def refused() -> None:
        raise invalid("steering", "is not valid")

    async def long() -> None:
        here.call_soon_threadsafe(begun.set)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(type(invalid("", "")), match="is not valid"):
        await call_aside(refused)
    asked = asyncio.create_task(aside(long()))
    await begun.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_job_aside_has_long_texts_tokenised_in_a_helper_that_gives_way() -> None:
    async def blob(name: str) -> bytes:
        return to_msgpack(BUNDLE)

    ledger: Any = SimpleNamespace(get_blob=blob)
    served = Served(Settings(redis_url="redis://127.0.0.1:1/0"), ledger)
    text = "hello " * 2000
    try:
        codec = await served.codec(model(max_model_len=20_000))
        made = await aside(codec.encode([text], special_tokens=False))
        (process,) = [each.process for each in served._helpers._all if each.process is not None]
        assert list(made[0]) == PLAIN.encode_here([text], False)[0].ids.tolist()
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        await served.close()
