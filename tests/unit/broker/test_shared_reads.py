"""Reads that several callers want at the same time: how many are made, and whether an answer is
ever older than its question.
"""

import asyncio
from collections.abc import Coroutine
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


@pytest.fixture
async def source() -> Source:
    return Source()


async def begun(*calls: Coroutine[Any, Any, int]) -> list["asyncio.Task[int]"]:
    tasks = [asyncio.create_task(call) for call in calls]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_simultaneous_callers_share_a_read_and_later_ones_do_not(source: Source) -> None:
    shared = SharedReads[int](0.0)
    tasks = await begun(
        *(shared.of("key", source.read) for _ in range(50)), shared.of("other", source.read)
    )
    tasks[0].cancel()
    source.go_on.set()
    assert await asyncio.gather(*tasks[1:]) == [0] * 50
    assert source.reads == 2
    source.value = 1
    assert await shared.of("key", source.read) == 1
    assert source.reads == 3


async def test_an_answer_counts_for_a_while_where_that_is_wanted(source: Source) -> None:
    shared = SharedReads[int](60.0)
    source.go_on.set()
    assert [await shared.of("key", source.read) for _ in range(3)] == [0, 0, 0]
    assert source.reads == 1


async def test_an_answer_of_the_next_read_is_never_older_than_the_call(source: Source) -> None:
    shared = SharedReads[int](0.0)
    first = await begun(shared.of_next("key", source.read))
    source.value = 1
    later = await begun(*(shared.of_next("key", source.read) for _ in range(50)))
    assert source.reads == 1, "one at a time"
    source.go_on.set()
    assert await asyncio.gather(*first) == [0]
    assert await asyncio.gather(*later) == [1] * 50
    assert source.reads == 2


@pytest.mark.parametrize("how", ["of", "of_next"])
async def test_a_failed_read_fails_all_who_share_it_and_no_other(source: Source, how: str) -> None:
    read = getattr(SharedReads[int](60.0), how)
    source.value = -1
    tasks = await begun(*(read("key", source.read) for _ in range(3)))
    source.go_on.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in found] == [ValueError] * 3
    source.value = 1
    assert await read("key", source.read) == 1
