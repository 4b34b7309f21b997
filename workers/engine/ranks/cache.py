"""Reference-counted caches of what the ranks load for requests: all ranks load it or none, and keep
it while it is in use.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from .collective import Ranks, Undo, unbroken

T = TypeVar("T")


class LoadCall(NamedTuple):
    """The call that loads one content on every rank."""

    action: str  # as errors name it
    arguments: tuple[Any, ...]


class RankRecord:
    """The worker's record of one kind's contents on the ranks; unused ones stay cached within the
    budget.
    """

    drop: ClassVar[str]  # the ranks' method that drops a list of contents
    dropping: ClassVar[str]  # the same, as errors name it

    def __init__(self, ranks: Ranks, budget: int) -> None:
        """`budget`: what the ranks keep at most, in the unit of the sizes."""
        self._ranks, self._budget = ranks, budget
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._held: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """Return the keys of what the ranks have, least recently used first."""
        return list(self._sizes)

    def release(self, keys: Iterable[str]) -> None:
        """Undo one `hold` of the same contents."""
        release(self._held, keys)

    def forget(self) -> None:
        """Clear the record: the ranks have dropped everything, including what is held."""
        self._sizes.clear()
        self._held.clear()

    def _handle(self, key: str) -> Any:
        """Return what the ranks call this content."""
        return key

    async def _evict(self, excess: int, kept: Collection[str]) -> None:
        """Drop unused contents that are not `kept`, least recently used first, until `excess` is
        gone.
        """
        dropped = []
        for key, size in self._sizes.items():
            if excess <= 0:
                break
            if key not in self._held and key not in kept:
                dropped.append(key)
                excess -= size
        if dropped:
            for key in dropped:
                # first: after a failure on one rank it is unknown which ranks have them
                del self._sizes[key]
            await self._ranks.apply(self.dropping, self.drop, [*map(self._handle, dropped)])


class RankCache(RankRecord, ABC, Generic[T]):
    """A record whose holders wait for room, first come, first served.

    A holder takes all that it needs in one turn and loads nothing while it waits, so two holders
    never wait for each other's room. It must release its contents before it holds others.
    """

    put: ClassVar[str]  # the ranks' method that loads one content

    def __init__(self, ranks: Ranks, budget: int) -> None:
        """`budget`: one holder may need more while no other holds anything."""
        super().__init__(ranks, budget)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @abstractmethod
    def _key(self, item: T) -> str:
        """Return what identifies the content."""

    @abstractmethod
    def _size(self, item: T) -> int:
        """Return its share of the budget."""

    @abstractmethod
    async def _prepare(self, item: T) -> LoadCall:
        """Check what is to be loaded. Raises MidstreamError."""

    async def hold(self, items: Sequence[T]) -> None:
        """Hold all of these on every rank, until `release`; wait while what others hold leaves no
        room.

        Raises what `_prepare` raises, MidstreamError("intervention_failed") when a rank cannot load
        one (what other ranks took is rolled back), and Quarantined. A call that raises, or is
        cancelled, holds nothing.
        """
        needed = {self._key(item): item for item in items}
        async with self._turn:
            while missing := [item for key, item in needed.items() if key not in self._sizes]:
                call = await self._prepare(missing[0])
                await self._make_room(sum(map(self._size, missing)), needed)
                await unbroken(self._load(missing[0], call))
            for key in needed:
                self._held[key] += 1
                self._sizes.move_to_end(key)

    def release(self, keys: Iterable[str]) -> None:
        super().release(keys)
        self._freed.set()

    def forget(self) -> None:
        super().forget()
        self._freed.set()

    async def _make_room(self, coming: int, needed: Collection[str]) -> None:
        """Wait until `coming` fits together with `needed` and with what others hold, then evict
        what is unused.
        """
        while True:
            others = sum(
                size for key, size in self._sizes.items() if key in self._held and key not in needed
            )
            of_request = sum(size for key, size in self._sizes.items() if key in needed)
            if not others or others + of_request + coming <= self._budget:
                break
            self._freed.clear()
            await self._freed.wait()
        excess = sum(self._sizes.values()) + coming - self._budget
        await unbroken(self._evict(excess, needed))

    async def _load(self, item: T, call: LoadCall) -> None:
        key = self._key(item)
        undo = Undo(self.drop, ([self._handle(key)],))
        await self._ranks.apply(call.action, self.put, *call.arguments, undo=undo)
        self._sizes[key] = self._size(item)


def release(holders: Counter[str], keys: Iterable[str]) -> None:
    """Take one holder from each of these keys."""
    for key in dict.fromkeys(keys):
        holders[key] -= 1
        if holders[key] <= 0:  # below: `forget` came in between
            del holders[key]
