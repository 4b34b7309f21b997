"""Reads that several callers want at the same time: how many are made, and whether an answer is
ever older than its question.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from midstream.broker.ledger.jobs.watch import SharedReads


class Source:
    """What is read: a number that a read takes a moment to return, as it was when the read
    began.
    """

    def __init__(self) -> None:
        self.value = self.reads = 0
        self.go_on = asyncio.Event()

    async def read(self) -> int:
        self.reads += 1
        value = self.value
        await self.go_on.wait()
        if value < 0:
            raise ValueError
        return value


def run(
    scenario: Callable[[Source, SharedReads[int]], Coroutine[Any, Any, None]], fresh_s: float = 0.0
) -> None:
    async def within() -> None:
        await scenario(Source(), SharedReads(fresh_s))

    asyncio.run(within())


async def begun(*calls: Coroutine[Any, Any, int]) -> list["asyncio.Task[int]"]:
    tasks = [asyncio.create_task(call) for call in calls]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def test_callers_at_the_same_time_share_a_read_and_later_ones_do_not() -> None:
    async def scenario(source: Source, shared: SharedReads[int]) -> None:
        tasks = await begun(
            *(shared.of("key", source.read) for _ in range(50)), shared.of("other", source.read)
        )
        tasks[0].cancel()
        source.go_on.set()
        assert await asyncio.gather(*tasks[1:]) == [0] * 50
        assert source.reads == 2
        source.value = 1
        assert (await shared.of("key", source.read), source.reads) == (1, 3)

    run(scenario)


def test_an_answer_counts_for_a_while_where_that_is_wanted() -> None:
    async def scenario(source: Source, shared: SharedReads[int]) -> None:
        source.go_on.set()
        assert [await shared.of("key", source.read) for _ in range(3)] == [0, 0, 0]
        assert source.reads == 1

    run(scenario, fresh_s=60.0)


def test_an_answer_of_the_next_read_is_never_older_than_the_call() -> None:
    async def scenario(source: Source, shared: SharedReads[int]) -> None:
        first = await begun(shared.of_next("key", source.read))
        source.value = 1
        later = await begun(*(shared.of_next("key", source.read) for _ in range(50)))
        assert source.reads == 1, "one at a time"
        source.go_on.set()
        assert (await asyncio.gather(*first), await asyncio.gather(*later)) == ([0], [1] * 50)
        assert source.reads == 2

    run(scenario)


@pytest.mark.parametrize("how", ["of", "of_next"])
def test_a_failed_read_fails_all_who_share_it_and_no_other(how: str) -> None:
    async def scenario(source: Source, shared: SharedReads[int]) -> None:
        source.value = -1
        tasks = await begun(*(getattr(shared, how)("key", source.read) for _ in range(3)))
        source.go_on.set()
        assert [type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)] == [
            ValueError
        ] * 3
        source.value = 1
        assert await getattr(shared, how)("key", source.read) == 1

    run(scenario, fresh_s=60.0)
