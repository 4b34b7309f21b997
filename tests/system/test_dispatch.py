"""Who is served next when many wait?

Windows, shares of tenants, priorities and deadlines, decided in a real Redis without a worker. The
two queues of a model stay apart, and a job that passes from one to the other counts, waits and ends
as it should.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from edge import model_info
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    WORKER,
    Sent,
    make_job,
    open_ledger,
    outputs,
    sent,
    worker_info as worker,
)
from msgspec.structs import replace
from refusal_kit import refuses
from sweep_rig import sweep, sweep_job
from test_reaper import relay_beat

from midstream.broker.ledger.jobs.ledger import Claim, Ledger
from midstream.broker.ledger.jobs.status import read_status
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.queue.celery_app import PRIORITY_STEPS, lists_of, queue_of
from midstream.schemas.access.keys import Limits, Tenant
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, Sampling, State
from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.jobs.queues import GRADIENTS, Queue
from midstream_lab.records.estimates import StoredAttribution, Verify
from midstream_lab.records.sweep_units import Units
from midstream_lab.records.sweeps import StoredSweep


class Line:
    """A ledger and its queue, without a worker: `serve` takes the first message and claims its
    job.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.reaper = Reaper(ledger)

    async def submit(self, count: int = 1, **changes: Any) -> list[Job]:
        jobs = [make_job(**changes) for _ in range(count)]
        for job in jobs:
            await self.ledger.submit(job, {})
        return jobs

    async def serve(self, count: int) -> list[str]:
        """Claim this many jobs, each by the first message, and give the tenants they belong to."""
        served: list[str] = []
        while len(served) < count and (messages := await self.sent()):
            await self.ledger.redis.rpop(
                lists_of(queue_of(MODEL))[PRIORITY_STEPS.index(messages[0].step)]
            )
            claim = await self.ledger.claim(messages[0].job_id, WORKER, BOOT, 1, IDENTITY)
            if claim is not None:
                served.append(claim.job.tenant)
        return served

    async def sent(self) -> list[Sent]:
        return await sent(self.ledger)

    async def lose_messages(self) -> None:
        await self.ledger.redis.delete(*lists_of(queue_of(MODEL)))


@asynccontextmanager
async def opened(url: str, **changes: Any) -> AsyncIterator[Line]:
    async with open_ledger(url, **changes) as ledger:
        yield Line(ledger)


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


async def test_a_sweep_is_scheduled_by_its_token_count(redis_url: str) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 1}) as line:
        await line.submit(1, tenant="first")  # it fills the window
        for _ in range(8):
            await line.ledger.submit(
                msgspec.structs.replace(
                    sweep_job(sweep(), MODEL), tenant="grids", identity=IDENTITY
                ),
                {},
            )
        tenth = Units(sweep()).tokens // 10
        await line.submit(
            70, tenant="plain", sampling=Sampling(max_tokens=tenth - 3)
        )  # and three tokens of prompt
        served = Counter((await line.serve(56))[1:])
        assert served["grids"] == pytest.approx(5, abs=1), "ten jobs for each sweep"


ASKED: StoredSweep = sweep(
    attribution=StoredAttribution(
        method="attribution", steps=1, seed=1, keep=1, verify=Verify(top=3, random=2, doubtful=0)
    )
)


class Queues(NamedTuple):
    """Ledgers as a worker of each queue has one."""

    vllm: Ledger
    gradients: Ledger

    async def messages(self, queue: Queue = "") -> int:
        names = lists_of(queue_of(MODEL, queue))
        return sum([await self.vllm.redis.llen(name) for name in names])

    async def lose_messages(self) -> None:
        for queue in ("", GRADIENTS):
            await self.vllm.redis.delete(*lists_of(queue_of(MODEL, queue)))

    async def submit(self, **changes: Any) -> Job:
        job = sweep_job(ASKED, MODEL)
        changes = {"kind": "attribution", "queue": GRADIENTS, "identity": IDENTITY} | changes
        job = replace(job, **changes)
        await self.vllm.submit(job, {})
        return job

    async def estimated(self) -> Job:
        """A job that a gradient worker has handed on, with four cells to compute."""
        job = await self.submit()
        claim = await claimed(self.gradients, job)
        assert await self.gradients.hand_on(job.id, claim.attempt, "", 4) == "handed_on"
        return job


