"""Calls to all ranks, and reference-counted caches of what they load for requests: every answer is
checked; an action that fails on a rank is undone on all.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from ....schemas.base.errors import KindError

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Calls a method on all ranks and returns their answers in rank order; raises
#: MidstreamError("engine_failed") when it cannot.
CollectiveCall = Callable[[str, tuple[Any, ...]], Awaitable[Sequence[Any]]]


class Refused(KindError):
    """A rank refused an action requested of all."""

    KIND = "intervention_failed"


class Quarantined(KindError):
    """The state of the ranks may differ: no job may run here until they are resynced."""

    KIND = "intervention_failed"


class Undo(NamedTuple):
    """The call that undoes an action; harmless on a rank where it never succeeded."""

    method: str
    arguments: tuple[Any, ...]


def check_apply_results(action: str, results: Sequence[tuple[bool, str]], world: int) -> None:
    """Raises Refused (`intervention_failed`) naming every rank that failed and why.

    `results`: one `(ok, message)` of each rank, in rank order.
    """
    if len(results) != world:
        raise Refused(f"{action}: {len(results)} of {world} ranks answered")
    failures = [
        f"rank {rank}: {message or 'no reason was given'}"
        for rank, (ok, message) in enumerate(results)
        if not ok
    ]
    if failures:
        raise Refused(f"{action} failed on {'; '.join(failures)}")


@dataclass(eq=False)
class Ranks:
    """All ranks of an engine.

    `_on_quarantine(reason)` is called, in addition to the exception, if the ranks may differ from
    now on.
    """

    _call: CollectiveCall
    _world: int
    _on_quarantine: Callable[[str], None]

    async def check(self, action: str, method: str, *arguments: Any) -> None:
        """Call a method that changes nothing. Raises Refused with rank and reason."""
        check_apply_results(action, await self._ask(method, arguments), self._world)

    async def apply(
        self, action: str, method: str, *arguments: Any, undo: Undo | None = None
    ) -> None:
        """Change something on every rank, or on none.

        Once begun it is completed, even if the caller is cancelled.

        Raises Refused with rank and reason if a rank failed and all rolled back, and Quarantined if
        the rollback also failed or there is none.
        """
        await unbroken(self._apply(action, method, arguments, undo))

    async def _apply(
        self, action: str, method: str, arguments: tuple[Any, ...], undo: Undo | None
    ) -> None:
        results = await self._ask(method, arguments)
        try:
            check_apply_results(action, results, self._world)
        except Refused as failure:
            if undo is None:
                raise self._quarantine(failure.detail) from failure
            try:
                check_apply_results(f"undoing {action}", await self._ask(*undo), self._world)
            except Refused as undo_failure:
                raise self._quarantine(f"{failure.detail}; {undo_failure.detail}") from undo_failure
            raise

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> list[tuple[bool, str]]:
        return [(bool(ok), str(message)) for ok, message in await self._call(method, arguments)]

    def _quarantine(self, detail: str) -> Quarantined:
        self._on_quarantine(detail)
        return Quarantined(detail)


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to completion; a cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception as error:
            if cancelled is not None:
                logger.info("a call begun by a cancelled caller failed: %s", error)
    if cancelled is not None:
        raise cancelled
    return task.result()


class LoadCall(NamedTuple):
    """The call that loads one item on every rank."""

    action: str  # as errors name it
    arguments: tuple[Any, ...]


class RankRecord:
    """The worker's record of one kind of item on the ranks; unused items stay cached within the
    budget.
    """

    drop: ClassVar[str]  # the ranks' method that drops a list of items
    dropping: ClassVar[str]  # how errors name that action

    def __init__(self, ranks: Ranks, budget: int) -> None:
        """`budget`: the largest sum of sizes that the ranks keep."""
        self._ranks = ranks
        self._budget = budget
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._held: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """Return the keys of the items on the ranks, least recently used first."""
        return list(self._sizes)

    def release(self, keys: Iterable[str]) -> None:
        """Undo one `hold` of the same items."""
        self._held -= Counter(set(keys))  # drops what is 0, or less after a `forget` in between

    def forget(self) -> None:
        """Clear the record: the ranks have dropped everything, including what is held."""
        self._sizes.clear()
        self._held.clear()

    def _handle(self, key: str) -> Any:
        """Return what the ranks call this item."""
        return key

    async def _evict(self, excess: int, kept: Collection[str]) -> None:
        """Drop unused items that are not `kept`, least recently used first, until their sizes
        add up to `excess`.
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
                # before the call: if one rank fails, it is unknown which ranks have the item
                del self._sizes[key]
            await self._ranks.apply(self.dropping, self.drop, [*map(self._handle, dropped)])


class RankCache(RankRecord, ABC, Generic[T]):
    """A record whose holders wait for space, first come, first served.

    A holder takes all that it needs in one turn and loads nothing while it waits, so two holders
    never wait for each other's space. It must release its items before it holds others.
    """

    put: ClassVar[str]  # the ranks' method that loads one item

    def __init__(self, ranks: Ranks, budget: int) -> None:
        """`budget`: a single holder may exceed it while no other holds anything."""
        super().__init__(ranks, budget)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @abstractmethod
    def _key(self, item: T) -> str:
        """Return the key that identifies the item by its content."""

    @abstractmethod
    def _size(self, item: T) -> int:
        """Return the item's share of the budget."""

    @abstractmethod
    async def _prepare(self, item: T) -> LoadCall:
        """Check the item and return the call that loads it. Raises MidstreamError."""

    async def hold(self, items: Sequence[T]) -> None:
        """Hold all items on every rank, until `release`; wait while items held by others leave
        no space.

        Raises what `_prepare` raises, MidstreamError("intervention_failed") when a rank cannot load
        an item (the other ranks then drop it), and Quarantined. A call that raises, or is
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
        unused items.
        """
        while True:
            held = sum(
                size for key, size in self._sizes.items() if key in self._held and key not in needed
            )
            loaded = sum(size for key, size in self._sizes.items() if key in needed)
            if not held or held + loaded + coming <= self._budget:
                break
            self._freed.clear()
            await self._freed.wait()
        await unbroken(self._evict(sum(self._sizes.values()) + coming - self._budget, needed))

    async def _load(self, item: T, call: LoadCall) -> None:
        key = self._key(item)
        undo = Undo(self.drop, ([self._handle(key)],))
        await self._ranks.apply(call.action, self.put, *call.arguments, undo=undo)
        self._sizes[key] = self._size(item)
