"""Is everybody who waits for a job woken, soon, also when Redis goes away in between?"""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from ledger_kit import IDENTITY, claimed, make_job, open_ledger, outputs, queued_job, running_job
from refusal_kit import refuses
from wait_kit import LONG_S, holding

from midstream.broker.ledger.jobs import watch
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.watch import JobWatcher
from midstream.schemas.jobs.jobs import Event, Job

#: Longer than `LONG_S`: who is not woken by the message hangs.
HELD_S = 600.0


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """While messages come through, nobody looks by itself: an answer that comes soon was brought by
    a message.
    """
    monkeypatch.setattr(watch, "POLL_S", HELD_S)


async def until_heard(ledger: Ledger, others: set[str]) -> None:
    """Until somebody else than `others` subscribes."""

    async def heard() -> set[str]:
        return await subscribers(ledger) - others

    await holding(heard)


async def until_remembered(watcher: JobWatcher, job: Job) -> None:
    """Until the message of the job's last change has come."""
    await holding(lambda: job.id in watcher._heard)


async def subscribers(ledger: Ledger) -> set[str]:
    """Ids of the connections to Redis that subscribe to a pattern."""
    return {client["id"] for client in await ledger.redis.client_list() if int(client["psub"])}


async def test_many_waiters_on_one_connection_are_woken_by_the_change(
    redis_url: str, no_polling: None
) -> None:
    async with open_ledger(redis_url) as ledger, AsyncExitStack() as stack:
        others = await subscribers(ledger)  # another test's server may be connected
        watcher = await stack.enter_async_context(JobWatcher(ledger))
        jobs = [make_job() for _ in range(10)]
        for job in jobs:
            await ledger.submit(job, {})
        waits = [
            asyncio.create_task(watcher.changed(job.id, 1, HELD_S))
            for job in jobs
            for _ in range(20)
        ]
        await until_heard(ledger, others)
        await asyncio.sleep(0.5)  # every one of them has looked, and waits for a message
        assert watcher.waiting == 200
        assert len(await subscribers(ledger) - others) == 1
        for job in jobs:
            await ledger.request_cancel(job.id)
        async with asyncio.timeout(LONG_S):
            assert set(await asyncio.gather(*waits)) == {2}
        assert watcher.waiting == 0


async def test_a_change_before_the_wait_answers_at_once_and_none_answers_at_the_timeout(
    redis_url: str, no_polling: None
) -> None:
    async with open_ledger(redis_url) as ledger, JobWatcher(ledger) as watcher:
        job = await running_job(ledger)
        assert await watcher.changed(job.id, 1, 30) == 2
        began = time.monotonic()
        assert await watcher.changed(job.id, 2, 0.3) == 2
        assert time.monotonic() - began > 0.25
        with refuses(kind="not_found"):
            await watcher.changed("job_unknown", 0, 30)


async def test_a_job_rolled_back_by_redis_wakes_waiters(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.1)

    async with open_ledger(redis_url) as ledger, JobWatcher(ledger) as watcher:
        job = make_job()
        attempt = await claimed(ledger, job)
        # of an attempt that was lost with Redis' last second
        seen = (await ledger.view(job.id)).version + 2
        assert await watcher.changed(job.id, seen, 60) == seen - 2
        await ledger.store_outputs(job.id, attempt, outputs())
        assert await watcher.changed(job.id, seen, 60) < seen, (
            "else it would be waited for as long as a response is held"
        )


async def test_a_result_waiter_is_not_woken_by_the_start(redis_url: str, no_polling: None) -> None:
    async with open_ledger(redis_url) as ledger, AsyncExitStack() as stack:
        others = await subscribers(ledger)
        watcher = await stack.enter_async_context(JobWatcher(ledger))
        await until_heard(ledger, others)
        job = await queued_job(ledger)
        await until_remembered(watcher, job)  # who is not connected yet looks by itself
        waiting = asyncio.create_task(watcher.changed(job.id, 1, 60, quiet={"queued", "running"}))
        await asyncio.sleep(0.2)
        await ledger.claim(job.id, "w", "b", 1, IDENTITY)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await ledger.store_outputs(job.id, 1, outputs())
        assert await asyncio.wait_for(waiting, 50) == (await ledger.view(job.id)).version


async def test_a_late_waiter_is_answered_from_memory(redis_url: str, no_polling: None) -> None:
    async with open_ledger(redis_url) as ledger, AsyncExitStack() as stack:
        others = await subscribers(ledger)
        watcher = await stack.enter_async_context(JobWatcher(ledger))
        await until_heard(ledger, others)
        job = await running_job(ledger)
        await until_remembered(watcher, job)
        await ledger.redis.delete(f"ms:job:{job.id}")
        assert await watcher.changed(job.id, 1, 30) == 2


async def test_a_follower_of_events_is_woken_by_one_that_changes_no_state(
    redis_url: str, no_polling: None
) -> None:
    async with open_ledger(redis_url) as ledger, JobWatcher(ledger) as watcher:
        job = await running_job(ledger)
        last = (await ledger.events(job.id))[-1].id
        assert await watcher.has_events(job.id, last, 0.2) is False
        following = asyncio.create_task(watcher.has_events(job.id, last, HELD_S))
        still = asyncio.create_task(
            watcher.changed(job.id, (await ledger.view(job.id)).version, 1.0)
        )
        await asyncio.sleep(0.2)
        await ledger.emit(job.id, 1, 1, Event(event="output", data={"index": 0}, attempt=1))
        async with asyncio.timeout(LONG_S):
            assert await following is True
        assert await still == 2, "an event alone is no change of the job"


async def test_a_wait_ends_without_notifications(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # field case 38
    monkeypatch.setattr(watch, "POLL_S", 0.1)
    async with open_ledger(redis_url) as ledger, JobWatcher(ledger) as watcher:
        job = await running_job(ledger)
        waiting = asyncio.create_task(watcher.changed(job.id, 2, 60))
        await asyncio.sleep(0.2)
        # a change whose notification is lost
        await ledger.redis.hincrby(f"ms:job:{job.id}", "version", 1)
        assert await asyncio.wait_for(waiting, 50) == 3


async def test_notifications_from_before_a_reconnect_are_discarded(
    redis_url: str, no_polling: None, monkeypatch: pytest.MonkeyPatch
) -> None:  # field case 38
    monkeypatch.setattr(watch, "RECONNECT_S", 1.0)

    async with open_ledger(redis_url) as ledger:
        others = await subscribers(ledger)
        async with JobWatcher(ledger) as watcher:
            await until_heard(ledger, others)
            job = make_job()
            attempt = await claimed(ledger, job)
            await until_remembered(watcher, job)
            seen = (await ledger.view(job.id)).version
            [mine] = await subscribers(ledger) - others
            await ledger.redis.client_kill_filter(_id=mine)
            await ledger.store_outputs(job.id, attempt, outputs())  # nobody hears it
            await until_heard(ledger, others | {mine})
            assert await watcher.changed(job.id, seen, 50) > seen
