"""Keeps KV blocks with non-finite values out of the prefix cache.

The first rank of the last stage attaches a list to a step's output: the requests that had
non-finite rows, each with the position of its first such row. The scheduler evicts their blocks
from that position on, and gives these requests block hashes that no other request has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from ....schemas.base.recent import Recent

#: Attribute of a step's output: (request id, first position) of each request with non-finite rows.
_NON_FINITE = "midstream_non_finite"
#: Attribute of a request: the position from which on its blocks are private.
_PRIVATE_FROM = "midstream_private_from"
#: Requests whose blocks are remembered after they were freed, since a step may still be running.
_REMEMBERED = 256

NonFiniteRows = Sequence[tuple[str, int]]


def attach(output: Any, result: Callable[[], Sequence[Any]], name: str = _NON_FINITE) -> Any:
    """Attach a step's `result` to its output, as attribute `name`; for an asynchronous
    output, `result` is called when the output is ready.
    """
    if isinstance(output, AsyncModelRunnerOutput):
        original = output.get_output

        def get_output() -> ModelRunnerOutput:
            # It refers to the output, which would stay until a garbage collection, with a step's
            # tokens and observations: collections became so many that they stopped steps.
            vars(output).pop("get_output", None)
            return _with(original(), result(), name)

        output.get_output = get_output
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


def non_finite_in(output: Any) -> NonFiniteRows:
    """Return the (request id, first position) that `attach` attached to a step's output."""
    return getattr(output, _NON_FINITE, ())


def private(request: Any, end: int) -> str:
    """Return the owner that the hash of a block ending before token `end` must include, so that no
    other request finds the block; empty for a block that may be shared.
    """
    start = getattr(request, _PRIVATE_FROM, None)
    return request.request_id if start is not None and end > start else ""


@dataclass(eq=False)
class Quarantine:
    """Isolates blocks of requests with non-finite rows; one per scheduler."""

    _manager: Any  # vLLM's `KVCacheManager`
    # freed request → (block size, block ids) of each group
    _freed: Recent[str, list[tuple[int, list[int]]]] = field(
        default_factory=partial(Recent, _REMEMBERED)
    )

    def isolate(self, request: Any, request_id: str, position: int) -> bool:
        """Exclude the request's blocks from `position` on from reuse; return whether its block
        hashes must change. `request`: None if it has ended.
        """
        groups = self._blocks(request_id) if request is not None else []
        for block_size, ids in [*groups, *self._freed.get(request_id, ())]:
            self._manager.evict_blocks(set(ids[position // block_size :]))
        if request is None or getattr(request, _PRIVATE_FROM, position + 1) <= position:
            return False
        setattr(request, _PRIVATE_FROM, position)
        return True

    def is_clean(self, request: Any) -> bool:
        """Return whether no non-finite row of the request was found."""
        return not hasattr(request, _PRIVATE_FROM)

    def leaving(self, request_id: str) -> None:
        """Remember the blocks of a request, which are about to be freed."""
        # A block that is evicted by mistake costs only a recomputation.
        if groups := self._blocks(request_id):
            self._freed[request_id] = groups

    def _blocks(self, request_id: str) -> list[tuple[int, list[int]]]:
        return [
            (manager.block_size, [block.block_id for block in blocks])
            for manager in self._manager.coordinator.single_type_managers
            if (blocks := manager.req_to_blocks.get(request_id))
        ]
