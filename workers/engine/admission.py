"""Admission of requests to the engine: limits the distinct steering rows in flight, the memory and
the step rows of captures, and the cells of sweeps; formats are checked one at a time.

Requests that do not fit yet wait: tenants take turns, and the requests of each are in order of
arrival.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from ...schemas.base.errors import MidstreamError

Demand = TypeVar("Demand")


class FairTurns:
    """One holder at a time. Waiting tenants take turns; each tenant's holders come in order."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        # by tenant, while one of its holders waits: of these only the first waits for the turn
        self._firsts = WeakValueDictionary[str, asyncio.Lock]()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold the turn inside the block."""
        async with self._firsts.setdefault(tenant, asyncio.Lock()), self._turn:
            yield


class _Gate(ABC, Generic[Demand]):
    """Waiting requests are never overtaken by others of their tenant. One event loop only."""

    def __init__(self) -> None:
        self._turns = FairTurns()
        self._freed = asyncio.Event()
        self.waiting = 0

    def check(self, demand: Demand) -> None:
        """Raises MidstreamError for a demand that can never fit."""

    @abstractmethod
    def _fits(self, demand: Demand) -> bool: ...

    @abstractmethod
    def _take(self, demand: Demand) -> None: ...

    @abstractmethod
    def _give_back(self, demand: Demand) -> None: ...

    @asynccontextmanager
    async def admitted(self, demand: Demand, tenant: str = "") -> AsyncIterator[None]:
        """Hold the demand inside the block, once it fits. An empty demand never waits."""
        self.check(demand)
        if demand:
            await self._acquire(demand, tenant)
        try:
            yield
        finally:
            self._release(demand)

    async def _acquire(self, demand: Demand, tenant: str) -> None:
        self.waiting += 1
        try:
            async with self._turns.turn(tenant):
                while not self._fits(demand):
                    self._freed.clear()
                    await self._freed.wait()
                self._take(demand)
        finally:
            self.waiting -= 1

    def _release(self, demand: Demand) -> None:
        self._give_back(demand)
        self._freed.set()


class RowDemand(NamedTuple):
    """A row of the steering table: its content's key, and how many pool entries it takes."""

    key: str
    entries: int


class RowAdmission(_Gate[frozenset[RowDemand]]):
    """Limits the distinct row contents in flight to `rows` rows with `entries` pool entries.

    Equal contents share a row, as those of global steering do in all requests.
    """

    def __init__(self, rows: int, entries: int) -> None:
        super().__init__()
        self._rows = rows
        self._entries = entries
        self._in_use: Counter[RowDemand] = Counter()

    def check(self, demand: frozenset[RowDemand]) -> None:
        for needed, present, setting in (
            (len(demand), self._rows, "steering_rows"),
            (_entries(demand), self._entries, "steering_entries"),
        ):
            if needed > present:
                detail = (
                    f"the request needs {needed} {setting.replace('_', ' ')}, but the engine has "
                    f"{present} (setting tuning.{setting}, and the operator's); those of global "
                    "steering and policies count"
                )
                raise MidstreamError("intervention_failed", detail)

    def _fits(self, demand: frozenset[RowDemand]) -> bool:
        rows = self._in_use.keys() | demand
        return len(rows) <= self._rows and _entries(rows) <= self._entries

    def _take(self, demand: frozenset[RowDemand]) -> None:
        self._in_use.update(demand)

    def _give_back(self, demand: frozenset[RowDemand]) -> None:
        self._in_use -= Counter(demand)  # drops what is 0


def _entries(rows: Iterable[RowDemand]) -> int:
    return sum(row.entries for row in rows)


class _Sum(_Gate[int]):
    """A gate of demands that add up."""

    def __init__(self) -> None:
        super().__init__()
        self._held = 0

    def _take(self, demand: int) -> None:
        self._held += demand

    def _give_back(self, demand: int) -> None:
        self._held -= demand


class CaptureBudget(_Sum):
    """Limits the bytes of captured rows in flight, which stay in memory until the request has ended
    and its file is written.

    The limit is `limit`; a larger request runs alone.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def _fits(self, demand: int) -> bool:
        return self._held == 0 or self._held + demand <= self._limit


class CellSlots(_Sum):
    """Limits the cells of sweeps, or sequences of harvests, in the engine to `limit()`, which may
    change between calls and is at least 1.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        super().__init__()
        self._limit = limit

    async def acquire(self, tenant: str) -> None:
        await self._acquire(1, tenant)

    def release(self) -> None:
        self._release(1)

    def _fits(self, demand: int) -> bool:
        return self._held + demand <= self._limit()


class StepRows(CaptureBudget):
    """Limits the rows that the requests in the engine capture of their next tokens to `limit`, the
    rows of the ring. A step's other captures can be split to fit. A demand is held while its
    request lives, because a preempted request starts over.

    `limit` 0: no ring and no limit.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit or sys.maxsize)

    def check(self, demand: int) -> None:
        if demand > self._limit:
            raise MidstreamError(
                "capture_failed",
                (
                    f"the request captures {demand} rows for one token; one step has room for "
                    f"{self._limit} (setting tuning.capture_buffer_mib)"
                ),
            )
