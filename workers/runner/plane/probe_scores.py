"""Scores of probes on a rank, computed from the rows that each step records, before the step's
output goes to the scheduler.

One batched product scores all requests with the same probes: `[sites, rows, hidden_size] × [sites,
hidden_size, labels]`, float32. Every rank of a stage computes the same scores; their checksum goes
into the action ledger, on which ranks must agree.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from ....schemas.base.records import by_key
from ....schemas.requests.specs import RankSpec
from ..base.landings import Landing
from ..edits.steering_tables import VectorStore
from ..files.extents import Extent
from ..probes.probe_news import News
from ..probes.watches import Watch, news_of_all
from ..probes.weight_stacks import Side, Stack, Stacks
from ..rows.arena import RecordedBlock
from ..rows.capture import Recording

#: Elements of rows that are converted to float32 at a time, so that they stay in the CPU's cache.
_CHUNK = 2**19
#: Rows without urgency are scored together once they come from this many steps, or have this many
#: bytes.
_STEPS, _BYTES = 16, 2**25
#: Rows, and the watch and the stack by which probes score them.
_Item = tuple[Watch, Stack, Extent]


@dataclass(eq=False)
class _Batch:
    """Rows of one step that are scored as soon as they have landed."""

    items: list[_Item]
    news: list[News] = field(default_factory=list)

    @property
    def landings(self) -> set[Landing]:
        return {extent.landing for _, _, extent in self.items}

    def computed(self, needed: Mapping[Watch, int]) -> bool:
        """Return whether a row is among the first `needed` of its watch."""
        return any(extent.first_position < needed.get(watch, 0) for watch, _, extent in self.items)


class Scorer:
    """Computes the probe scores of one rank."""

    def __init__(
        self,
        vectors: VectorStore,
        hidden_size: int,
        *,
        waits: bool,
        streams: bool = True,
    ) -> None:
        """`waits`: rows have landed when a step is over (CPU); otherwise they are scored once they
        have landed, at the latest when the request ends. `streams`: this rank's stage holds all
        layers, so that scores can be streamed with the tokens.
        """
        self._waits, self._streams = waits, streams
        self._stacks = Stacks(vectors, hidden_size)
        self._pending: deque[_Batch] = deque()
        self._last: _Batch | None = None  # batch of the last step
        self._kept: dict[Watch, list[_Item]] = {}  # rows without urgency
        # steps and bytes since rows were last scored together, some perhaps scored early since
        self._kept_steps = self._kept_bytes = 0
        self._lock = threading.Lock()  # the thread of an asynchronous output reads the news
        self._error: Exception | None = None

    def watch(
        self, request_id: str, spec: RankSpec, recordings: Iterable[Recording]
    ) -> Watch | None:
        """Create the watch of a request, and attach it to the recordings that its probes read; None
        if no probe reads rows of this rank.

        Raises LookupError for weights that this rank does not have, ValueError for weights of
        another shape.
        """
        scored = [recording for recording in recordings if recording.capture.scored]
        sides = [
            Side(recording.capture.at, recording.ports, recording.wants) for recording in scored
        ]
        plan = self._stacks.plan(spec.probes, sides) if sides else None
        if plan is None:
            return None
        watch = Watch(
            request_id,
            [spec.probes[number] for number in plan.numbers],
            spec.prompt_tokens - 1 if spec.stream_scores and self._streams else -1,
            plan.kind,
            spec.prompt_tokens,
        )
        watch.settle = self._catch_up
        for recording, stack in zip(scored, plan.stacks, strict=True):
            recording.watch, recording.stack = watch, stack
        return watch

    def take(
        self, recorded: Sequence[tuple[Recording, Extent]], recordings: Iterable[Recording]
    ) -> None:
        """Score the `recorded` rows, and the reused rows of `recordings`, now or when they have
        landed.

        Rows whose scores are not urgent are kept for a while, since scoring many takes about as
        long as scoring a few.
        """
        for recording in recordings:
            if recording.watch is not None and recording.reused:
                recorded = [*recorded, *((recording, extent) for extent in recording.reused)]
                recording.reused = []
        items = [
            (watch, stack, extent)
            for recording, extent in recorded
            if (watch := recording.watch) is not None and (stack := recording.stack) is not None
        ]
        if self._waits:
            self._keep([item for item in items if not item[0].urgent])
            items = [item for item in items if item[0].urgent]
        self._last = _Batch(items) if items else None
        if self._last is not None:
            self._pending.append(self._last)
        self.settle({})

    def _keep(self, items: Sequence[_Item]) -> None:
        for item in items:
            self._kept.setdefault(item[0], []).append(item)
        self._kept_steps += bool(items)
        self._kept_bytes += sum(extent.nbytes for _, _, extent in items)
        if self._kept_steps >= _STEPS or self._kept_bytes >= _BYTES:
            self._score_kept(list(self._kept))
            self._kept_steps = self._kept_bytes = 0

    def _score_kept(self, watches: Iterable[Watch]) -> None:
        """Score the kept rows of these watches. The next `settle` raises an error of this."""
        items = [item for watch in watches for item in self._kept.pop(watch, [])]
        try:
            if items:
                self._compute(items)
        except Exception as error:
            self._error = error

    @property
    def settled(self) -> bool:
        """Return whether no rows wait for their scores."""
        return not self._pending and not self._kept and self._error is None

    def settle(self, needed: Mapping[Watch, int]) -> None:
        """Score the rows that have landed, in the order of the steps; raise the last error.

        `needed`: watch → number of its rows: waits for the steps that computed them.
        """
        self._catch_up(needed)
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _catch_up(self, needed: Mapping[Watch, int], batch: _Batch | None = None) -> None:
        """Do the same, also with `batch`, and leave an error to the next `settle`. No thread waits
        for rows while it holds the lock, which all others need.
        """
        self._score_kept(needed)
        with self._lock:
            pending = list(self._pending)
        last = max(
            (
                number
                for number, item in enumerate(pending)
                if item is batch or (needed and item.computed(needed))
            ),
            default=-1,
        )
        for landing in {each for item in pending[: last + 1] for each in item.landings}:
            landing.wait()
        with self._lock:
            while self._pending and all(each.done() for each in self._pending[0].landings):
                self._score(self._pending.popleft())

    def clear(self) -> None:
        """Drop the kept rows."""
        self._kept.clear()
        self._kept_steps = self._kept_bytes = 0

    def news(self) -> Callable[[], list[News]] | None:
        """Return a function that returns the news of the last step; None if it scores nothing.

        The function may be called in any thread, and waits for the step.
        """
        batch, self._last = self._last, None
        if batch is None:
            return None

        def of_step() -> list[News]:
            self._catch_up({}, batch)
            return batch.news

        return of_step

    def _score(self, batch: "_Batch") -> None:
        """Score a batch. The next `settle` raises an error of this, and so fails the requests."""
        try:
            self._compute(batch.items)
            batch.news += news_of_all(dict.fromkeys([watch for watch, _, _ in batch.items]))
        except Exception as error:
            self._error = error

    def _compute(self, items: Sequence[_Item]) -> None:
        groups = by_key([(stack, (watch, extent)) for watch, stack, extent in items])
        for stack, extents in groups.items():
            _put(
                _products(_rows([extent for _, extent in extents], stack.ports), stack),
                stack,
                extents,
            )


def _put(scores: np.ndarray, stack: Stack, extents: Sequence[tuple[Watch, Extent]]) -> None:
    """Put `scores` `[rows, columns]`, whose rows follow the extents, into their watches;
    consecutive extents of one watch are joined.
    """
    at = 0
    for watch, of_watch in itertools.groupby(extents, key=lambda item: item[0]):
        runs: list[range] = []
        for _, extent in of_watch:
            if runs and runs[-1].stop == extent.first_position:
                runs[-1] = range(runs[-1].start, extent.positions.stop)
            else:
                runs.append(extent.positions)
        for run in runs:
            watch.put(run.start, stack.columns, scores[at : at + len(run)])
            at += len(run)


def _products(rows: torch.Tensor, stack: Stack) -> np.ndarray:
    """Return scores, float32 `[rows, columns]`, of rows `[ports, rows, hidden_size]`.

    Many rows are computed in chunks that stay in the cache.
    """
    ports, count, hidden_size = rows.shape
    if rows.numel() <= _CHUNK:
        products = torch.baddbmm(stack.bias, rows.float(), stack.weight)
    else:
        products = torch.empty(ports, count, stack.weight.shape[2])
        part = max(1, _CHUNK // hidden_size)
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
    """Return the rows of extents, in their order, `[ports, rows, hidden_size]`."""
    blocks = [cast(RecordedBlock, extent.block) for extent in extents]
    if len(extents) == 1 and len(ports) == len(blocks[0].ports):
        rows = blocks[0].rows[:, extents[0].at : extents[0].at + extents[0].count]
        return torch.from_numpy(rows).view(blocks[0].all.dtype)
    counts = [extent.count for extent in extents]
    ordinals = {b.place.ports: np.searchsorted(b.ports, ports) for b in blocks}
    # [ports, extents]: the first row of each among all of the bank
    first = np.array([b.row + e.at for b, e in zip(blocks, extents, strict=True)]) + np.stack(
        [ordinals[b.place.ports] * b.place.count for b in blocks], axis=1
    )
    within = np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers = torch.from_numpy(np.repeat(first, counts, axis=1) + within)
    found = blocks[0].all.index_select(0, numbers.view(-1))
    return found.view(*numbers.shape, -1)
