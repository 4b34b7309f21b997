"""What the readers of the page's feeds get is read and rendered once, however many there are."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from ledger_kit import make_job, open_ledger
from wait_kit import LONG_S

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.watch import JobWatcher
from midstream_page import job_feed
from midstream_page.job_feed import Audience, JobFeed, Subscriber

FEEDS = 10


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Ledger, JobFeed]]:
    async with open_ledger(url) as ledger, JobWatcher(ledger) as watcher:
        await watcher._hearing.wait()  # until then changes may be missed, and feeds begin again
        feed = JobFeed(ledger, watcher)
        yield ledger, feed
        feed.close()


def jobs_of(events: list[bytes]) -> list[str]:
    return [job["id"] for event in events for job in json.loads(event.split(b"data: ")[1])["jobs"]]


async def next_of(subscriber: Subscriber) -> list[bytes]:
    async with asyncio.timeout(LONG_S):
        while not (events := list(await subscriber.take(100))):
            await subscriber.woken.wait()
    return events


async def calls(ledger: Ledger, command: str) -> int:
    """How often Redis has been sent the command, by anybody."""
    found = await ledger.redis.info("commandstats")
    return int(found.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_a_change_is_read_and_rendered_once_for_all_feeds(redis_url: str) -> None:
    async with opened(redis_url) as (ledger, feed):
        known = make_job(tenant="ada")
        job = make_job(tenant="ada")
        await ledger.submit(known, {})
        with ExitStack() as open_feeds:
            feeds = [
                open_feeds.enter_context(feed.of(tenant))
                for tenant in ("ada", "bob", None)
                for _ in range(FEEDS)
            ]
            before = await calls(ledger, "zrevrange")
            firsts = [jobs_of(await next_of(subscriber)) for subscriber in feeds]
            assert firsts == [[known.id]] * FEEDS + [[]] * FEEDS + [[known.id]] * FEEDS
            assert await calls(ledger, "zrevrange") - before == 3, (
                "a list of the newest jobs is read once for each audience"
            )
            await ledger.submit(job, {})
            sent = [await next_of(subscriber) for subscriber in feeds[:FEEDS] + feeds[2 * FEEDS :]]
            assert all(jobs_of(events) == [job.id] for events in sent)
            assert len({id(event) for events in sent for event in events}) == 2, (
                "one rendering for each of the two audiences"
            )
            assert [list(await each.take(100)) for each in feeds[FEEDS : 2 * FEEDS]] == [[]] * FEEDS


async def test_a_feed_that_connects_again_reads_nothing_and_misses_nothing(redis_url: str) -> None:
    async with opened(redis_url) as (ledger, feed):
        jobs = [make_job(tenant="ada") for _ in range(3)]

        async def missed_by_a_new_one(count: int) -> set[str]:
            with feed.of("ada") as again:
                seen = jobs_of(await next_of(again)) + jobs_of(list(await again.take(100)))
            return {job.id for job in jobs[:count]} ^ set(seen)

        await ledger.submit(jobs[0], {})
        with feed.of("ada") as stays:
            await next_of(stays)
            before = await calls(ledger, "zrevrange")
            for number in (1, 2):
                await ledger.submit(jobs[number], {})
                await next_of(stays)
                assert await missed_by_a_new_one(number + 1) == set()
        assert await missed_by_a_new_one(3) == set(), "nobody was there for a moment"
        assert await calls(ledger, "zrevrange") == before


async def test_a_feed_that_has_fallen_behind_begins_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_feed, "KEPT_EVENTS", 2)
    async with opened(redis_url) as (ledger, feed):
        jobs = [make_job() for _ in range(5)]
        with feed.of(None) as quick, feed.of(None) as slow:
            for each in (quick, slow):
                await next_of(each)  # no jobs
            for job in jobs:
                await ledger.submit(job, {})
                assert jobs_of(await next_of(quick)) == [job.id]
            first, *more = await slow.take(100)
            assert b'"first":true' in first
            assert set(jobs_of([first, *more, *await slow.take(100)])) == {job.id for job in jobs}


def test_an_audience_keeps_few_events_and_always_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_feed, "KEPT_BYTES", 10)
    audience = Audience(None)
    assert audience.after(0) == []
    audience.put(b"x" * 100)
    assert audience.after(0) == [b"x" * 100]
    audience.put(b"12345678")
    assert audience.after(0) is None
    assert audience.after(1) == [b"12345678"]
    assert audience.after(2) == []
    audience.miss()
    assert audience.after(2) is None
    assert audience.after(3) == []
