"""Does the ledger keep what it accepts, tell it in order, list it, and forget it in time?

(What moves a job from state to state is in `test_ledger_model.py`.)
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from edge import model_info
from ledger_kit import (
    BOOT,
    IDENTITY,
    WORKER,
    claimed,
    make_job,
    open_ledger,
    outputs,
    queued_job,
    running_job,
    worker_info,
)
from mortal_redis import mortal
from refusal_kit import refuses

from midstream.broker.ledger.jobs.ledger import EventsLost, Ledger
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.ledger.results import views
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.base.tensors import Tensor, content_hash
from midstream.schemas.jobs.jobs import Event, Job, State, StoredPrompt
from midstream.schemas.service.compatibility import OLDEST_WIRE, WIRE

PROBLEM = MidstreamError("engine_failed", "it broke").problem()


def output(index: int, attempt: int = 1) -> Event:
    return Event(event="output", data={"index": index}, attempt=attempt)


async def submit(ledger: Ledger, count: int, **changes: object) -> list[Job]:
    jobs = [make_job(**changes) for _ in range(count)]
    for job in jobs:
        await ledger.submit(job, {})
    return jobs


async def test_a_claim_whose_answer_was_lost_is_the_same_claim_when_it_is_repeated(
    redis_url: str,
) -> None:
    # field case 38
    cut = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To Redis and back; once `cut` is set the next answer is kept, and the connection closed
        instead.
        """
        address = urlsplit(redis_url)
        back, forth = await asyncio.open_connection(address.hostname, address.port)

        async def answers() -> None:
            while (data := await back.read(1 << 16)) and not cut.is_set():
                writer.write(data)
            cut.clear()
            writer.close()

        answering = asyncio.create_task(answers())
        while data := await reader.read(1 << 16):
            forth.write(data)
        forth.close()
        await answering

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_ledger(f"redis://127.0.0.1:{port}/0") as ledger:
        await claimed(ledger, make_job())
        job = await queued_job(ledger)
        cut.set()
        claim = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert not cut.is_set(), "the first answer was lost"
        assert claim is not None, "else nobody would run it until its lease ends"
        assert claim.attempt == (await ledger.view(job.id)).attempt == 1
        assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is None, (
            "another call is another claim"
        )


async def test_the_same_submit_twice_is_one_job(ledger: Ledger) -> None:
    answers = await asyncio.gather(
        *[ledger.submit(make_job(), {}, ("key", "body-a")) for _ in range(10)]
    )
    [(first, _)] = [answer for answer in answers if answer[1]]
    assert {job_id for job_id, _ in answers} == {first}
    job = make_job()
    with refuses(kind="idempotency_mismatch"):
        await ledger.submit(job, {}, ("key", "body-b"))
    assert [view.id for view in (await ledger.list()).jobs] == [first]
    for _ in range(2):  # repeated after a broken connection, it is no conflict
        assert await ledger.submit(job, {}, ("other key", "body-b")) == (job.id, True)
    with pytest.raises(MidstreamError, match="already exists"):
        await ledger.submit(make_job(prompts=2, id=job.id), {})


async def test_requests_and_vectors_come_back_as_they_were_submitted(ledger: Ledger) -> None:
    vector = Tensor(dtype="float32", shape=[2], data=b"\x00\x00\x80?\xff\x00\x80?")
    prompts = [StoredPrompt(token_ids=list(range(500)), text="x" * 2000)] * 1000
    job = msgspec.structs.replace(make_job(metadata={"k": "v"}), prompts=prompts)
    await ledger.submit(job, {content_hash(vector): vector})
    assert (await ledger.request(job.id))[0] == job
    assert await ledger.get_tensor(content_hash(vector)) == vector
    assert await ledger.get_blob("unknown") is None
    with refuses(kind="intervention_failed"):
        await ledger.get_tensor("unknown")


