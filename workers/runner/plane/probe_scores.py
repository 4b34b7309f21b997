"""Scores of probes on a rank: computed from the rows that each step records, before its output goes
to the scheduler.

One batched product for all requests with the same probes: `[sites, rows, hidden_size] × [sites,
hidden_size, labels]`, float32. Every rank of a stage computes the same; the scores' checksum goes
into the ledger of actions, in which ranks must agree.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ....schemas.requests.specs import RankSpec
from ..edits.steering_tables import VectorStore
from ..probes.probe_news import News
from ..probes.watches import Watch, news_of_all
from ..probes.weight_stacks import Side, Stack, Stacks
from ..rows.capture import Extent, Recording

#: Elements of rows that are made float32 together.
_AT_ONCE = 2**19
#: Rows that no one waits for are scored when they are of that many steps, or hold that many bytes
#: of slabs.
_STEPS, _BYTES = 16, 2**25
_Item = tuple[Recording, Extent]


@dataclass(eq=False)
class _Batch:
    """The rows of one step that are scored as soon as they are there."""

    items: list[_Item]
    news: list[News] = field(default_factory=list)


class Scorer:
    """One per rank."""

    def __init__(
        self,
        vectors: VectorStore,
        hidden_size: int,
        *,
        waits: bool,
        streams: bool = True,
    ) -> None:
        """`waits`: rows are there when a step is over; otherwise they are scored when they have
        landed, at the request's end at the latest.

        `streams`: scores may travel with the tokens: all layers are here.
        """
        self._waits, self._streams = waits, streams
        self._stacks = Stacks(vectors, hidden_size)
        self._pending: deque[_Batch] = deque()
        self._last: _Batch | None = None  # of the step that ran last
        self._kept: dict[Watch, list[_Item]] = {}  # rows that no one waits for
        # of them, and of rows scored meanwhile because their requests ended
        self._kept_steps = self._kept_bytes = 0
        self._lock = threading.Lock()  # an asynchronous output's thread asks for the news
        self._error: Exception | None = None

    def watch(
        self, request_id: str, spec: RankSpec, recordings: Iterable[Recording]
    ) -> Watch | None:
        """Give the recordings of its probes on this rank what should be computed of their rows;
        None: it has none here.

        Raises LookupError and ValueError for weights that are not here or of another shape.
        """
        scored = [recording for recording in recordings if recording.capture.scored]
        sides = [
            Side(recording.capture.at, recording.ports, recording.wants) for recording in scored
        ]
        plan = self._stacks.plan(spec.probes, sides) if sides else None
        if plan is None:
            return None
        streams_from = spec.prompt_tokens - 1 if spec.stream_scores and self._streams else -1
        watch = Watch(
            request_id, [spec.probes[number] for number in plan.numbers], streams_from, plan.kind
        )
        for recording, stack in zip(scored, plan.stacks, strict=True):
            recording.watch, recording.stack = watch, stack
        return watch

    def take(self, recorded: Sequence[_Item], recordings: Iterable[Recording]) -> None:
        """Score these rows, now or when they have landed; and those that the prefix cache served to
        `recordings`.

        Those whose scores no one waits for are kept for a while: many are scored in about the time
        of a few.
        """
        items = [item for item in recorded if item[0].watch is not None]
        for recording in (one for one in recordings if one.watch is not None and one.reused):
            items += [(recording, extent) for extent in recording.reused]
            recording.reused = []
        if self._waits:
            self._keep(
                [item for item in items if item[0].watch is not None and not item[0].watch.urgent]
            )
            items = [item for item in items if item[0].watch is not None and item[0].watch.urgent]
        self._last = _Batch(items) if items else None
        if self._last is not None:
            self._pending.append(self._last)
        self.settle(wait=self._waits)

    def _keep(self, items: Sequence[_Item]) -> None:
        for recording, extent in items:
            assert recording.watch is not None, "only watched rows are kept"
            self._kept.setdefault(recording.watch, []).append((recording, extent))
        self._kept_steps += bool(items)
        self._kept_bytes += sum(
            {id(extent.step): extent.step.slab.nbytes for _, extent in items}.values()
        )
        if self._kept_steps >= _STEPS or self._kept_bytes >= _BYTES:
            self._score_kept(list(self._kept))
            self._kept_steps = self._kept_bytes = 0

    def _score_kept(self, watches: Iterable[Watch]) -> None:
        """An error is raised by the next `settle`."""
        items = [item for watch in watches for item in self._kept.pop(watch, [])]
        try:
            if items:
                self._compute(items)
        except Exception as error:
            self._error = error

    def settle(self, *, wait: bool, over: Iterable[Watch] = ()) -> None:
        """Score the rows that have landed, in the order of the steps. Raises what went wrong.

        `wait`: for all of them. `over`: those whose requests have ended.
        """
        self._score_kept(over)
        with self._lock:
            while self._pending and (
                wait or all(extent.step.landing.done() for _, extent in self._pending[0].items)
            ):
                self._score(self._pending.popleft())
            error, self._error = self._error, None
        if error is not None:
            raise error

    def clear(self) -> None:
        """Forget the rows that are kept."""
        self._kept.clear()
        self._kept_steps = self._kept_bytes = 0

    def news(self) -> Callable[[], list[News]]:
        """Return the news of the last step.

        What it returns may be called in any thread; it waits for the step.
        """
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
            watches = {
                id(recording.watch): recording.watch
                for recording, _ in batch.items
                if recording.watch is not None
            }
            batch.news += news_of_all(watches.values())
        except Exception as error:
            self._error = error

    def _compute(self, items: Sequence[_Item]) -> None:
        # of the same probes, by slab
        groups: dict[int, tuple[Stack, dict[int, list[Extent]], list[tuple[Watch, Extent]]]] = {}
        for recording, extent in items:
            if (stack := recording.stack) is not None and (watch := recording.watch) is not None:
                _, slabs, extents = groups.setdefault(id(stack), (stack, {}, []))
                slabs.setdefault(id(extent.step), []).append(extent)
                extents.append((watch, extent))
        for stack, slabs, extents in groups.values():
            rows = [_rows(of_slab, stack.ports) for of_slab in slabs.values()]
            scores = _products(rows[0] if len(rows) == 1 else torch.cat(rows, dim=1), stack)
            _put(scores, stack, slabs.values(), extents)


def _put(
    scores: np.ndarray,
    stack: Stack,
    order: Iterable[Sequence[Extent]],
    extents: Sequence[tuple[Watch, Extent]],
) -> None:
    """`scores`: `[rows, columns]`, of the extents in `order`; those of one watch that follow one
    another are put together.
    """
    place, at = {}, 0  # extent → its first row
    for extent in itertools.chain.from_iterable(order):
        place[id(extent)] = at
        at += extent.count
    for watch, of_watch in itertools.groupby(extents, key=lambda item: item[0]):
        runs: list[tuple[int, list[Extent]]] = []
        for _, extent in of_watch:
            if runs and runs[-1][1][-1].positions.stop == extent.first_position:
                runs[-1][1].append(extent)
            else:
                runs.append((extent.first_position, [extent]))
        for first, run in runs:
            of_run = [
                scores[place[id(extent)] : place[id(extent)] + extent.count] for extent in run
            ]
            watch.put(
                first, stack.columns, of_run[0] if len(of_run) == 1 else np.concatenate(of_run)
            )


def _slots(ports: np.ndarray, extents: Sequence[Extent]) -> np.ndarray:
    """`[ports, rows]`: where the extents' rows lie in their slab."""
    step = extents[0].step
    # [extents, ports]
    slots = np.array([extent.slots for extent in extents])[:, step.pattern[ports]]
    first: np.ndarray = step.base[ports][:, None] + slots.T
    counts = [extent.count for extent in extents]
    if max(counts) == 1:
        return first
    return np.concatenate(
        [first[:, [number]] + np.arange(count) for number, count in enumerate(counts)], axis=1
    )


