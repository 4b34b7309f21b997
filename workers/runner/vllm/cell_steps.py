"""Composition of steps from waiting sweep cells: whole prompts, of as few layers as fill a step.

The worker sends about twice as many cells as one step takes. So the next step's are here when one
ends, and none runs with the first cell to arrive. Lives in the scheduler.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.platforms import current_platform

from .kept_blocks import KeptBlocks

#: Cells in one step.
CELLS = 32
#: With that many tokens a step on a CPU is as fast per token as with more. All cells of a step
#: begin at the lowest layer of one of them, so those of the next layer then wait. An accelerator
#: takes what there is: it has less to lose by a layer than by a small step.
ENOUGH_TOKENS = 128


class Based(NamedTuple):
    """A request that repeats the prompt of another, its base, up to an edit."""

    run: str  # of the base
    touched: int  # the first position that is edited
    layer: int  # where its forward may begin, see `Entry`; 0: at the first


class CellSteps:
    """One per scheduler.

    `bases`: the live requests with a base, by id. `most`: tokens in a step.
    """

    def __init__(self, bases: Mapping[str, Based], kept: KeptBlocks, most: int) -> None:
        self._bases, self._kept, self._most = bases, kept, most
        self._enough = ENOUGH_TOKENS if current_platform.is_cpu() else most

    @contextmanager
    def composing(self, running: Sequence[Any], waiting: Any) -> Iterator[None]:
        """Keep the cells that are not for this step out of `waiting`, vLLM's queue of requests, in
        this block.
        """
        held = self._not_now(running, waiting) if self._bases else set()
        if not held:
            yield
            return
        order = list(waiting)
        waiting.remove_requests(held)
        try:
            yield
        finally:
            rest = list(waiting)
            remaining, known = set(rest), set(order)
            waiting.clear()
            # preempted: first, as vLLM has it
            waiting.extend(request for request in rest if request not in known)
            waiting.extend(request for request in order if request in remaining or request in held)

    def _not_now(self, running: Sequence[Any], waiting: Any) -> set[Any]:
        cells = [
            (request, self._bases[request.request_id])
            for request in waiting
            if request.request_id in self._bases
        ]
        # Next to others every cell is computed from the first layer.
        alone = len(cells) == len(waiting) and all(
            request.request_id in self._bases for request in running
        )
        tokens = 0
        for number, (request, cell) in enumerate(cells):
            computed = request.num_tokens - (cell.touched if cell.run in self._kept else 0)
            full = number == CELLS or tokens + computed > self._most
            if number and (
                full
                or (alone and tokens >= self._enough and cell.layer != cells[number - 1][1].layer)
            ):
                return {request for request, _ in cells[number:]}
            tokens += computed
        return set()
