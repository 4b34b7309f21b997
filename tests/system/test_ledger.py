"""Does a job change only as the table of transitions allows, once, and by nobody but its present
attempt?
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from ledger_kit import BOOT, IDENTITY, WORKER, claimed, make_job, open_ledger, outputs

from midstream.broker.ledger.jobs.ledger import EventsLost, Ledger
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.ledger.results import views
from midstream.broker.ops import redis_server
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.base.tensors import Tensor, content_hash
from midstream.schemas.jobs.jobs import TERMINAL, TRANSITIONS, Event, Job, State, StoredPrompt
from midstream.schemas.jobs.models import ModelInfo, WorkerInfo
from midstream.schemas.service.compatibility import OLDEST_WIRE, WIRE

PROBLEM = MidstreamError("engine_failed", "it broke").problem()


async def bring_to(ledger: Ledger, state: State) -> Job:
    """A job in `state`, after its first attempt where there was one."""
    job = make_job()
    await ledger.submit(job, {})
    if state is State.ABORTED:
        await ledger.request_cancel(job.id)
    if state in (State.RUNNING, State.CANCELLING, State.SUCCEEDED, State.FAILED, State.CANCELLED):
        await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
    if state in (State.CANCELLING, State.CANCELLED):
        await ledger.request_cancel(job.id)
    if state is State.SUCCEEDED:
        await ledger.store_outputs(job.id, 1, outputs())
    if state is State.FAILED:
        await ledger.fail(job.id, 1, PROBLEM)
    if state is State.CANCELLED:
        await ledger.finish_cancel(job.id, 1)
    assert (await ledger.view(job.id)).state is state
    return job


Deed = Callable[[Ledger, str], Awaitable[object]]
#: What may be tried on a job, and the state that it leads to from each state that lets it;
#: elsewhere nothing changes.
DEEDS: dict[str, tuple[Deed, dict[State, State]]] = {
    "claim": (
        lambda ledger, job_id: ledger.claim(job_id, "other", "other", 1, IDENTITY),
        {State.QUEUED: State.RUNNING},
    ),
    "store": (
        lambda ledger, job_id: ledger.store_outputs(job_id, 1, outputs()),
        {State.RUNNING: State.SUCCEEDED, State.CANCELLING: State.CANCELLED},
    ),
    "fail": (
        lambda ledger, job_id: ledger.fail(job_id, 1, PROBLEM),
        {State.RUNNING: State.FAILED, State.CANCELLING: State.FAILED},
    ),
    "release": (
        lambda ledger, job_id: ledger.release(job_id, 1),
        {State.RUNNING: State.QUEUED, State.CANCELLING: State.CANCELLED},
    ),
    "finish_cancel": (
        lambda ledger, job_id: ledger.finish_cancel(job_id, 1),
        {State.CANCELLING: State.CANCELLED},
    ),
    "request_cancel": (
        lambda ledger, job_id: ledger.request_cancel(job_id),
        {State.QUEUED: State.ABORTED, State.RUNNING: State.CANCELLING},
    ),
}
REACHABLE = [state for state in State if state is not State.EXPIRED]


@pytest.mark.parametrize("state", REACHABLE)
@pytest.mark.parametrize("deed", DEEDS)
async def test_every_action_follows_the_transition_table(
    redis_url: str, deed: str, state: State
) -> None:
    async with open_ledger(redis_url) as ledger:
        job = await bring_to(ledger, state)
        before = await ledger.view(job.id)
        act, leads = DEEDS[deed]
        if deed == "request_cancel" and state in TERMINAL:
            with pytest.raises(MidstreamError) as caught:
                await act(ledger, job.id)
            assert caught.value.kind == "conflict"
        else:
            await act(ledger, job.id)
        after = await ledger.view(job.id)
        if state in leads:
            assert after.state is leads[state]
            assert after.state in TRANSITIONS[state]
            assert after.version > before.version
            assert (
                await ledger.redis.zscore("ms:live", job.id) is None or after.state not in TERMINAL
            )
        else:
            assert after == before


async def test_one_of_many_claims_wins(redis_url: str) -> None:
    async with open_ledger(redis_url) as first, open_ledger(redis_url) as second:
        job = make_job()
        await first.submit(job, {})
        claims = await asyncio.gather(
            *[
                ledger.claim(job.id, f"w{place}", "b", 1, IDENTITY)
                for place in range(20)
                for ledger in (first, second)
            ]
        )
        won = [claim for claim in claims if claim is not None]
        assert len(won) == 1
        assert won[0].job == job
        assert won[0].attempt == 1


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
        await ledger.submit(job := make_job(), {})
        cut.set()
        claim = await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        assert not cut.is_set(), "the first answer was lost"
        assert claim is not None, "else nobody would run it until its lease ends"
        assert claim.attempt == (await ledger.view(job.id)).attempt == 1
        assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY) is None, (
            "another call is another claim"
        )


async def test_a_stale_attempt_is_rejected_and_changes_nothing(
    redis_url: str,
) -> None:  # field case 37
    async with open_ledger(redis_url) as ledger:
        job = make_job()
        assert await claimed(ledger, job) == 1
        assert await ledger.release(job.id, 1) is State.QUEUED
        waiting = await ledger.view(job.id)
        assert await ledger.store_outputs(job.id, 1, outputs(text="late")) is None, (
            "nobody holds a queued job"
        )
        assert await ledger.view(job.id) == waiting
        claim = await ledger.claim(job.id, "w2", "b2", 2, IDENTITY)
        assert claim is not None
        assert claim.attempt == 2
        before = await ledger.view(job.id)
        assert await ledger.store_outputs(job.id, 1, outputs(text="late")) is None
        assert await ledger.fail(job.id, 1, PROBLEM) is False
        assert await ledger.finish_cancel(job.id, 1) is False
        assert await ledger.release(job.id, 1) is None
        assert (
            await ledger.emit(job.id, 1, 1, Event(event="output", data={"index": 0}, attempt=1))
            is False
        )
        assert (await ledger.renew(WORKER, BOOT, {job.id: 1})).lost == {job.id}
        assert await ledger.view(job.id) == before
        assert await ledger.store_outputs(job.id, 2, outputs(text="good"))
        result = await ledger.result(job.id)
        assert (result.state, result.outputs[0].text, result.attempt) == (
            State.SUCCEEDED,
            "good",
            2,
        )


async def test_lease_renewal_reports_lost_and_cancelled_jobs(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        kept, lost, unwanted, done = (make_job() for _ in range(4))
        for job in (kept, lost, unwanted, done):
            await claimed(ledger, job)
        await ledger.release(lost.id, 1)
        await ledger.request_cancel(unwanted.id)
        await ledger.store_outputs(done.id, 1, outputs())
        lease = await ledger.redis.zscore("ms:live", kept.id)
        await asyncio.sleep(0.02)
        renewal = await ledger.renew(
            WORKER,
            BOOT,
            {job.id: 1 for job in (kept, lost, unwanted, done)} | {"job_unknown": 1},
        )
        assert renewal.lost == {lost.id, "job_unknown"}
        assert renewal.cancelling == {unwanted.id}
        assert await ledger.redis.zscore("ms:live", kept.id) > lease
        assert (await ledger.renew(WORKER, "another boot", {kept.id: 1})).lost == {kept.id}


async def test_cancel_while_receipts_are_awaited_ends_the_job_at_once(redis_url: str) -> None:
    # field case 38
    async with open_ledger(redis_url) as ledger:
        job = make_job(capture=True)
        await claimed(ledger, job)
        await ledger.store_outputs(job.id, 1, outputs())
        view = await ledger.request_cancel(job.id)
        assert view.state is State.CANCELLED, "no worker is left that could say that it has stopped"
        assert view.capture_status == "error"


async def test_the_same_submit_twice_is_one_job(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        first, again, other = make_job(), make_job(), make_job()
        assert await ledger.submit(first, {}, ("key", "body-a")) == (first.id, True)
        assert await ledger.submit(again, {}, ("key", "body-a")) == (first.id, False)
        with pytest.raises(MidstreamError) as caught:
            await ledger.submit(other, {}, ("key", "body-b"))
        assert caught.value.kind == "idempotency_mismatch"
        assert [view.id for view in (await ledger.list()).jobs] == [first.id]
        assert await ledger.submit(other, {}, ("other key", "body-b")) == (other.id, True)


async def test_concurrent_submits_with_one_key_make_one_job(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        answers = await asyncio.gather(
            *[ledger.submit(make_job(), {}, ("key", "body")) for _ in range(30)]
        )
        assert len({job_id for job_id, _ in answers}) == 1
        assert sum(created for _, created in answers) == 1


async def test_a_repeated_submit_after_a_broken_connection_is_no_conflict(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job()
        assert await ledger.submit(job, {}, ("key", "body")) == (job.id, True)
        assert await ledger.submit(job, {}, ("key", "body")) == (job.id, True)
        assert await ledger.submit(job, {}) == (job.id, True)
        with pytest.raises(MidstreamError, match="already exists"):
            await ledger.submit(make_job(prompts=2, id=job.id), {})


async def test_vectors_come_back_as_they_were_submitted(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        vector = Tensor(dtype="float32", shape=[2], data=b"\x00\x00\x80?\xff\x00\x80?")
        await ledger.submit(make_job(), {content_hash(vector): vector})
        assert await ledger.get_tensor(content_hash(vector)) == vector
        assert await ledger.get_blob("unknown") is None
        with pytest.raises(MidstreamError) as caught:
            await ledger.get_tensor("unknown")
        assert caught.value.kind == "intervention_failed"


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
        lambda ledger: ledger.emit("job_x", 1, 1, Event(event="done", data={})),
        lambda ledger: ledger.request_cancel("job_x"),
    ],
)
async def test_an_unknown_job_is_not_found(
    redis_url: str, ask: Callable[[Ledger], Awaitable[object]]
) -> None:
    async with open_ledger(redis_url) as ledger:
        with pytest.raises(MidstreamError) as caught:
            await ask(ledger)
        assert caught.value.kind == "not_found"


async def test_events_are_read_from_where_the_reader_left_off(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job()
        await claimed(ledger, job)
        await ledger.emit(
            job.id,
            1,
            1,
            Event(
                event="token",
                data={"index": 0, "text": 'a"é', "token_ids": [1], "finish_reason": None},
                attempt=1,
            ),
        )
        await ledger.store_outputs(job.id, 1, outputs())
        events = await ledger.events(job.id)
        assert [event.event for event in events] == ["state", "state", "token", "state", "done"]
        assert [event.data["state"] for event in events if event.event == "state"] == [
            "queued",
            "running",
            "succeeded",
        ]
        assert events[2].data["text"] == 'a"é'
        assert await ledger.events(job.id, after=events[2].id) == events[3:]
        assert await ledger.events(job.id, after=events[-1].id) == []
        with pytest.raises(MidstreamError) as caught:
            await ledger.events(job.id, after="nonsense")
        assert caught.value.kind == "invalid_request"


async def test_a_stream_that_has_lost_events_is_not_continued(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job()
        await claimed(ledger, job)
        for number in (1, 2, 3):
            assert await ledger.emit(
                job.id, 1, number, Event(event="output", data={"index": number}, attempt=1)
            )
        await ledger.redis.hset(f"ms:job:{job.id}", "said", 1)  # as a promoted replica has it
        before = await ledger.events(job.id)
        with pytest.raises(EventsLost):
            await ledger.emit(job.id, 1, 4, Event(event="output", data={"index": 4}, attempt=1))
        with pytest.raises(EventsLost):
            await ledger.store_outputs(job.id, 1, outputs(), text=3)
        assert await ledger.events(job.id) == before
        assert (await ledger.view(job.id)).state is State.RUNNING


async def test_an_event_retried_after_a_lost_response_is_stored_once(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job()
        await claimed(ledger, job)
        for attempt in (1, 2):
            for number in (1, 2, 2, 1, 3):  # those that are repeated come once
                event = Event(event="output", data={"index": number}, attempt=attempt)
                assert await ledger.emit(job.id, attempt, number, event)
            if attempt == 1:
                await ledger.release(job.id, 1)
                assert await ledger.claim(job.id, WORKER, BOOT, 1, IDENTITY)
        told = [
            (event.attempt, event.data["index"])
            for event in await ledger.events(job.id)
            if event.event == "output"
        ]
        assert told == [(attempt, number) for attempt in (1, 2) for number in (1, 2, 3)]


async def test_a_list_of_a_state_reads_only_the_jobs_in_it(redis_url: str) -> None:
    """From submission through every move, and where another version has written no lists; what has
    expired is not listed as its state.
    """

    async with open_ledger(redis_url, result_ttl_s=1000) as ledger:
        jobs = [make_job(tenant="ada" if place % 2 else "bob") for place in range(120)]
        for job in jobs:
            await ledger.submit(job, {})
        ran, stopped = jobs[0], jobs[1]
        assert await ledger.claim(ran.id, WORKER, BOOT, 1, IDENTITY)
        await ledger.request_cancel(stopped.id)

        async def listed(state: State, tenant: str | None = None) -> list[str]:
            before = await ledger.redis.info("commandstats")
            page = await ledger.list(state=state, tenant=tenant, limit=200)
            after = await ledger.redis.info("commandstats")
            assert page.next is None
            read = after["cmdstat_hmget"]["calls"] - before["cmdstat_hmget"]["calls"]
            assert read == len(page.jobs), "no record is read in vain"
            assert {view.state for view in page.jobs} <= {state}
            return [view.id for view in page.jobs]

        async def check(running: bool) -> None:
            assert (
                await listed(State.RUNNING)
                == await listed(State.RUNNING, "bob")
                == ([ran.id] if running else [])
            )
            assert await listed(State.ABORTED) == await listed(State.ABORTED, "ada") == [stopped.id]
            assert (
                await listed(State.RUNNING, "ada")
                == await listed(State.ABORTED, "bob")
                == await listed(State.FAILED)
                == []
            )
            assert set(await listed(State.QUEUED)) == {job.id for job in jobs} - {stopped.id} - (
                {ran.id} if running else set()
            )

        await check(running=True)
        await ledger.release(ran.id, 1)
        await check(running=False)
        assert len(await listed(State.QUEUED, "ada")) == 59
        await ledger.redis.delete(*await ledger.redis.keys("ms:jobs-in:*"))
        await Reaper(ledger, ledger.settings).sweep()
        await check(running=False)
        await ledger.redis.hset(f"ms:job:{stopped.id}", "finished", repr(now() - 2000))
        assert (await ledger.list(state=State.ABORTED)).jobs == []


async def test_the_jobs_of_a_state_that_have_expired_are_listed_and_dropped(redis_url: str) -> None:
    async with open_ledger(redis_url, result_ttl_s=1000) as ledger:
        old, gone = (make_job(created=now() - 3000) for _ in range(2))
        for job in (old, gone, make_job()):
            await ledger.submit(job, {})
            await ledger.request_cancel(job.id)
        await ledger.redis.hset(f"ms:job:{old.id}", "finished", repr(now() - 2000))
        assert [view.id for view in (await ledger.list(state=State.EXPIRED)).jobs] == [old.id]
        await ledger.redis.delete(f"ms:job:{gone.id}")
        await Reaper(ledger, ledger.settings).sweep()
        for name in (
            "ms:jobs",
            "ms:jobs:default",
            "ms:jobs-in:aborted",
            "ms:jobs-in:aborted:default",
        ):
            assert await ledger.redis.zcard(name) == 2, name


async def test_the_listing_pages_without_gap_or_repeat_also_for_equal_times(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        jobs = [
            make_job(created=float(1000 + place // 7), model="even" if place % 2 == 0 else "odd")
            for place in range(40)
        ]
        for job in jobs:
            await ledger.submit(job, {})
        seen, cursor = [], None
        while True:
            page = await ledger.list(limit=6, cursor=cursor)
            seen += [view.id for view in page.jobs]
            cursor = page.next
            if cursor is None:
                break
        assert seen == [
            job.id for job in sorted(jobs, key=lambda job: (job.created, job.id), reverse=True)
        ]
        await ledger.request_cancel(jobs[3].id)
        aborted = await ledger.list(state=State.ABORTED)
        assert [view.id for view in aborted.jobs] == [jobs[3].id]
        assert len((await ledger.list(model="even")).jobs) == 20
        with pytest.raises(MidstreamError) as caught:
            await ledger.list(cursor="nonsense")
        assert caught.value.field == "cursor"


async def test_a_result_past_its_retention_is_gone_and_the_job_expired(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ledger(redis_url, result_ttl_s=600) as ledger:
        job = make_job()
        await claimed(ledger, job)
        await ledger.store_outputs(job.id, 1, outputs())
        assert (await ledger.result(job.id)).outputs == outputs()
        for key in await ledger.redis.keys(f"ms:*:{job.id}"):
            left = await ledger.redis.ttl(key)
            assert 0 < left <= 1200, f"{key}: the record is known for as long again"
            if left <= 600:
                await ledger.redis.pexpire(key, 1)  # as if they had passed
        monkeypatch.setattr(views, "now", lambda: now() + 600)
        await asyncio.sleep(0.1)
        assert (await ledger.view(job.id)).state is State.EXPIRED
        with pytest.raises(MidstreamError) as caught:
            await ledger.result(job.id)
        assert caught.value.kind == "gone"
        assert await ledger.redis.exists(f"ms:out:{job.id}", f"ms:events:{job.id}") == 0


async def test_workers_expire_with_their_heartbeat_and_models_stay(redis_url: str) -> None:
    model = ModelInfo(
        name="tiny",
        version="0",
        architecture="A",
        num_layers=2,
        hidden_size=4,
        vocab_size=8,
        max_model_len=16,
        dtype="float32",
        hooks=["post_block"],
        tokenizer="0" * 64,
        wire=WIRE,
        oldest_wire=OLDEST_WIRE,
    )
    worker = WorkerInfo(
        worker="w",
        boot="b",
        model="tiny",
        version="0",
        host="h",
        pid=1,
        started=0.0,
        tp=1,
        pp=1,
        wire=WIRE,
        oldest_wire=OLDEST_WIRE,
    )

    async with open_ledger(redis_url, lease_s=60) as ledger:
        await ledger.publish_model(model, worker)
        assert await ledger.workers() == [worker]
        assert 0 < await ledger.redis.pttl("ms:alive:w") <= 60_000
        await ledger.redis.pexpire("ms:alive:w", 1)  # as if they had passed
        await asyncio.sleep(0.1)
        assert await ledger.workers() == []
        assert await ledger.models() == [model]
        assert await ledger.model("tiny") == model
        assert await ledger.model("other") is None


async def test_an_unreachable_redis_is_one_typed_error(tmp_path: Path) -> None:
    server = redis_server.start(tmp_path)
    server.kill()

    async with open_ledger(server.url) as ledger:
        with pytest.raises(MidstreamError) as caught:
            await asyncio.wait_for(ledger.submit(make_job(), {}), 15)
        assert caught.value.kind == "unavailable"


async def test_everything_accepted_survives_kill_9_of_redis(
    tmp_path: Path,
) -> None:  # field case 37
    server = redis_server.start(tmp_path)
    accepted: list[str] = []
    async with open_ledger(server.url) as ledger:

        async def submit_until_it_breaks() -> None:
            while True:
                job = make_job()
                await ledger.submit(job, {})
                accepted.append(job.id)

        tasks = [asyncio.create_task(submit_until_it_breaks()) for _ in range(8)]
        while len(accepted) <= 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.kill)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {end.kind for end in ends if isinstance(end, MidstreamError)} == {"unavailable"}
        again = redis_server.start(tmp_path, port=server.port)
        try:
            for job_id in accepted:
                assert (await ledger.view(job_id)).state is State.QUEUED
            assert (await ledger.claim(accepted[0], WORKER, BOOT, 1, IDENTITY)) is not None, (
                "scripts are loaded again"
            )
        finally:
            again.stop()


async def test_a_job_of_many_long_prompts_is_stored_as_it_is(redis_url: str) -> None:
    async with open_ledger(redis_url) as ledger:
        job = make_job(prompts=0, metadata={"k": "v"})
        job = msgspec.structs.replace(
            job, prompts=[StoredPrompt(token_ids=list(range(500)), text="x" * 2000)] * 1000
        )
        await ledger.submit(job, {})
        assert (await ledger.request(job.id))[0] == job
