"""Is a wait that is given up really over, however often its cancellation is lost on the way?"""

import asyncio
import contextlib

from midstream.api.operations.waiting import ended


async def test_nested_waits_are_cancelled() -> None:
    async def stubborn() -> None:
        for _ in range(4):
            with contextlib.suppress(asyncio.CancelledError):
                # it is lost, as asyncio.wait_for may before Python 3.12
                await asyncio.sleep(3600)

    async def waiting(inner: "asyncio.Task[None]") -> None:
        try:
            await asyncio.wait({inner})
        finally:
            await ended(inner)

    inner = asyncio.create_task(stubborn())
    outer = asyncio.create_task(waiting(inner))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await ended(outer)
    assert inner.done(), "nobody is left behind"
    assert outer.cancelled()
