"""May this request's steering rows enter the engine now? Beyond the table's size they wait, in order of arrival."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..schemas.errors import MidstreamError


class RowAdmission:
    """Counts the distinct row contents in flight; never more than `rows` at once. One event loop only."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._in_use: Counter[str] = Counter()
        self._waiting: deque[tuple[frozenset[str], asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return len(self._in_use)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self, keys: frozenset[str]) -> AsyncIterator[None]:
        """Hold `keys` (row contents) for the block. Raises MidstreamError when one request alone needs too many."""
        if len(keys) > self._rows:
            raise MidstreamError(
                "intervention_failed", f"the request needs {len(keys)} steering rows, the engine has {self._rows} (setting steering_rows)"
            )
        if keys:
            await self._acquire(keys)
        try:
            yield
        finally:
            self._release(keys)

    async def _acquire(self, keys: frozenset[str]) -> None:
        if not self._waiting and self._fits(keys):
            self._in_use.update(keys)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (keys, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(keys)  # it was our turn in the same instant
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._wake()
            raise

    def _fits(self, keys: frozenset[str]) -> bool:
        return len(self._in_use.keys() | keys) <= self._rows

    def _release(self, keys: frozenset[str]) -> None:
        for key in keys:
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            keys, turn = self._waiting.popleft()
            if not turn.done():
                self._in_use.update(keys)
                turn.set_result(None)
