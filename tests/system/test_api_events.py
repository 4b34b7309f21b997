"""Can a job be followed as it runs, from anywhere, without missing or repeating an event?"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
from edge import Api, Hand
from server_sent import parse

from midstream.api.context import open_context
from midstream.api.responses import events

KINDS_OF_A_CAPTURE = ["state", "state", "output", "receipt", "state", "done"]


def test_the_events_of_a_job_come_in_order_and_end_after_done(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"layers": [0]})
    hand.finish(job_id)
    answer = api.http.get(f"/v1/jobs/{job_id}/events")
    told = parse(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ([event["event"] for event in told], told[-1]["data"]) == (
        KINDS_OF_A_CAPTURE,
        {"state": "succeeded", "attempt": 1},
    )
    assert [event["data"]["state"] for event in told if event["event"] == "state"] == [
        "queued",
        "running",
        "succeeded",
    ]


def test_events_arrive_while_the_job_runs(api: Api, hand: Hand) -> None:
    job_id = api.submit()
    with httpx2.stream("GET", f"{api.url}/v1/jobs/{job_id}/events", timeout=60) as answer:
        lines = answer.iter_lines()
        assert (
            next(line for line in lines if line.startswith("data"))
            == 'data: {"state":"queued","attempt":0}'
        )
        claim = hand.claim(job_id)
        assert "running" in next(line for line in lines if line.startswith("data"))
        hand.say(claim, "hello")
        assert '"text":"hello"' in next(line for line in lines if line.startswith("data"))
        hand.store(claim)
        assert [line for line in lines if line.startswith("event")][-1] == "event: done"


def test_a_broken_connection_resumes_behind_the_last_event_seen(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"layers": [0]})
    hand.finish(job_id)
    url = f"/v1/jobs/{job_id}/events"
    whole = parse(api.http.get(url).text)
    for number, event in enumerate(whole, 1):
        rest = api.http.get(url, headers={"Last-Event-ID": event["id"]})
        assert parse(rest.text) == whole[number:]
    assert rest.status_code == 204, "there is nothing behind `done`"
    ids = [[int(part) for part in event["id"].split("-")] for event in whole]
    assert ids == sorted(ids)


async def test_event_streams_send_keepalives_and_end_despite_a_lost_done(
    api: Api, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PING_S", 0.2)
    job_id = api.submit()
    async with open_context(api.settings) as edge, asyncio.timeout(60):
        batches = events.follow(edge, job_id, events.BEGINNING)
        seen = [[event.event for event in await anext(batches)] for _ in range(3)]
        await asyncio.to_thread(hand.finish, job_id)
        # as if they were trimmed before we read on
        await edge.ledger.redis.delete(f"ms:events:{job_id}")
        rest = [[event.event for event in batch] async for batch in batches]
    assert seen + rest == [["state"], [], []]


# field case 38
def test_disconnected_event_followers_leave_no_waiters(
    api: Api, hand: Hand, pool: ThreadPoolExecutor
) -> None:
    job_id = api.submit()

    def follow_and_leave(_: int) -> None:
        with httpx2.stream("GET", f"{api.url}/v1/jobs/{job_id}/events", timeout=60) as answer:
            next(answer.iter_lines())

    list(pool.map(follow_and_leave, range(8)))
    api.until_held(0)
    hand.finish(job_id)
    assert api.view(job_id)["state"] == "succeeded"


def test_many_followers_of_a_job_cost_redis_as_much_as_one(api: Api, hand: Hand) -> None:
    followers = 20
    job_id = api.submit()
    url = f"{api.url}/v1/jobs/{job_id}/events"

    def reads() -> int:
        with hand._redis as client:
            return int(client.info("commandstats")["cmdstat_xrange"]["calls"])

    def each_reads(word: str) -> None:
        for lines in streams:
            assert word in next(line for line in lines if line.startswith("data"))

    with ExitStack() as opened:
        streams = [
            opened.enter_context(httpx2.stream("GET", url, timeout=60)).iter_lines()
            for _ in range(followers)
        ]
        each_reads('{"state":"queued","attempt":0}')
        claim = hand.claim(job_id)
        each_reads("running")
        time.sleep(0.5)  # all wait again
        before = reads()
        hand.say(claim, "hello")
        each_reads('"text":"hello"')
        assert reads() - before < followers, "each would read for itself, more than once"