def _products(rows: torch.Tensor, stack: Stack) -> np.ndarray:
    """Float32 `[rows, columns]` of `[ports, rows, hidden_size]`.

    Many rows are taken in parts that stay in the cache.
    """
    ports, count, hidden_size = rows.shape
    if rows.numel() <= _AT_ONCE:
        products = torch.baddbmm(stack.bias, rows.float(), stack.weight)
    else:
        products = torch.empty(ports, count, stack.weight.shape[2])
        part = max(1, _AT_ONCE // hidden_size)
        for port in range(ports):
            for first in range(0, count, part):
                wide = rows[port, first : first + part].float()
                torch.addmm(
                    stack.bias[port],
                    wide,
                    stack.weight[port],
                    out=products[port, first : first + part],
                )
    scores: np.ndarray = products.transpose(0, 1).reshape(count, -1).numpy()[:, stack.flat]
    return scores


def _rows(extents: Sequence[Extent], ports: np.ndarray) -> torch.Tensor:
    """`[ports, rows, hidden_size]` of extents of one slab, without a copy where they lie one behind
    the other.
    """
    step = extents[0].step
    step.landing.wait()
    slots = _slots(ports, extents)
    flat = slots.reshape(-1)
    first, count = int(flat[0]), len(flat)
    together = int(flat[-1]) - first == count - 1 and bool((np.diff(flat) == 1).all())
    rows = step.slab[first : first + count] if together else step.slab[torch.from_numpy(flat)]
    return rows.view(*slots.shape, -1)