async def claimed(ledger: Ledger, job: Job, name: str = "w") -> Claim | None:
    return await ledger.claim(job.id, name, BOOT, 1, IDENTITY)


@pytest.fixture
async def queues(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Queues]:
    settings = getattr(request, "param", {})
    async with (
        open_ledger(redis_url, **settings) as vllm,
        open_ledger(redis_url, engine="gradients-fake", **settings) as gradients,
    ):
        yield Queues(vllm, gradients)


async def test_a_job_is_claimed_by_workers_of_its_queue_alone(queues: Queues) -> None:
    job = await queues.submit()
    assert await queues.messages() == 0
    assert await queues.messages(GRADIENTS) == 1
    assert await claimed(queues.vllm, job) is None
    claim = await claimed(queues.gradients, job)
    assert await queues.gradients.hand_on(job.id, 1, "", 4) == "handed_on"
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1
    assert await claimed(queues.gradients, job) is None, "a former message"
    claim = await claimed(queues.vllm, job)
    assert claim.attempt == 2


@pytest.mark.parametrize("queues", [{"max_attempts": 2}], indirect=True)
async def test_a_hand_on_uses_up_no_attempt_and_may_be_repeated(queues: Queues) -> None:
    job = await queues.estimated()
    assert await queues.gradients.hand_on(job.id, 1, "", 4) == "handed_on"
    view = await queues.vllm.view(job.id)
    assert view.state == State.QUEUED
    assert view.queue == ""
    assert view.cells_expected == 4
    assert (await queues.vllm.tenants.usage("default")).sweep_cells == 4
    for attempt, state in ((2, State.QUEUED), (3, State.FAILED)):
        assert await claimed(queues.vllm, job) is not None
        assert await queues.vllm.release(job.id, attempt) is state
    assert (await queues.vllm.tenants.usage("default")).sweep_cells == 0


async def test_a_stale_attempt_and_a_cancelled_job_are_not_handed_on(queues: Queues) -> None:
    job = await queues.submit()
    other = await queues.submit()
    for each in (job, other):
        assert await claimed(queues.gradients, each) is not None
    await queues.gradients.release(job.id, 1)
    assert await claimed(queues.gradients, job) is not None
    assert await queues.gradients.hand_on(job.id, 1, "", 4) == "stale"
    await queues.vllm.request_cancel(other.id)
    assert await queues.gradients.hand_on(other.id, 1, "", 4) == "cancelling"
    assert (await queues.vllm.view(other.id)).queue == GRADIENTS


async def test_a_job_that_was_handed_on_is_cancelled_while_it_waits(queues: Queues) -> None:
    job = await queues.estimated()
    assert (await queues.vllm.request_cancel(job.id)).state is State.ABORTED
    assert await claimed(queues.vllm, job) is None
    assert (await queues.vllm.tenants.usage("default")).sweep_cells == 0


async def test_a_lost_message_is_sent_again_to_the_queue_that_the_job_is_in(queues: Queues) -> None:
    await relay_beat(queues.vllm)
    reaper = Reaper(queues.vllm)
    waits = await queues.submit()
    passed = await queues.estimated()
    await queues.lose_messages()
    assert {*(await reaper.sweep(now() + 30)).resent} == {waits.id, passed.id}
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1
    assert not await reaper.sweep(now() + 60)


async def test_an_expired_lease_requeues_the_job_in_its_queue(queues: Queues) -> None:
    await relay_beat(queues.vllm)
    job = await queues.submit()
    assert await claimed(queues.gradients, job) is not None
    await queues.lose_messages()
    report = await Reaper(queues.vllm).sweep(now() + 60)
    assert report.requeued == [job.id]
    assert await queues.messages() == 0
    assert await queues.messages(GRADIENTS) == 1


