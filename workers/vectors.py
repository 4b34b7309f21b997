"""Which vectors are on the ranks? Each is sent once, to all ranks or to none, and kept while a job needs it."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..schemas.errors import MidstreamError
from ..schemas.tensors import Tensor
from .collective import check_apply_results

#: Calls a method on all ranks and returns their answers in rank order.
CollectiveCall = Callable[[str, tuple[Any, ...]], Awaitable[Sequence[Any]]]


class RankVectors:
    """The worker's account of what the ranks hold; vectors that no job holds stay as a cache within the budget."""

    def __init__(self, call: CollectiveCall, world: int, budget_bytes: int) -> None:
        self._call, self._world, self._budget = call, world, budget_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._held: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    async def hold(self, names: Sequence[str], fetch: Callable[[str], Awaitable[Tensor]]) -> None:
        """All of `names` on every rank, until `release`.

        Raises MidstreamError("intervention_failed") when a rank refuses; what other ranks took is rolled back.
        """
        wanted = list(dict.fromkeys(names))
        tensors = {name: await fetch(name) for name in wanted if name not in self._sizes}  # not under the lock: it may take long
        async with self._lock:
            missing = {name: tensor for name, tensor in tensors.items() if name not in self._sizes}
            for name in wanted:
                if name not in self._sizes and name not in missing:  # evicted meanwhile
                    missing[name] = await fetch(name)
            if missing:
                await self._evict(sum(len(tensor.data) for tensor in missing.values()), keep=set(wanted))
                await self._send(missing)
                self._sizes.update({name: len(tensor.data) for name, tensor in missing.items()})
            for name in names:
                self._held[name] += 1
                self._sizes.move_to_end(name)

    def release(self, names: Sequence[str]) -> None:
        for name in names:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    async def _send(self, tensors: dict[str, Tensor]) -> None:
        payload = {name: {"dtype": t.dtype, "shape": t.shape, "data": t.data} for name, t in tensors.items()}
        results = await self._call("midstream_put_vectors", (payload,))
        try:
            check_apply_results("sending vectors", [tuple(result) for result in results], self._world)
        except MidstreamError:
            rollback = await self._call("midstream_drop_vectors", (sorted(tensors),))
            check_apply_results("rolling back vectors", [tuple(result) for result in rollback], self._world)
            raise

    async def _evict(self, coming: int, keep: set[str]) -> None:
        """Make room for `coming` bytes: drop what nobody holds, least recently used first."""
        excess = sum(self._sizes.values()) + coming - self._budget
        dropped = []
        for name, size in self._sizes.items():
            if excess <= 0:
                break
            if not self._held[name] and name not in keep:
                dropped.append(name)
                excess -= size
        if dropped:
            results = await self._call("midstream_drop_vectors", (dropped,))
            check_apply_results("dropping vectors", [tuple(result) for result in results], self._world)
            for name in dropped:
                del self._sizes[name]