@pytest.mark.parametrize(
    "ask",
    [
        lambda ledger: ledger.view("job_x"),
        lambda ledger: ledger.job("job_x"),
        lambda ledger: ledger.result("job_x"),
        lambda ledger: ledger.events("job_x"),
        lambda ledger: ledger.claim("job_x", "w", "b", 1, IDENTITY),
        lambda ledger: ledger.store_outputs("job_x", 1, []),
        lambda ledger: ledger.fail("job_x", 1, PROBLEM),
        lambda ledger: ledger.finish_cancel("job_x", 1),
        lambda ledger: ledger.release("job_x", 1),
        lambda ledger: ledger.emit("job_x", 1, 1, output(0)),
        lambda ledger: ledger.request_cancel("job_x"),
    ],
)
async def test_an_unknown_job_is_not_found(
    ledger: Ledger, ask: Callable[[Ledger], Awaitable[object]]
) -> None:
    with refuses(kind="not_found"):
        await ask(ledger)


async def test_events_are_read_from_where_the_reader_left_off(ledger: Ledger) -> None:
    job = await running_job(ledger)
    data = {"index": 0, "text": 'a"é', "token_ids": [1], "finish_reason": None}
    await ledger.emit(job.id, 1, 1, Event(event="token", data=data, attempt=1))
    await ledger.store_outputs(job.id, 1, outputs(), output(0))
    events = await ledger.events(job.id)
    assert [event.event for event in events] == [
        "state", "state", "token", "output", "state", "done",
    ]  # fmt: skip
    assert events[2].data["text"] == 'a"é'
    assert await ledger.events(job.id, after=events[2].id) == events[3:]
    assert await ledger.events(job.id, after=events[-1].id) == []


async def test_a_stream_that_has_lost_events_is_not_continued(ledger: Ledger) -> None:
    job = await running_job(ledger)
    for number in (1, 2, 3):
        assert await ledger.emit(job.id, 1, number, output(number))
    await ledger.redis.hset(f"ms:job:{job.id}", "said", 1)  # as a promoted replica has it
    before = await ledger.events(job.id)
    with pytest.raises(EventsLost):
        await ledger.emit(job.id, 1, 4, output(4))
    with pytest.raises(EventsLost):
        await ledger.store_outputs(job.id, 1, outputs(), text=3)
    assert await ledger.events(job.id) == before
    assert (await ledger.view(job.id)).state is State.RUNNING


async def test_an_event_retried_after_a_lost_response_is_stored_once(ledger: Ledger) -> None:
    # field case 37
    job = await running_job(ledger)
    for attempt in (1, 2):
        for number in (1, 2, 2, 1, 3):  # those that are repeated come once
            assert await ledger.emit(job.id, attempt, number, output(number, attempt))
        if attempt == 1:
            await ledger.release(job.id, 1)
            assert not await ledger.emit(job.id, 1, 4, output(4)), "nobody holds a queued job"
            assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
            assert not await ledger.emit(job.id, 1, 4, output(4)), "another one holds it"
    assert [
        (event.attempt, event.data["index"])
        for event in await ledger.events(job.id)
        if event.event == "output"
    ] == [(attempt, number) for attempt in (1, 2) for number in (1, 2, 3)]


async def test_a_list_of_a_state_reads_only_the_jobs_in_it(ledger: Ledger, reaper: Reaper) -> None:
    """Also where another version has written no lists."""
    await submit(ledger, 20, tenant="ada")
    ours = await submit(ledger, 2, tenant="bob")
    assert await ledger.claim(ours[0].id, WORKER, BOOT, 1, IDENTITY)

    async def listed(state: State, tenant: str | None = None) -> list[str]:
        before = await ledger.redis.info("commandstats")
        page = await ledger.list(state=state, tenant=tenant, limit=200)
        after = await ledger.redis.info("commandstats")
        read = after["cmdstat_hmget"]["calls"] - before["cmdstat_hmget"]["calls"]
        assert read == len(page.jobs), "no record is read in vain"
        assert page.next is None
        return [view.id for view in page.jobs]

    for _ in range(2):
        assert await listed(State.RUNNING) == await listed(State.RUNNING, "bob") == [ours[0].id]
        assert await listed(State.RUNNING, "ada") == await listed(State.FAILED) == []
        assert await listed(State.QUEUED, "bob") == [ours[1].id]
        assert len(await listed(State.QUEUED)) == 21
        await ledger.redis.delete(*await ledger.redis.keys("ms:jobs-in:*"))
        await reaper.sweep()


