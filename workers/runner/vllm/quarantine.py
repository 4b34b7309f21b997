"""Keeps KV blocks that hold values which are not finite out of the prefix cache.

The last stage's first rank attaches to a step's output which requests had such rows, and from which
position on. The scheduler evicts their blocks from that position on, and gives those requests block
hashes that no other request has.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

#: Attribute of a step's output: (request id, first position) of each request with rows that were
#: not finite.
_FOUND = "midstream_non_finite"
#: Attribute of a request: the first position from which on its blocks are its own.
_PRIVATE_FROM = "midstream_private_from"
#: Requests whose blocks are remembered after they were freed: a step may still be under way then.
_REMEMBERED = 256

Found = Sequence[tuple[str, int]]


def attach(output: Any, result: Callable[[], Sequence[Any]], name: str = _FOUND) -> Any:
    """A step's output with what was found in it, as attribute `name`; of an asynchronous output
    `result` is called when it is ready.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        get_output = output.get_output

        def with_found() -> ModelRunnerOutput:
            return _with(get_output(), result(), name)

        output.get_output = with_found
        return output
    return (
        _with(output, result(), name)
        if isinstance(output, ModelRunnerOutput) and output.req_ids
        else output
    )


def _with(output: ModelRunnerOutput, result: Sequence[Any], name: str) -> ModelRunnerOutput:
    if result:
        setattr(output, name, list(result))
    return output


def found_in(output: Any) -> Found:
    """Return what `attach` attached to a step's output."""
    return getattr(output, _FOUND, ())


def private(request: Any, end: int) -> str:
    """Return what the hash of a block that ends before token `end` must include so that no other
    request finds the block; or nothing.
    """
    start = getattr(request, _PRIVATE_FROM, None)
    return request.request_id if start is not None and end > start else ""


class Quarantine:
    """One per scheduler. `manager`: vLLM's `KVCacheManager`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # freed request → block size, block ids; for each group
        self._left: OrderedDict[str, list[tuple[int, list[int]]]] = OrderedDict()

    def isolate(self, request: Any, request_id: str, position: int) -> bool:
        """Exclude the request's blocks from `position` on from reuse.

        `request`: None when it has ended.

        Returns whether its hashes must change.
        """
        groups = self._blocks(request_id) if request is not None else []
        for block_size, ids in [*groups, *self._left.get(request_id, ())]:
            self._manager.evict_blocks(set(ids[position // block_size :]))
        if request is None or getattr(request, _PRIVATE_FROM, position + 1) <= position:
            return False
        setattr(request, _PRIVATE_FROM, position)
        return True

    def clean(self, request: Any) -> bool:
        """Return whether no non-finite row of the request was found."""
        return not hasattr(request, _PRIVATE_FROM)

    def leaving(self, request_id: str) -> None:
        """The request's blocks are about to be freed."""
        if groups := self._blocks(request_id):
            self._left[request_id] = groups
            self._left.move_to_end(request_id)
            while len(self._left) > _REMEMBERED:
                self._left.popitem(last=False)

    def _blocks(self, request_id: str) -> list[tuple[int, list[int]]]:
        managers = self._manager.coordinator.single_type_managers
        return [
            (manager.block_size, [block.block_id for block in blocks])
            for manager in managers
            if (blocks := manager.req_to_blocks.get(request_id))
        ]
