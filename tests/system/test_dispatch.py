"""Who is served next when many wait?

Windows, shares of tenants, priorities and deadlines, decided in a real Redis without a worker.
"""

from collections import Counter

import pytest
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    WORKER,
    Sent,
    outputs,
)
from line_of_jobs import opened

from midstream.schemas.access.keys import Limits, Tenant
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Sampling, State


async def test_weights_one_and_three_share_tokens_one_to_three(redis_url: str) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 4}) as line:
        await line.ledger.tenants.put(Tenant(name="paying", limits=Limits(weight=3)))
        await line.submit(4, tenant="first")  # they fill the window
        long, short = (Sampling(max_tokens=most - 3) for most in (200, 100))
        await line.submit(30, tenant="plain", sampling=short)
        await line.submit(30, tenant="paying", sampling=short)
        served = Counter((await line.serve(36))[4:])
        assert served["plain"] == pytest.approx(8, abs=1)
        assert served["paying"] == pytest.approx(24, abs=1)
        await line.submit(15, tenant="wordy", sampling=long)  # it had no credit while it was idle
        served = Counter((await line.serve(30))[4:])
        assert served["wordy"] * 2 == pytest.approx(served["plain"], abs=2), (
            "twice the tokens: half the jobs"
        )


async def test_a_tenant_that_asks_for_one_after_the_other_is_charged_for_each(
    redis_url: str,
) -> None:
    """It never waits with two; if it were forgotten whenever it waits with none, it would be next
    each time.
    """

    async with opened(redis_url, **{"tuning.dispatch_window": 1}) as line:
        await line.submit(60, tenant="batch")
        served: list[str] = []
        await line.submit(
            1, tenant="steady", sampling=Sampling(max_tokens=157)
        )  # as much as about ten of the other's
        for _ in range(40):
            served += (got := await line.serve(1))
            if got == ["steady"]:
                await line.submit(1, tenant="steady", sampling=Sampling(max_tokens=157))
        assert 3 <= served.count("steady") <= 5


async def test_jobs_of_a_tenant_keep_their_order_and_priorities_have_windows_of_their_own(
    redis_url: str,
) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 2}) as line:
        normal = await line.submit(5)
        urgent = await line.submit(3, priority="high")
        idle = await line.submit(1, priority="low")
        chat = await line.submit(1, kind="chat")
        assert [(message.job_id, message.step) for message in await line.sent()] == [
            (urgent[0].id, 0),
            (urgent[1].id, 0),
            (chat[0].id, 3),
            (normal[0].id, 6),
            (normal[1].id, 6),
            (idle[0].id, 9),
        ]
        assert len(await line.serve(10)) == 10
        assert await line.ledger.redis.keys("ms:wait:*") == []


async def test_priority_is_capped_by_the_tenant(redis_url: str) -> None:
    async with opened(redis_url) as line:
        await line.ledger.tenants.put(Tenant(name="guest", limits=Limits(highest_priority="low")))
        (job,) = await line.submit(1, tenant="guest", kind="chat", priority="high")
        assert (await line.sent())[0].step == 9
        assert (await line.ledger.view(job.id)).priority == "low"


async def test_a_job_is_claimed_with_the_weight_that_its_tenant_has_then(redis_url: str) -> None:
    async with opened(redis_url) as line:
        (job,) = await line.submit(1, tenant="guest")
        (other,) = await line.submit(1)
        await line.ledger.tenants.put(Tenant(name="guest", limits=Limits(weight=3)))
        for each, weight in ((job, 3), (other, 1)):
            claim = await line.ledger.claim(each.id, WORKER, BOOT, 1, IDENTITY)
            assert claim is not None
            assert claim.job.weight == weight


