"""Vectors on the ranks: each is sent once, to all ranks or to none, and kept while in use."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from ....schemas.base.records import to_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.requests.specs import StoredSteering
from ..protocol import Fetch
from .cache import RankRecord, release
from .collective import Ranks, Undo, unbroken

#: The ranks lay out ahead the steering of at most this many requests that will use new vectors.
_USERS = 64


class RankVectors(RankRecord):
    """The worker's record of vectors on the ranks; sizes are bytes. Holders never wait for space.

    Vectors of named modules and global steering (`pinned`) do not count against the budget.
    """

    drop, dropping = "midstream_drop_vectors", "dropping vectors"

    def __init__(self, ranks: Ranks, budget: int) -> None:
        super().__init__(ranks, budget)
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

        The steering of `users` is sent along with missing vectors, so that ranks can lay it out.
        Raises MidstreamError("intervention_failed") when a rank refuses; the other ranks then drop
        what was sent.
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

    def release(self, keys: Iterable[str], *, pinned: bool = False) -> None:
        """Undo one `hold` of the same names."""
        release(self._pinned if pinned else self._held, keys)

    def forget(self) -> None:
        super().forget()
        self._pinned.clear()

    async def _send(
        self,
        tensors: dict[str, Tensor],
        keep: set[str],
        counted: bool,
        users: Sequence[list[StoredSteering]],
    ) -> None:
        sizes = {name: len(tensor.data) for name, tensor in tensors.items()}
        await self._make_room(sum(sizes.values()) if counted else 0, keep)
        payload = {
            name: {"dtype": t.dtype, "shape": t.shape, "data": t.data}
            for name, t in tensors.items()
        }
        await self._ranks.apply(
            "sending vectors",
            "midstream_put_vectors",
            payload,
            list({to_msgpack(user): msgspec.to_builtins(user) for user in users[:_USERS]}.values()),
            undo=Undo(self.drop, (sorted(tensors),)),
        )
        self._sizes.update(sizes)

    async def _make_room(self, coming: int, keep: Collection[str]) -> None:
        """Evict unused vectors, least recently used first, until `coming` more bytes fit."""
        counted = sum(size for name, size in self._sizes.items() if name not in self._pinned)
        await self._evict(counted + coming - self._budget, {*keep, *self._pinned})
