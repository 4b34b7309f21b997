"""Composition of steps: which waiting requests a step does not take. Of waiting sweep cells it
takes whole prompts, with as few different layers as fill a step.

Runs in the scheduler. The worker sends about twice as many cells as one step takes, so that the
cells of the next step have arrived when a step ends, and no step runs with only one cell.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.platforms import current_platform

from .kept_blocks import KeptBlocks

#: Cells in one step at most.
CELLS = 32
#: Tokens with which a step on a CPU is as fast per token as with more. All cells of a step begin at
#: the lowest entry layer among them, so with enough tokens cells of another layer wait. An
#: accelerator fills its steps: small steps cost it more than a layer.
ENOUGH_TOKENS = 128


class RepeatedPrompt(NamedTuple):
    """Facts about a request that repeats the prompt of another, its base, up to an edit."""

    run: str  # source run of the base
    touched: int  # the first position that is edited
    layer: int  # layer at which its forward may begin, see `Entry`; 0: the first


class CellSteps:
    """Composes the steps of one scheduler."""

    def __init__(self, bases: Mapping[str, RepeatedPrompt], kept: KeptBlocks, most: int) -> None:
        """`bases`: the live requests with a base, by id. `most`: tokens in a step at most."""
        self._bases = bases
        self._kept = kept
        self._most = most
        self._enough = ENOUGH_TOKENS if current_platform.is_cpu() else most

    @contextmanager
    def composing(self, running: Sequence[Any], waiting: Any, waits: Set[str]) -> Iterator[None]:
        """Remove requests that this step should not take from `waiting`, vLLM's queue, within the
        block: those in `waits`, which would hold up others behind them, and cells.
        """
        held = {request for request in waiting if request.request_id in waits} if waits else set()
        # Otherwise a step begins with the first cells that arrive: 32 of them were split into steps
        # of 2 or 3 and of 30, and the first took a fifth of the time of the second.
        if self._bases:
            others = [request for request in waiting if request not in held]
            held |= self._held_back(running, others)
        if not held:
            yield
            return
        order = list(waiting)
        waiting.remove_requests(held)
        try:
            yield
        finally:
            rest = list(waiting)
            remaining = set(rest)
            known = set(order)
            waiting.remove_requests(remaining)
            # preempted requests come first, as in vLLM; a queue of priorities sorts them itself
            again = [request for request in rest if request not in known]
            again += [request for request in order if request in remaining or request in held]
            for request in again:
                waiting.add_request(request)

    def _held_back(self, running: Sequence[Any], waiting: Sequence[Any]) -> set[Any]:
        cells = [
            (request, self._bases[request.request_id])
            for request in waiting
            if request.request_id in self._bases
        ]
        # Next to other requests, every cell is computed from the first layer.
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
