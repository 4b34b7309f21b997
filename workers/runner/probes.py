"""Scores of probes on a rank: computed from the rows that each step records, before its output goes to the scheduler.

One batched product for all requests with the same probes: `[sites, rows, hidden_size] × [sites, hidden_size, labels]`, float32. Every
rank of a stage computes the same; the scores' checksum goes into the ledger of actions, in which ranks must agree.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...schemas.specs import RankSpec
from .capture import Extent, Recording
from .probe_news import News
from .probe_stacks import Stack, Stacks
from .steering_tables import VectorStore
from .watches import Watch, news_of_all


#: Elements of rows that are made float32 together.
_AT_ONCE = 2**19


@dataclass(eq=False)
class _Batch:
    """The rows of one step."""

    items: list[tuple[Recording, Extent]]
    news: list[News] = field(default_factory=list)


class Scorer:
    """One per rank."""

    def __init__(
        self, vectors: VectorStore, hidden_size: int, *, waits: bool, streams: bool = True, faulty: Callable[[], bool] = lambda: False
    ) -> None:
        """`waits`: rows are there when a step is over; otherwise they are scored when they have landed, at the request's end at the latest.

        `streams`: scores may travel with the tokens: all layers are here. `faulty`: tests only, whether a step's scores are to be wrong.
        """
        self._hidden_size, self._waits, self._faulty, self._streams = hidden_size, waits, faulty, streams
        self._stacks = Stacks(vectors, hidden_size)
        self._pending: deque[_Batch] = deque()
        self._last: _Batch | None = None  # of the step that ran last
        self._lock = threading.Lock()  # an asynchronous output's thread asks for the news
        self._error: Exception | None = None

    def watch(self, request_id: str, spec: RankSpec, recordings: Iterable[Recording]) -> Watch | None:
        """Give the recordings of its probes on this rank what is to be computed of their rows; None: it has none here.

        Raises LookupError and ValueError for weights that are not here or of another shape.
        """
        mine = [recording for recording in recordings if recording.capture.scored]
        plan = self._stacks.plan(spec.probes, mine) if mine else None
        if plan is None:
            return None
        streams_from = spec.prompt_tokens - 1 if spec.stream_scores and self._streams else -1
        watch = Watch(request_id, [spec.probes[number] for number in plan.here], streams_from, plan.kind)
        for recording, stack in zip(mine, plan.stacks, strict=True):
            recording.watch, recording.stack = watch, stack
        return watch

    def take(self, recorded: Sequence[tuple[Recording, Extent]], recordings: Iterable[Recording]) -> None:
        """Score these rows, now or when they have landed; and those that the prefix cache served to `recordings`."""
        mine = [(recording, extent) for recording, extent in recorded if recording.watch is not None]
        for recording in (each for each in recordings if each.watch is not None and each.reused):
            mine += [(recording, extent) for extent in recording.reused]
            recording.reused = []
        self._last = _Batch(mine) if mine else None
        if self._last is not None:
            self._pending.append(self._last)
        self.settle(wait=self._waits)

    def settle(self, *, wait: bool) -> None:
        """Score the rows that have landed, in the order of the steps. `wait`: for all of them. Raises what went wrong."""
        with self._lock:
            while self._pending and (wait or all(extent.step.landing.done() for _, extent in self._pending[0].items)):
                self._score(self._pending.popleft())
            error, self._error = self._error, None
        if error is not None:
            raise error

    def news(self) -> Callable[[], list[News]]:
        """Of the step that ran last. What it returns may be called in any thread; it waits for the step."""
        batch = self._last

        def of_step() -> list[News]:
            if batch is None:
                return []
            with self._lock:
                while batch in self._pending:
                    self._score(self._pending.popleft())
            return batch.news

        return of_step

    def _score(self, batch: "_Batch") -> None:
        """An error is raised by the next `settle`, which fails the requests."""
        try:
            self._compute(batch.items)
            watches = {id(recording.watch): recording.watch for recording, _ in batch.items if recording.watch is not None}
            batch.news += news_of_all(watches.values())
        except Exception as error:
            self._error = error

    def _compute(self, items: Sequence[tuple[Recording, Extent]]) -> None:
        groups: dict[tuple[int, int], tuple[Stack, list[Watch], list[Extent]]] = {}  # those with rows in one slab, of the same probes
        for recording, extent in items:
            if (stack := recording.stack) is not None and (watch := recording.watch) is not None:
                _, watches, extents = groups.setdefault((id(extent.step), id(stack)), (stack, [], []))
                watches.append(watch)
                extents.append(extent)
        wrong = np.float32(self._faulty())
        for stack, watches, extents in groups.values():
            step = extents[0].step
            step.landing.wait()
            slots = _slots(stack.ports, extents)
            scores = _products(step.slab, slots, stack).transpose(0, 1).reshape(slots.shape[1], -1).numpy()[:, stack.flat]
            if wrong:
                scores = scores + wrong
            at = 0
            for watch, extent in zip(watches, extents, strict=True):
                watch.put(extent.first_position, stack.columns, scores[at : at + extent.count])
                at += extent.count


def _slots(ports: np.ndarray, extents: Sequence[Extent]) -> np.ndarray:
    """`[ports, rows]`: where the extents' rows lie in their slab."""
    step = extents[0].step
    slots = np.array([extent.slots for extent in extents])[:, step.pattern[ports]]  # [extents, ports]
    first: np.ndarray = step.base[ports][:, None] + slots.T
    counts = [extent.count for extent in extents]
    if max(counts) == 1:
        return first
    return np.concatenate([first[:, [number]] + np.arange(count) for number, count in enumerate(counts)], axis=1)


def _products(slab: torch.Tensor, slots: np.ndarray, stack: Stack) -> torch.Tensor:
    """Float32 `[ports, rows, width]` of the rows at `slots`, `[ports, rows]`. Many rows are taken in parts that stay in the cache."""
    ports, count = slots.shape
    if slots.size * slab.shape[1] <= _AT_ONCE:
        rows = _rows(slab, slots.reshape(-1)).view(ports, count, -1).float()
        return torch.baddbmm(stack.bias, rows, stack.weight)
    products = torch.empty(ports, count, stack.weight.shape[2])
    part = max(1, _AT_ONCE // slab.shape[1])
    for port in range(ports):
        for first in range(0, count, part):
            rows = _rows(slab, slots[port, first : first + part]).float()
            torch.addmm(stack.bias[port], rows, stack.weight[port], out=products[port, first : first + part])
    return products


def _rows(slab: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    """`[slots, hidden_size]`, without a copy where they lie one behind the other."""
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all()):
        return slab[first : first + count]
    return slab[torch.from_numpy(slots)]
