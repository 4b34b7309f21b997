"""May this request's captured rows be held in memory now? Beyond the budget requests wait, in order of arrival.

Rows lie in the ranks' memory until the request ends and its file is written, so what is in flight must be bounded
before it starts.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CaptureBudget:
    """Bytes in flight; at most `limit`, or one request that is larger by itself. One event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes of the budget for the block; 0 never waits."""
        if size:
            await self._acquire(size)
        try:
            yield
        finally:
            self._release(size)

    async def _acquire(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._held += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(size)  # it was our turn in the same instant
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._wake()
            raise

    def _fits(self, size: int) -> bool:
        return self._held == 0 or self._held + size <= self._limit

    def _release(self, size: int) -> None:
        self._held -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._held += size
                turn.set_result(None)