async def test_the_sweeper_leaves_waiting_jobs_alone_and_fills_windows_that_have_room(
    redis_url: str,
) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 2}) as line:
        jobs = await line.submit(8)
        await line.lose_messages()
        assert (await line.reaper.sweep(now() + 60)).resent == [job.id for job in jobs[:2]], (
            "what was sent and lost; not what waits"
        )
        await line.ledger.redis.zadd("ms:live", {jobs[5].id: now()})
        assert not await line.reaper.sweep(now() + 61), (
            "one that waits is not sent before its turn, though it was to be looked at"
        )
        assert len(await line.sent()) == 2
    async with opened(redis_url, **{"tuning.dispatch_window": 5}) as line:
        assert (await line.reaper.sweep()).picked == [job.id for job in jobs[2:5]], (
            "the window was made larger"
        )
        await line.ledger.redis.sadd(f"ms:sent:{MODEL}:6", "job_of_which_nothing_is_known")
        await line.ledger.redis.srem(f"ms:sent:{MODEL}:6", jobs[0].id)
        await line.reaper.sweep(now() + 200)
        assert {
            name.decode() for name in await line.ledger.redis.smembers(f"ms:sent:{MODEL}:6")
        } == {job.id for job in jobs[:5]}, "what is not so is put right"


async def test_a_queued_job_without_message_or_place_is_resent(redis_url: str) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 1}) as line:
        _, stray = await line.submit(2)
        await line.ledger.redis.zrem(f"ms:wait:{MODEL}:6:default", stray.id)
        await line.reaper.sweep()
        assert (await line.reaper.sweep()).resent == [stray.id]


async def test_jobs_from_before_dispatch_windows_are_served(redis_url: str) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 1}) as line:
        redis = line.ledger.redis
        former = await line.submit(3)
        for job in former:  # as an older version left it
            await redis.hdel(f"ms:job:{job.id}", "tenant", "priority", "step", "cost", "expires")
            await redis.zadd("ms:live", {job.id: now()})
        await redis.delete(
            f"ms:sent:{MODEL}:6",
            f"ms:wait:{MODEL}:6:default",
            f"ms:fair:{MODEL}:6",
            "ms:queues",
            "ms:usage",
        )
        await line.lose_messages()
        assert set((await line.reaper.sweep(now() + 1)).resent) == {job.id for job in former}
        assert (await line.ledger.tenants.usage("default")).jobs_in_flight == 3
        for job in former:
            claim = await line.ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
            assert claim is not None
            assert (
                await line.ledger.store_outputs(job.id, claim.attempt, outputs()) is State.SUCCEEDED
            )
        assert (await line.ledger.tenants.usage("default")).jobs_in_flight == 0


async def test_an_expired_job_is_never_started(redis_url: str) -> None:
    async with opened(redis_url) as line:
        (missed,) = await line.submit(1, expires=now() - 0.01)
        (begun,) = await line.submit(1, expires=now() + 60)
        assert await line.ledger.claim(missed.id, WORKER, BOOT, 1, IDENTITY) is None
        view = await line.ledger.view(missed.id)
        assert view.state == State.ABORTED
        assert (view.error.status if view.error else 0) == 504
        assert (await line.ledger.claim(begun.id, WORKER, BOOT, 1, IDENTITY)) is not None
        assert await line.ledger.release(begun.id, 1) is State.QUEUED
        report = await line.reaper.sweep(now() + 100)
        assert report.late == [], "what was begun once has no deadline any more"
        assert await line.ledger.claim(begun.id, WORKER, BOOT, 1, IDENTITY) is not None


async def test_a_user_who_may_not_write_queues_leaves_the_message_to_the_sweeper(
    redis_url: str,
) -> None:
    """As a relay with a `users.acl` of before the scripts wrote messages: what it changes is whole,
    and the job goes on.
    """

    async with opened(redis_url) as line:
        await line.ledger.redis.execute_command(
            "ACL", "SETUSER", "former", "on", ">pw", "resetchannels", "~ms:*", "&ms:*", "+@all"
        )
        try:
            async with opened(redis_url.replace("//", "//former:pw@")) as former:
                (job,) = await former.submit()
            assert await line.sent() == []
            assert (await line.reaper.sweep()).resent == [job.id]
            assert await line.sent() == [Sent(job.id, 0, 6)]
        finally:
            await line.ledger.redis.execute_command("ACL", "DELUSER", "former")
