"""May this request enter the engine now? What does not fit waits, in order of arrival, and never fails for it.

Two things are limited: the distinct steering rows in flight, and the memory that captured rows may take.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from ..schemas.errors import MidstreamError

Wish = TypeVar("Wish")


class _Gate(ABC, Generic[Wish]):
    """First come, first served: nobody overtakes a wish that waits. One event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Wish, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _check(self, wish: Wish) -> None:
        """Raises MidstreamError for what will never fit."""

    @abstractmethod
    def _fits(self, wish: Wish) -> bool: ...

    @abstractmethod
    def _take(self, wish: Wish) -> None: ...

    @abstractmethod
    def _give_back(self, wish: Wish) -> None: ...

    @asynccontextmanager
    async def admitted(self, wish: Wish) -> AsyncIterator[None]:
        """Hold what is wished for the block, once there is room. An empty wish never waits."""
        self._check(wish)
        if wish:
            await self._acquire(wish)
        try:
            yield
        finally:
            self._release(wish)

    async def _acquire(self, wish: Wish) -> None:
        if not self._waiting and self._fits(wish):
            self._take(wish)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (wish, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(wish)  # it was our turn in the same instant
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._wake()
            raise

    def _release(self, wish: Wish) -> None:
        self._give_back(wish)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            wish, turn = self._waiting.popleft()
            if not turn.done():
                self._take(wish)
                turn.set_result(None)


class RowAdmission(_Gate[frozenset[str]]):
    """Counts the distinct row contents in flight, by key; never more than `rows` at once. Equal contents share a row."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._in_use: Counter[str] = Counter()

    @property
    def used(self) -> int:
        return len(self._in_use)

    def _check(self, wish: frozenset[str]) -> None:
        if len(wish) > self._rows:
            detail = f"the request needs {len(wish)} steering rows, the engine has {self._rows} (setting steering_rows)"
            raise MidstreamError("intervention_failed", detail)

    def _fits(self, wish: frozenset[str]) -> bool:
        return len(self._in_use.keys() | wish) <= self._rows

    def _take(self, wish: frozenset[str]) -> None:
        self._in_use.update(wish)

    def _give_back(self, wish: frozenset[str]) -> None:
        self._in_use.subtract(wish)
        for key in wish:
            if not self._in_use[key]:
                del self._in_use[key]


class CaptureBudget(_Gate[int]):
    """Bytes of captured rows in flight: they lie in memory until the request ends and its file is written.

    At most `limit`, or one request that is larger by itself.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._held = 0

    def _fits(self, wish: int) -> bool:
        return self._held == 0 or self._held + wish <= self._limit

    def _take(self, wish: int) -> None:
        self._held += wish

    def _give_back(self, wish: int) -> None:
        self._held -= wish
