"""Source runs on the ranks: each is loaded once, by all ranks or by none, and kept while in use."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from ....schemas.requests.source_runs import RunFiles
from ..protocol import Locate
from .collective import Ranks, Undo, unbroken


class RankRuns:
    """The worker's record of the runs on the ranks; unused ones stay cached within the budget.

    A holder must not request more runs before releasing its own: two such holders would deadlock.
    """

    def __init__(self, ranks: Ranks, budget_bytes: int) -> None:
        """`budget_bytes`: of the rows of all runs, over all stages.

        One holder may need more while no other holds any.
        """
        self._ranks, self._budget = ranks, budget_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._held: Counter[str] = Counter()
        # first come, first served: requests waiting for room are never overtaken
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """Keys of the runs that the ranks have, least recently used first."""
        return list(self._sizes)

    async def hold(self, keys: Sequence[str], locate: Locate) -> None:
        """Hold all of `keys` on every rank, until `release`.

        Waits while what others hold leaves no room.

        Every run is looked up with `locate`, even if loaded: it may have been deleted since. Raises
        what `locate` raises, MidstreamError("intervention_failed") when a rank cannot load a run
        (what other ranks took is rolled back), and Quarantined. A call that raises, or is
        cancelled, holds nothing.
        """
        needed = list(dict.fromkeys(keys))
        files = {key: await locate(key) for key in needed}  # not in our turn: it may take long
        async with self._turn:
            while missing := [files[key] for key in needed if key not in self._sizes]:
                await self._make_room(sum(run.bytes for run in missing), needed)
                await unbroken(self._load(missing[0]))
            for key in needed:
                self._held[key] += 1
                self._sizes.move_to_end(key)

    def release(self, keys: Sequence[str]) -> None:
        """Undo one `hold` of the same keys."""
        for key in dict.fromkeys(keys):
            self._held[key] -= 1
            if self._held[key] <= 0:  # below: `forget` came in between
                del self._held[key]
        self._freed.set()

    def forget(self) -> None:
        """The ranks have dropped every run, including held ones."""
        self._sizes.clear()
        self._held.clear()
        self._freed.set()

    async def _make_room(self, coming: int, needed: Sequence[str]) -> None:
        """Wait until `coming` bytes fit together with `needed` and held runs, then evict unused
        runs.
        """
        while True:
            rest = sum(
                size for key, size in self._sizes.items() if key in self._held and key not in needed
            )
            staying = rest + sum(size for key, size in self._sizes.items() if key in needed)
            if not rest or staying + coming <= self._budget:
                break
            self._freed.clear()
            await self._freed.wait()
        await unbroken(self._evict(coming, needed))

    async def _evict(self, coming: int, needed: Sequence[str]) -> None:
        excess = sum(self._sizes.values()) + coming - self._budget
        dropped: list[str] = []
        for key, size in self._sizes.items():
            if excess <= 0:
                break
            if key not in self._held and key not in needed:
                dropped.append(key)
                excess -= size
        if dropped:
            for key in dropped:
                # first: after a failure on one rank it is unknown which ranks have them
                del self._sizes[key]
            await self._ranks.apply("dropping source runs", "midstream_drop_runs", dropped)

    async def _load(self, run: RunFiles) -> None:
        undo = Undo("midstream_drop_runs", ([run.key],))
        await self._ranks.apply(
            f"loading source run {run.key}",
            "midstream_put_run",
            msgspec.to_builtins(run),
            undo=undo,
        )
        self._sizes[run.key] = run.bytes