@pytest.mark.parametrize("queues", [{"tuning.dispatch_window": 1}], indirect=True)
async def test_windows_of_the_queues_are_apart_and_the_status_names_them(queues: Queues) -> None:
    for _ in range(3):
        await queues.submit()
        await queues.vllm.submit(make_job(), {})
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1
    shown = (await read_status(queues.vllm)).queues
    lines = [(each.queue, each.priority, each.sent, sum(each.waiting.values())) for each in shown]
    assert lines == [("", "batch", 1, 2), (GRADIENTS, "batch", 1, 2)]
    # as if processes of another version had let jobs end without sending the next
    await queues.lose_messages()
    for line in ("6", "6.gradients"):
        await queues.vllm.redis.delete(f"ms:sent:{MODEL}:{line}")
    await Reaper(queues.vllm).sweep()
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1


@pytest.mark.parametrize("queues", [{"tuning.dispatch_window": 1}], indirect=True)
async def test_a_job_that_was_handed_on_waits_its_turn_among_tenants(queues: Queues) -> None:
    """A tenant with many attributions does not get ahead of the others by their first phase."""
    await queues.vllm.submit(make_job(), {})
    await queues.vllm.submit(make_job(tenant="other"), {})
    for job in [await queues.submit(tenant="busy") for _ in range(3)]:
        assert await claimed(queues.gradients, job) is not None
        assert await queues.gradients.hand_on(job.id, 1, "", 4) == "handed_on"
    assert await queues.messages() == 1, "the window"
    shown = [line for line in (await read_status(queues.vllm)).queues if not line.queue]
    assert shown[0].waiting == {"other": 1, "busy": 3}


async def test_gradient_workers_are_no_workers_of_the_model(queues: Queues) -> None:
    ledger = queues.vllm
    await ledger.heartbeat(worker("w1"))
    info = GradientInfo(model=MODEL, identity=IDENTITY, dtype="float32", device="cpu")
    await ledger.publish_model(info, worker("g1", queue=GRADIENTS))
    names = [[each.worker for each in await ledger.workers(of)] for of in ("", GRADIENTS, None)]
    assert names == [["w1"], ["g1"], ["g1", "w1"]]
    assert await ledger.gradients(MODEL) == info


@pytest.mark.parametrize("queues", [{"lease_s": 60}], indirect=True)
async def test_gradient_workers_of_another_model_are_refused(queues: Queues) -> None:
    ledger = queues.vllm
    other = "b" * 64

    async def publish(name: str, identity: str) -> None:
        info = GradientInfo(model=MODEL, identity=identity, dtype="float32", device="cpu")
        await ledger.publish_model(info, worker(name, queue=GRADIENTS, identity=identity))

    async def refused(name: str, identity: str, by: str) -> None:
        with refuses(match=f"the live worker '{by}' serves", kind="model_changed"):
            await publish(name, identity)

    async def known(identity: str) -> bool:
        info = await ledger.gradients(MODEL)
        return info is not None and info.identity == identity

    await ledger.publish_model(model_info(name=MODEL), worker())
    await publish("g1", IDENTITY)
    await refused("g2", other, by="w1")
    assert await known(IDENTITY)
    await ledger.redis.delete("ms:alive:w1")
    await refused("g2", other, by="g1")
    await ledger.publish_model(model_info(name=MODEL, identity=other), worker("w2", identity=other))
    await publish("g2", other)
    await refused("g1", IDENTITY, by="w2")
    assert await known(other)
    for gone in ("w2", "g1", "g2"):
        await ledger.redis.delete(f"ms:alive:{gone}")
    await Reaper(ledger).sweep()
    assert await known(other), "jobs of the model wait for its gradient worker"
    await ledger.publish_model(model_info(name=MODEL), worker())
    await publish("g2", IDENTITY)
    await ledger.publish_model(model_info(name=MODEL, identity=other), worker(identity=other))
    await ledger.redis.delete("ms:alive:g2")
    await Reaper(ledger).sweep()
    assert not await ledger.redis.hlen("ms:gradients")
