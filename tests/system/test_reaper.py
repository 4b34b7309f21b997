"""Is everything found that was left lying: lost messages, dead workers, receipts that never
came?
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    MODEL,
    WORKER,
    claimed,
    make_job,
    open_ledger,
    outputs,
    receipt,
    sent,
    settings_for,
    settler,
    submit_unsent,
)
from redis_kit import handed_over

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.status import relay_since
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.ops import redis_server
from midstream.broker.ops.liveness import RELAY_KEY
from midstream.broker.queue.celery_app import UNACKED, lists_of, make_app, queue_of
from midstream.broker.receipts.relay import Relay
from midstream.schemas.base.records import now, to_json
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.models import WorkerInfo


@asynccontextmanager
async def opened(url: str, **changes: Any) -> AsyncIterator[tuple[Ledger, Reaper, Celery]]:
    async with open_ledger(url, **changes) as ledger:
        settings = settings_for(url, **changes)
        app = make_app(settings)
        await relay_beat(ledger)
        yield ledger, Reaper(ledger, settings), app
        app.close()


async def messages(ledger: Ledger, model: str = MODEL) -> int:
    return sum([await ledger.redis.llen(name) for name in lists_of(queue_of(model))])


async def relay_beat(ledger: Ledger, since: float = 0.0) -> None:
    await ledger.redis.set(
        RELAY_KEY,
        to_json({"url": "tcp://127.0.0.1:1", "version": "0", "received": 0, "since": since}),
        ex=60,
    )


async def heartbeat(ledger: Ledger, boot: str) -> None:
    await ledger.heartbeat(
        WorkerInfo(
            worker=WORKER,
            boot=boot,
            model=MODEL,
            version="0",
            host="h",
            pid=1,
            started=0.0,
            tp=1,
            pp=1,
        )
    )


async def test_a_queued_job_without_a_message_gets_one(redis_url: str) -> None:  # field case 37
    async with opened(redis_url) as (ledger, reaper, _):
        began = now()
        lost, there = make_job(), make_job(kind="chat")
        await submit_unsent(ledger, lost)
        await ledger.submit(there, {})
        assert not await reaper.sweep(began + 9.9), "both are young: the message may be on its way"
        later = now() + 30
        report = await reaper.sweep(later)
        assert report.resent == [lost.id]
        assert await messages(ledger) == 2
        assert not await reaper.sweep(later), "and not a second time"
        assert not await reaper.sweep(later + 60), "also when it waits for long"


async def test_a_delivered_message_is_not_resent(redis_url: str) -> None:
    async with opened(redis_url) as (ledger, reaper, app):
        job = make_job()
        await ledger.submit(job, {})
        with (
            app.connection_for_read() as connection,
            connection.SimpleQueue(queue_of(MODEL)) as queue,
        ):
            message = queue.get(timeout=5)
            assert await messages(ledger) == 0
            assert await ledger.redis.hlen(UNACKED) == 1
            assert not await reaper.sweep(now() + 30)
            message.ack()
        assert (await reaper.sweep(now() + 90)).resent == [job.id]


async def test_a_job_whose_ranks_disagreed_is_sent_again_by_the_commit_that_puts_it_back(
    redis_url: str,
) -> None:
    """The worker winds the former attempt up: its message is acknowledged only then, and starts
    nothing.
    """

    async with opened(redis_url) as (ledger, reaper, app):
        job = make_job(steer=True)
        await ledger.submit(job, {})
        with (
            app.connection_for_read() as connection,
            connection.SimpleQueue(queue_of(MODEL)) as queue,
        ):
            message = queue.get(timeout=5)
            assert await ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY) is not None
            settle = settler(redis_url)
            for rank in (0, 1):
                settle.settle(WORKER, rank, EPOCH, [(1, receipt(job, rank=rank, actions=rank))])
            assert (await ledger.view(job.id)).state is State.QUEUED
            assert await messages(ledger) == 1
            again = queue.get(timeout=5)
            assert not await reaper.sweep(now() + 30), "its new message is out"
            message.ack()
            again.ack()


async def test_the_messages_of_a_long_queue_are_all_seen(redis_url: str) -> None:
    async with opened(redis_url, dispatch_window=2000) as (ledger, reaper, _):
        jobs = [make_job() for _ in range(1203)]
        for job in jobs[:-1]:
            await ledger.submit(job, {})
        await submit_unsent(ledger, jobs[-1])
        assert (await reaper.sweep(now() + 60)).resent == [jobs[-1].id]


async def test_an_expired_lease_requeues_with_the_attempt_unchanged_and_the_claim_adds_one(
    redis_url: str,
) -> None:  # field case 37
    async with opened(redis_url) as (ledger, reaper, _):
        began, job = now(), make_job()
        assert await claimed(ledger, job) == 1
        assert not await reaper.sweep(began + 14.9)
        report = await reaper.sweep(now() + 16)
        assert report.requeued == [job.id]
        view = await ledger.view(job.id)
        assert (view.state, view.attempt, view.worker) == (State.QUEUED, 1, None)
        assert view.retry_reason == f"worker {WORKER} did not renew its lease"
        assert (await sent(ledger))[-1][:2] == (job.id, 1)
        claim = await ledger.claim(job.id, "w2", "b2", 1, IDENTITY)
        assert claim is not None
        assert claim.attempt == 2


async def test_a_renewed_lease_is_left_alone(redis_url: str) -> None:
    async with opened(redis_url, lease_s=10) as (ledger, reaper, _):
        job = make_job()
        await claimed(ledger, job)
        for _ in range(4):
            leased = now()
            await asyncio.sleep(0.25)
            renewed = now()
            await ledger.renew(WORKER, BOOT, {job.id: 1})
            at = renewed + 9.9
            assert at > leased + 10, "the former lease is over by then"
            assert not await reaper.sweep(at)
        assert (await reaper.sweep(now() + 10.1)).requeued == [job.id]


async def test_a_delayed_renewal_does_not_shorten_the_lease(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(redis_url, lease_s=10) as (ledger, _, _):
        job = make_job()
        await claimed(ledger, job)
        sent = now()
        await asyncio.sleep(0.01)
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        monkeypatch.setattr(scripts, "now", lambda: sent)
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        over = float(await ledger.redis.hget(f"ms:job:{job.id}", "lease"))
        assert over > sent + 10
        assert await ledger.redis.zscore("ms:live", job.id) == pytest.approx(over, abs=0.001)
        monkeypatch.setattr(scripts, "now", lambda: sent + 3600)
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        monkeypatch.setattr(scripts, "now", lambda: sent)
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        over = float(await ledger.redis.hget(f"ms:job:{job.id}", "lease"))
        assert over == pytest.approx(sent + 10, abs=0.001), (
            "a clock that went wrong for a moment leases nothing for an hour"
        )


async def test_a_lease_renewed_during_the_sweep_is_kept(redis_url: str) -> None:
    async with opened(redis_url, lease_s=60) as (ledger, reaper, _):
        job = make_job()
        await claimed(ledger, job)
        await ledger.redis.zadd(
            "ms:live", {job.id: 0}
        )  # as if it had been due when the list was read
        assert not await reaper.sweep()
        assert (await ledger.view(job.id)).state is State.RUNNING
        assert await ledger.redis.zscore("ms:live", job.id) > now() + 10


async def test_a_restart_of_redis_gives_every_live_worker_the_time_to_renew(tmp_path: Path) -> None:
    server = redis_server.start(tmp_path)
    try:
        async with opened(server.url, lease_s=10) as (ledger, reaper, _):
            job = make_job()
            await claimed(ledger, job)
            leased = now()
            await asyncio.to_thread(handed_over, server.url)
            server.kill()
            await asyncio.sleep(2.5)  # Redis tells its uptime in whole seconds
            server = redis_server.start(tmp_path, port=server.port)
            at = leased + 10.1
            assert not await reaper.sweep(at), "the lease ran out while nobody could renew it"
            renewed = now()
            await ledger.renew(WORKER, BOOT, {job.id: 1})
            assert not await reaper.sweep(renewed + 9.9)
            assert (await reaper.sweep(now() + 20)).requeued == [job.id]
    finally:
        server.stop()


async def test_the_last_attempt_ends_as_worker_lost(redis_url: str) -> None:
    async with opened(redis_url, max_attempts=2) as (ledger, reaper, _):
        job = make_job(capture=True)
        await claimed(ledger, job)
        assert (await reaper.sweep(now() + 60)).requeued == [job.id]
        await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert (await reaper.sweep(now() + 60)).failed == [job.id]
        view = await ledger.view(job.id)
        assert (view.state, view.capture_status) == (State.FAILED, "error")
        assert view.error is not None
        assert view.error.type == "urn:midstream:worker_lost"
        assert WORKER in view.error.detail


async def test_missing_receipts_time_out_with_what_is_there_and_what_is_not(
    redis_url: str,
) -> None:  # field case 18, 20
    async with opened(redis_url, capture_timeout_s=5.0) as (ledger, reaper, _):
        job = make_job(prompts=2, capture=True)
        await claimed(ledger, job, ranks=1)
        settler(redis_url).settle(WORKER, 0, EPOCH, [(1, receipt(job, 0))])
        began = now()
        await ledger.store_outputs(job.id, 1, outputs(2))
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        assert not await reaper.sweep(began + 4.9)
        assert (await reaper.sweep(now() + 6)).timed_out == [job.id]
        result = await ledger.result(job.id)
        assert result.state is State.FAILED
        assert result.capture_results.status == "timed_out"
        assert "1 of 2 receipts" in result.capture_results.detail
        error = (await ledger.view(job.id)).error
        assert error is not None
        assert (error.type, error.status) == ("urn:midstream:receipts_timed_out", 504)


async def test_receipts_are_not_late_while_no_relay_is_alive_nor_soon_after(redis_url: str) -> None:
    async with opened(redis_url, capture_timeout_s=5.0) as (ledger, reaper, _):
        job = make_job(capture=True)
        await claimed(ledger, job, ranks=1)
        began = now()
        await ledger.store_outputs(job.id, 1, outputs())
        await ledger.redis.delete(RELAY_KEY)
        assert not await reaper.sweep(began + 1000)
        await relay_beat(ledger, since=began + 1002)
        assert not await reaper.sweep(began + 1006)
        assert (await reaper.sweep(began + 1008)).timed_out == [job.id]


async def test_a_relay_begins_the_time_of_receipts_again_only_when_it_starts(
    redis_url: str,
) -> None:
    async with opened(redis_url) as (ledger, _, _):
        await ledger.redis.delete(RELAY_KEY)
        assert await relay_since(ledger, 7.0) == 7.0, "no relay is alive"
        with redis.Redis.from_url(redis_url) as client:
            first = Relay(settler(redis_url), "", client)
            first._beat()
            since = await relay_since(ledger, 7.0)
            assert 0 <= now() - since < 60
            first._next_beat = 0
            first._beat()
            assert await relay_since(ledger, 7.0) == since
            second = Relay(settler(redis_url), "", client)
            second._beat()
            assert await relay_since(ledger, 7.0) > since
            first._next_beat = 0
            first._beat()
            assert await relay_since(ledger, 7.0) > since, "of the latest start"
            for relay in (first, second):
                relay._close()


@pytest.mark.parametrize(("boot", "found"), [(BOOT, "timed_out"), ("a later boot", "requeued")])
async def test_jobs_awaiting_receipts_of_a_dead_worker_are_retried(
    redis_url: str, boot: str, found: str
) -> None:
    async with opened(redis_url) as (ledger, reaper, _):
        job = make_job(capture=True)
        await claimed(ledger, job)
        await ledger.store_outputs(job.id, 1, outputs())
        await heartbeat(ledger, boot)
        assert getattr(await reaper.sweep(now() + 100), found) == [job.id]


async def test_a_cancelled_job_whose_worker_died_ends_cancelled(
    redis_url: str,
) -> None:  # field case 38
    async with opened(redis_url) as (ledger, reaper, _):
        job = make_job()
        await claimed(ledger, job)
        await ledger.request_cancel(job.id)
        assert (await reaper.sweep(now() + 60)).cancelled == [job.id]
        assert (await ledger.view(job.id)).state is State.CANCELLED
        assert [message.attempt for message in await sent(ledger)] == [0]


async def test_a_restarted_worker_requeues_jobs_of_its_former_boots(redis_url: str) -> None:
    async with opened(redis_url) as (ledger, reaper, _):
        former, generated, unwanted, present, other, done = (
            make_job(capture=True) for _ in range(6)
        )
        for job in (former, generated, unwanted, done):
            await claimed(ledger, job, ranks=1)
        await claimed(ledger, present, boot="boot2")
        await claimed(ledger, other, worker="w2")
        await ledger.store_outputs(generated.id, 1, outputs())
        await ledger.request_cancel(unwanted.id)
        await ledger.store_outputs(done.id, 1, outputs())
        settler(redis_url).settle(WORKER, 0, EPOCH, [(1, receipt(done))])
        assert set(await reaper.release_boots(WORKER, "boot2")) == {former.id, generated.id}
        states = [
            (await ledger.view(job.id)).state.value
            for job in (former, generated, unwanted, present, other, done)
        ]
        assert states == ["queued", "queued", "cancelled", "running", "running", "succeeded"]
        assert (await ledger.result(generated.id)).outputs == [], (
            "the next attempt's outputs are not the former one's"
        )
        assert {message.job_id for message in await sent(ledger) if message.attempt} == {
            former.id,
            generated.id,
        }
        assert await reaper.release_boots(WORKER, "boot2") == []


async def test_two_sweepers_at_once_requeue_a_job_once(redis_url: str) -> None:
    async with opened(redis_url) as (ledger, reaper, _):
        jobs = [make_job() for _ in range(20)]
        for job in jobs:
            await claimed(ledger, job)
        reports = await asyncio.gather(*[reaper.sweep(now() + 60) for _ in range(3)])
        assert sorted(job_id for report in reports for job_id in report.requeued) == sorted(
            job.id for job in jobs
        )


async def test_the_listing_forgets_what_has_expired(redis_url: str) -> None:
    async with opened(redis_url, result_ttl_s=1) as (ledger, reaper, _):
        gone, kept = make_job(created=now() - 100), make_job(created=now() - 100)
        await claimed(ledger, gone)
        await claimed(ledger, kept)
        await ledger.store_outputs(gone.id, 1, outputs())
        await ledger.redis.delete(f"ms:job:{gone.id}")
        assert (await reaper.sweep()).pruned == 1
        assert [view.id for view in (await ledger.list()).jobs] == [kept.id]