async def test_jobs_that_have_expired_are_listed_as_such_and_then_dropped(redis_url: str) -> None:
    async with open_ledger(redis_url, result_ttl_s=1000) as ledger:
        jobs = await submit(ledger, 3, created=now() - 3000)
        old, gone, _ = jobs
        for job in jobs:
            await ledger.request_cancel(job.id)
        await ledger.redis.hset(f"ms:job:{old.id}", "finished", repr(now() - 2000))
        assert [view.id for view in (await ledger.list(state=State.EXPIRED)).jobs] == [old.id]
        assert old.id not in [view.id for view in (await ledger.list(state=State.ABORTED)).jobs]
        await ledger.redis.delete(f"ms:job:{gone.id}")
        assert (await Reaper(ledger).sweep()).pruned == 1
        for name in ("jobs", "jobs:default", "jobs-in:aborted", "jobs-in:aborted:default"):
            assert await ledger.redis.zcard(f"ms:{name}") == 2, name


async def test_the_listing_pages_without_gap_or_repeat_also_for_equal_times(ledger: Ledger) -> None:
    jobs: list[Job] = []
    for place in range(20):
        model = "odd" if place % 2 else "even"
        jobs += await submit(ledger, 1, created=float(1000 + place // 7), model=model)
    seen = []
    cursor = None
    while True:
        page = await ledger.list(limit=6, cursor=cursor)
        seen += [view.id for view in page.jobs]
        cursor = page.next
        if cursor is None:
            break
    newest = sorted(jobs, key=lambda job: (job.created, job.id), reverse=True)
    assert seen == [job.id for job in newest]
    assert len((await ledger.list(model="even")).jobs) == 10
    with refuses(field="cursor"):
        await ledger.list(cursor="nonsense")


async def test_a_result_past_its_retention_is_gone_and_the_job_expired(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ledger(redis_url, result_ttl_s=600) as ledger:
        job = await running_job(ledger)
        await ledger.store_outputs(job.id, 1, outputs())
        assert (await ledger.result(job.id)).outputs == outputs()
        for key in await ledger.redis.keys(f"ms:*:{job.id}"):
            left = await ledger.redis.ttl(key)
            assert 0 < left <= 1200, f"{key}: the record is known for as long again"
            if left <= 600:
                await ledger.redis.delete(key)  # as if they had passed
        monkeypatch.setattr(views, "now", lambda: now() + 600)
        assert (await ledger.view(job.id)).state is State.EXPIRED
        with refuses(kind="gone"):
            await ledger.result(job.id)
        assert await ledger.redis.exists(f"ms:out:{job.id}", f"ms:events:{job.id}") == 0


async def test_workers_expire_with_their_heartbeat_and_models_stay(ledger: Ledger) -> None:
    model = model_info(wire=WIRE, oldest_wire=OLDEST_WIRE)
    worker = worker_info(wire=WIRE, oldest_wire=OLDEST_WIRE)
    await ledger.publish_model(model, worker)
    assert await ledger.workers() == [worker]
    assert 0 < await ledger.redis.pttl(f"ms:alive:{WORKER}") <= 1000 * ledger.settings.lease_s
    await ledger.redis.delete(f"ms:alive:{WORKER}")  # as if they had passed
    assert await ledger.workers() == []
    assert await ledger.models() == [model]
    assert await ledger.model(model.name) == model
    assert await ledger.model("other") is None


async def test_everything_accepted_survives_kill_9_of_redis(
    tmp_path: Path,
) -> None:  # field case 37
    accepted: list[str] = []
    enough = asyncio.Event()
    with mortal(tmp_path) as server:
        async with open_ledger(server.url) as ledger:

            async def submit_until_it_breaks() -> None:
                while True:
                    [job] = await submit(ledger, 1)
                    accepted.append(job.id)
                    if len(accepted) > 200:
                        enough.set()

            tasks = [asyncio.create_task(submit_until_it_breaks()) for _ in range(8)]
            await enough.wait()
            await asyncio.to_thread(server.kill)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {end.kind for end in ends if isinstance(end, MidstreamError)} == {"unavailable"}
            server.start()
            for job_id in accepted:
                assert (await ledger.view(job_id)).state is State.QUEUED
            assert (await ledger.claim(accepted[0], WORKER, BOOT, 1, IDENTITY)) is not None, (
                "scripts are loaded again"
            )
