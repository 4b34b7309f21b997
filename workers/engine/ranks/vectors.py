"""Vectors on the ranks: each is sent once, to all ranks or to none, and kept while in use."""

import asyncio
from collections.abc import Sequence

import msgspec

from ....schemas.base.records import to_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.requests.specs import StoredSteering
from ..protocol import Fetch
from .collective import RankRecord, Ranks, Undo, unbroken

#: The ranks lay out ahead the steering of at most this many requests that will use new vectors.
_USERS = 64


class RankVectors(RankRecord):
    """The worker's record of vectors on the ranks; sizes are bytes. No holder waits for space."""

    drop = "midstream_drop_vectors"
    dropping = "dropping vectors"

    def __init__(self, ranks: Ranks, budget: int) -> None:
        super().__init__(ranks, budget)
        self._lock = asyncio.Lock()

    async def hold(
        self,
        names: Sequence[str],
        fetch: Fetch,
        *,
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
                await unbroken(self._send(missing, keep=set(needed), users=users))
            for name in needed:
                self._held[name] += 1
                self._sizes.move_to_end(name)

    async def _send(
        self,
        tensors: dict[str, Tensor],
        keep: set[str],
        users: Sequence[list[StoredSteering]],
    ) -> None:
        sizes = {name: len(tensor.data) for name, tensor in tensors.items()}
        excess = sum(self._sizes.values()) + sum(sizes.values()) - self._budget
        await self._evict(excess, keep)
        await self._ranks.apply(
            "sending vectors",
            "midstream_put_vectors",
            msgspec.to_builtins(tensors, builtin_types=(bytes,)),
            list({to_msgpack(user): msgspec.to_builtins(user) for user in users[:_USERS]}.values()),
            undo=Undo(self.drop, (sorted(tensors),)),
        )
        self._sizes.update(sizes)
