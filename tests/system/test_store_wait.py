"""Does a job wait in the ledger for an artifact store that takes nothing, without its attempts
being used up, and not for ever?
"""

import asyncio

from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    WORKER,
    claimed,
    claimed_again,
    error_of,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    receipt,
    running_job,
    sent,
    settler,
    state_of,
)

from midstream.broker.ledger.core.scripts import SHELVED_S
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, State
from midstream.schemas.jobs.receipts import STORE_UNAVAILABLE


def refuse(redis_url: str, job: Job, attempt: int = 1, **settings: float) -> None:
    told = receipt(
        job,
        attempt=attempt,
        status="error",
        kind=STORE_UNAVAILABLE,
        message="write failed: it cannot be reached",
    )
    settler(redis_url, **settings).settle(WORKER, 0, f"{EPOCH}{attempt}", [(1, told)])


async def test_a_job_whose_rows_the_store_did_not_take_is_queued_again(redis_url: str) -> None:
    async with open_ledger(redis_url, max_attempts=2) as ledger:
        reaper = Reaper(ledger, ledger.settings)
        job = await running_job(ledger, ranks=1, capture=True)
        await ledger.store_outputs(job.id, 1, outputs(1))
        await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
        for attempt in range(1, 6):  # more than `max_attempts`
            refuse(redis_url, job, attempt)
            assert await state_of(ledger, job) is State.QUEUED
            assert await sent(ledger) == [], "it has no message before it is due"
            assert await ledger.redis.scard(f"ms:sent:{job.model}:3") == 0, (
                "it takes no place in the window"
            )
            await reaper.sweep(now() + SHELVED_S - 1)
            assert await sent(ledger) == []
            await reaper.sweep(now() + SHELVED_S + 1)
            assert [message.job_id for message in await sent(ledger)] == [job.id]
            assert not await ledger.redis.hexists(f"ms:job:{job.id}", "shelved"), (
                "it is one of the queue again"
            )
            await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
            assert await claimed_again(ledger, job) == attempt + 1
        assert await ledger.release(job.id, 6) is State.QUEUED, (
            "what the store did is not held against it"
        )
        await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert await ledger.release(job.id, 7) is State.FAILED, "the losses of its worker are"


async def test_a_worker_whose_store_takes_nothing_leaves_captures_in_the_queue(
    ledger: Ledger, reaper: Reaper
) -> None:
    job, other = make_job(capture=True), make_job()
    for each in (job, other):
        await ledger.submit(each, {})
    assert (
        await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        is None
    )
    assert (
        await ledger.claim(other.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        is not None
    )
    view = await ledger.view(job.id)
    assert (view.state, view.attempt) == (State.QUEUED, 0)
    await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
    await reaper.sweep(now() + SHELVED_S + 1)
    assert [message.job_id for message in await sent(ledger)] == [job.id]
    assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is not None


async def test_a_job_waits_for_the_store_as_long_as_the_setting_says(redis_url: str) -> None:
    async with open_ledger(redis_url, artifact_wait_s=0.05) as ledger:
        running, queued = make_job(capture=True), make_job(capture=True)
        await claimed(ledger, running, ranks=1)
        await ledger.submit(queued, {})
        refuse(redis_url, running, artifact_wait_s=0.05)
        await ledger.claim(queued.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        await asyncio.sleep(0.1)
        assert (await ledger.claim(running.id, WORKER, BOOT, 1, IDENTITY)) is not None
        refuse(redis_url, running, 2, artifact_wait_s=0.05)
        await ledger.claim(queued.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
        for job in (running, queued):
            error = await error_of(ledger, job)
            assert error.type == "urn:midstream:capture_failed"
            assert "it cannot be reached; the job has waited 0.05 s" in error.detail


async def test_a_job_that_waits_for_the_store_keeps_its_own_deadline(
    ledger: Ledger, reaper: Reaper
) -> None:
    job = await queued_job(ledger, capture=True, expires=now() + 3)
    await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY, unreachable="it cannot be reached")
    assert ((await reaper.sweep(now() + 1)).late, (await reaper.sweep(now() + 4)).late) == (
        [],
        [job.id],
    )


async def test_a_job_that_could_not_read_the_store_waits_for_it(redis_url: str) -> None:
    async with open_ledger(redis_url, artifact_wait_s=0.05, max_attempts=1) as ledger:
        job, cancelled = make_job(), make_job()
        await claimed(ledger, job, ranks=1)
        await ledger.redis.delete(*await ledger.redis.keys("midstream.*"))
        assert await ledger.release(job.id, 1, unreachable="it cannot be reached") is State.QUEUED
        assert await sent(ledger) == [], "it has no message before it is due"
        assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is not None
        await asyncio.sleep(0.1)
        assert await ledger.release(job.id, 2, unreachable="it cannot be reached") is State.FAILED
        error = await error_of(ledger, job)
        assert error.type == "urn:midstream:intervention_failed"
        assert "it cannot be reached; the job has waited 0.05 s" in error.detail
        await claimed(ledger, cancelled, ranks=1)
        await ledger.request_cancel(cancelled.id)
        assert (
            await ledger.release(cancelled.id, 1, unreachable="it cannot be reached")
            is State.CANCELLED
        )
