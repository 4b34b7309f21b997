"""Is everything found that was left lying: lost messages, dead workers, receipts that never
came?

(What becomes of a job whose lease or deadline is over: `test_ledger_model.py`.)
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from ledger_kit import (
    BOOT,
    EPOCH,
    IDENTITY,
    MODEL,
    WORKER,
    claimed,
    claimed_again,
    error_of,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    receipt,
    relay_beat,
    sent,
    settings_for,
    settler,
    submit_unsent,
    worker_info,
)
from mortal_redis import mortal
from redis_kit import handed_over

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.jobs.status import relay_since
from midstream.broker.ledger.recovery import reaper as reaper_module
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.processes.liveness import RELAY_ALIVE_S, RELAY_KEY, RELAY_LATE_S
from midstream.broker.queue.celery_app import make_app, queue_of
from midstream.broker.receipts.relay import Relay
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import State


async def test_a_queued_job_without_a_message_gets_one(ledger: Ledger, reaper: Reaper) -> None:
    # field case 37
    began = now()
    lost = make_job()
    there = make_job(kind="chat")
    await submit_unsent(ledger, lost)
    await ledger.submit(there, {})
    assert not await reaper.sweep(began + 9.9), "both are young: the message may be on its way"
    later = now() + 30
    assert (await reaper.sweep(later)).resent == [lost.id]
    assert {message.job_id for message in await sent(ledger)} == {lost.id, there.id}
    assert not await reaper.sweep(later), "and not a second time"
    assert not await reaper.sweep(later + 60), "also when it waits for long"


async def test_a_delivered_message_is_not_resent(
    ledger: Ledger, reaper: Reaper, settle: Settler
) -> None:
    """Nor that of the next attempt, which is sent in the commit that puts the job back: the worker
    acknowledges the former one only when it has wound up, and it starts nothing.
    """
    app = make_app(ledger.settings)
    job = await queued_job(ledger, steer=True)
    with app.connection_for_read() as connection, connection.SimpleQueue(queue_of(MODEL)) as queue:
        message = queue.get(timeout=60)
        assert await sent(ledger) == []
        assert not await reaper.sweep(now() + 30)
        assert await ledger.claim(job.id, WORKER, BOOT, 2, IDENTITY) is not None
        for rank in (0, 1):
            settle.settle(WORKER, rank, EPOCH, [(1, receipt(job, rank=rank, actions=rank))])
        again = queue.get(timeout=60)
        assert not await reaper.sweep(now() + 60), "its new message is out"
        message.ack()
        again.ack()
    assert (await reaper.sweep(now() + 120)).resent == [job.id]
    app.close()


async def test_the_messages_of_a_long_queue_are_all_seen(
    ledger: Ledger, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module, "MESSAGES_CHUNK", 5)
    for _ in range(12):
        await ledger.submit(make_job(), {})
    last = make_job()
    await submit_unsent(ledger, last)
    assert (await reaper.sweep(now() + 60)).resent == [last.id]


async def test_an_expired_lease_is_another_attempt_and_the_last_ends_as_worker_lost(
    redis_url: str,
) -> None:  # field case 37
    async with open_ledger(redis_url, max_attempts=2) as ledger:
        reaper = Reaper(ledger)
        began = now()
        job = make_job(capture=True)
        assert await claimed(ledger, job) == 1
        assert not await reaper.sweep(began + 14.9)
        assert (await reaper.sweep(now() + 16)).requeued == [job.id]
        view = await ledger.view(job.id)
        assert view.state == State.QUEUED
        assert view.attempt == 1
        assert view.worker is None
        assert view.retry_reason == f"worker {WORKER} did not renew its lease"
        assert await claimed_again(ledger, job) == 2
        assert (await reaper.sweep(now() + 60)).failed == [job.id]
        error = await error_of(ledger, job)
        assert error.type == "urn:midstream:worker_lost"
        assert WORKER in error.detail


async def test_a_delayed_renewal_does_not_shorten_the_lease(
    ledger: Ledger, reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    began = now()
    await claimed(ledger, job)

    async def renewed(after: float) -> float:
        """When the lease ends, in seconds since `began`, after a renewal at that time."""
        monkeypatch.setattr(scripts, "now", lambda: began + after)
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        assert await ledger.redis.zscore("ms:live", job.id) == pytest.approx(
            float(await ledger.redis.hget(f"ms:job:{job.id}", "lease")), abs=0.001
        )
        return float(await ledger.redis.hget(f"ms:job:{job.id}", "lease")) - began

    lease_s = ledger.settings.lease_s
    assert await renewed(5) == pytest.approx(5 + lease_s, abs=0.01)
    assert await renewed(1) == pytest.approx(5 + lease_s, abs=0.01)
    await renewed(3600)
    assert await renewed(6) == pytest.approx(6 + lease_s, abs=0.01), (
        "a clock that went wrong for a moment leases nothing for an hour"
    )
    # as if it had been due when the list was read
    await ledger.redis.zadd("ms:live", {job.id: 0})
    assert not await reaper.sweep(began + 5.9 + lease_s)
    assert (await reaper.sweep(began + 6.1 + lease_s)).requeued == [job.id]


async def test_a_restart_of_redis_gives_every_live_worker_the_time_to_renew(tmp_path: Path) -> None:
    with mortal(tmp_path) as server:
        async with open_ledger(server.url, lease_s=10) as ledger:
            reaper = Reaper(ledger)
            job = make_job()
            await claimed(ledger, job)
            leased = now()
            await asyncio.to_thread(handed_over, server.url)
            server.kill()
            await asyncio.sleep(2.5)  # Redis tells its uptime in whole seconds
            server.start()
            at = leased + 10.1
            assert not await reaper.sweep(at), "the lease ran out while nobody could renew it"
            assert (await reaper.sweep(now() + 20)).requeued == [job.id]


async def test_missing_receipts_time_out_with_what_is_there_and_what_is_not(
    redis_url: str,
) -> None:
    """But not while no relay is alive, nor soon after."""
    # field case 18, 20
    async with open_ledger(redis_url, capture_timeout_s=5.0) as ledger:
        reaper = Reaper(ledger)
        job = make_job(prompts=2, capture=True)
        await claimed(ledger, job, ranks=1)
        settler(redis_url).settle(WORKER, 0, EPOCH, [(1, receipt(job, 0))])
        began = now()
        await ledger.store_outputs(job.id, 1, outputs(2))
        await ledger.renew(WORKER, BOOT, {job.id: 1})
        assert not await reaper.sweep(began + 1000)
        await relay_beat(ledger, since=began + 1002)
        assert not await reaper.sweep(began + 1006)
        assert (await reaper.sweep(began + 1008)).timed_out == [job.id]
        result = await ledger.result(job.id)
        error = await error_of(ledger, job)
        assert result.state == State.FAILED
        assert result.capture_results.status == "timed_out"
        assert "1 of 2 receipts" in result.capture_results.detail
        assert error.type == "urn:midstream:receipts_timed_out"
        assert error.status == 504


async def test_a_relay_begins_the_time_of_receipts_again_only_when_it_starts(
    ledger: Ledger, settle: Settler, redis_url: str
) -> None:
    assert await relay_since(ledger, 7.0) == 7.0, "no relay is alive"
    with redis.Redis.from_url(redis_url) as client, ExitStack() as relays:

        def started() -> Relay:
            relay = Relay(settle, settings_for(redis_url), client)
            relays.callback(relay._close)
            return relay

        first = started()
        first._beat()
        since = await relay_since(ledger, 7.0)
        assert 0 <= now() - since < 60
        first._next_beat = 0
        first._beat()
        assert await relay_since(ledger, 7.0) == since
        started()._beat()
        assert await relay_since(ledger, 7.0) > since
        first._next_beat = 0
        first._beat()
        assert await relay_since(ledger, 7.0) > since, "of the latest start"
        await ledger.redis.expire(RELAY_KEY, int(RELAY_ALIVE_S - RELAY_LATE_S))
        assert await relay_since(ledger, 7.0) == 7.0, "it is late, and may have ended"


@pytest.mark.parametrize(("boot", "found"), [(BOOT, "timed_out"), ("a later boot", "requeued")])
async def test_jobs_awaiting_receipts_of_a_dead_worker_are_retried(
    ledger: Ledger, reaper: Reaper, boot: str, found: str
) -> None:
    await relay_beat(ledger)
    job = make_job(capture=True)
    await claimed(ledger, job)
    await ledger.store_outputs(job.id, 1, outputs())
    await ledger.heartbeat(worker_info(boot=boot))
    assert getattr(await reaper.sweep(now() + 100), found) == [job.id]


async def test_a_restarted_worker_requeues_jobs_of_its_former_boots(
    ledger: Ledger, reaper: Reaper
) -> None:
    former, present, other = (make_job(capture=True) for _ in range(3))
    await claimed(ledger, former)
    await claimed(ledger, present, boot="boot2")
    await claimed(ledger, other, worker="w2")
    await ledger.store_outputs(former.id, 1, outputs())
    assert await reaper.release_boots(WORKER, "boot2") == [former.id]
    states = [(await ledger.view(job.id)).state.value for job in (former, present, other)]
    assert states == ["queued", "running", "running"]
    assert (await ledger.result(former.id)).outputs == [], (
        "the next attempt's outputs are not the former one's"
    )
    assert await reaper.release_boots(WORKER, "boot2") == []
