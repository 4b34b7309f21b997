"""Vectors on the ranks: each is sent once, to all ranks or to none, and kept while in use."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from ....schemas.base.records import to_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.requests.specs import StoredSteering
from ..protocol import Fetch
from .collective import Ranks, Undo, unbroken

#: Of that many requests that will use what is sent, the ranks lay out the steering ahead.
_USERS = 64


class RankVectors:
    """The worker's record of vectors on the ranks; unused ones stay cached within the budget.

    What named modules and global steering hold (`pinned`) does not count against it.
    """

    def __init__(self, ranks: Ranks, budget_bytes: int) -> None:
        self._ranks, self._budget = ranks, budget_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._held: Counter[str] = Counter()
        self._pinned: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    async def hold(
        self,
        names: Sequence[str],
        fetch: Fetch,
        *,
        pinned: bool = False,
        users: Sequence[list[StoredSteering]] = (),
    ) -> None:
        """Hold all of `names` on every rank, until `release`.

        What is sent takes along the steering of `users`.

        Raises MidstreamError("intervention_failed") when a rank refuses; what other ranks took is
        rolled back.
        """
        needed = list(dict.fromkeys(names))
        # not under the lock: it may take long
        tensors = {name: await fetch(name) for name in needed if name not in self._sizes}
        async with self._lock:
            missing = {name: tensor for name, tensor in tensors.items() if name not in self._sizes}
            for name in needed:
                if name not in self._sizes and name not in missing:  # evicted meanwhile
                    missing[name] = await fetch(name)
            if missing:
                await unbroken(
                    self._send(missing, keep=set(needed), counted=not pinned, users=users)
                )
            holders = self._pinned if pinned else self._held
            for name in needed:
                holders[name] += 1
                self._sizes.move_to_end(name)

    def release(self, names: Sequence[str], *, pinned: bool = False) -> None:
        """Undo one `hold` of the same names."""
        holders = self._pinned if pinned else self._held
        for name in dict.fromkeys(names):
            holders[name] -= 1
            if holders[name] <= 0:  # below: `forget` came in between
                del holders[name]

    def forget(self) -> None:
        """The ranks have dropped everything, including held vectors."""
        self._sizes.clear()
        self._held.clear()
        self._pinned.clear()

    async def _send(
        self,
        tensors: dict[str, Tensor],
        keep: set[str],
        counted: bool,
        users: Sequence[list[StoredSteering]],
    ) -> None:
        sizes = {name: len(tensor.data) for name, tensor in tensors.items()}
        await self._evict(sum(sizes.values()) if counted else 0, keep)
        payload = {
            name: {"dtype": t.dtype, "shape": t.shape, "data": t.data}
            for name, t in tensors.items()
        }
        distinct = list(
            {to_msgpack(user): msgspec.to_builtins(user) for user in users[:_USERS]}.values()
        )
        await self._ranks.apply(
            "sending vectors",
            "midstream_put_vectors",
            payload,
            distinct,
            undo=Undo("midstream_drop_vectors", (sorted(tensors),)),
        )
        self._sizes.update(sizes)

    async def _evict(self, coming: int, keep: set[str]) -> None:
        """Make room for `coming` bytes: evict unused vectors, least recently used first."""
        excess = (
            sum(size for name, size in self._sizes.items() if name not in self._pinned)
            + coming
            - self._budget
        )
        dropped = []
        for name, size in self._sizes.items():
            if excess <= 0:
                break
            if name not in self._held and name not in self._pinned and name not in keep:
                dropped.append(name)
                excess -= size
        if dropped:
            for name in dropped:
                # first: after a failure on one rank it is unknown which ranks have them
                del self._sizes[name]
            await self._ranks.apply("dropping vectors", "midstream_drop_vectors", dropped)
