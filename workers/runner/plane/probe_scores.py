"""Scores of probes on a rank, computed from the rows that each step records, before the step's
output goes to the scheduler.

One batched product scores all requests with alike probes: `[sites, rows, hidden_size] × [sites,
hidden_size, labels]`, float32. Every rank of a stage computes the same scores; their checksum goes
into the action ledger, on which ranks must agree. A reading would come too late to end a request. A
product in the forward pass would save the rows' copy to the host, but need its kernel, graphs and
tables, and scoring takes less time than the work around it.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from ....schemas.requests.specs import RankSpec
from ..base.landings import LANDED
from ..base.ranges import numbers_of
from ..edits.steering_tables import VectorStore
from ..probes.kinds import ProbeGroup
from ..probes.probe_news import News
from ..probes.watches import ScoreTables, Watch
from ..probes.weight_stacks import ProbedRows, Stacks, StackShape, WeightStack
from ..rows.capture import Readers, Recording, ScoredRows

#: Elements of rows that are converted to float32 at a time, so that they stay in the CPU's cache.
_CHUNK = 2**19
#: Rows without urgency are scored together once they come from this many steps …
_STEPS = 16
#: … or have this many bytes.
_BYTES = 2**25
#: Rows of a stack, at most, that are padded to be scored together with those of other stacks.
_PADDED = 32
_NUMBERS = attrgetter("numbers")
_STACKS = attrgetter("readers.stacks")
_Pending = tuple[ScoredRows, list[News]]  # rows, and the news of their step


class Scorer:
    """Computes the probe scores of one rank."""

    def __init__(self, vectors: VectorStore, hidden_size: int, *, streams: bool = True) -> None:
        """`streams`: this rank's stage holds all layers, so that scores can be streamed with the
        tokens.
        """
        self._streams = streams
        self._stacks = Stacks(vectors, hidden_size)
        self._tables = ScoreTables()
        #: Rows without scores, by number, in the order of the steps.
        self.pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._last: list[News] | None = None  # of the last step
        self._steps = self._bytes = 0  # since all rows were scored
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
            ProbedRows(recording.capture.at, recording.ports, recording.wants)
            for recording in scored
        ]
        plan = self._stacks.plan(spec.probes, sides) if sides else None
        if plan is None:
            return None
        watch = Watch(
            request_id,
            [spec.probes[number] for number in plan.numbers],
            self._tables.of(plan.kind),
            spec.prompt_tokens,
            spec.prompt_tokens - 1 if spec.stream_scores and self._streams else -1,
        )
        watch.settle = partial(self.settle, raises=False)
        for recording, stack in zip(scored, plan.stacks, strict=True):
            recording.watch = watch
            recording.stack = stack
            ports = np.flatnonzero(recording.mask)
            recording.reads = np.searchsorted(ports, stack.ports).tobytes()
        return watch

    def take(self, recorded: Sequence[ScoredRows]) -> None:
        """Score the rows of a step: urgent ones as soon as they have landed, others together with
        those of later steps, since scoring many takes about as long as scoring a few. The checksum
        is of all scores of a request, so it does not depend on when they are computed.
        """
        news = list[News]()
        landed = bool(self.pending) or self._error is not None
        self._last = news if recorded else None
        for rows in recorded:
            self.pending[next(self._numbers)] = rows, news
            landed = landed or rows.landing is LANDED
            self._bytes += 0 if rows.readers.urgent else rows.nbytes
        if self.pending:
            self._steps += 1
        full = self._steps >= _STEPS or self._bytes >= _BYTES
        if full:
            self._steps = self._bytes = 0
        if landed or full:
            self.settle({}, full=full)

    def settle(
        self,
        needed: Mapping[Watch, int],
        kinds: Collection[ProbeGroup] = (),
        news: list[News] | None = None,
        *,
        full: bool = False,
        raises: bool = True,
    ) -> None:
        """Score the rows that are needed, for which it waits, and urgent ones that have landed; if
        `full`, all that have landed. Earlier rows for alike probes are scored before them. Raise
        the last error, or leave it to the next call.

        `needed`: watch → number of its rows; `kinds`: of watches that need all rows; `news`: of a
        step that needs its rows.
        """
        pending = list(self.pending.items())
        last = dict[StackShape, int]()
        due = list[int]()
        for number, (rows, of_step) in pending:
            readers = rows.readers
            shape = readers.shape
            wanted = of_step is news or shape.kind in kinds or (needed and rows.has(needed))
            if wanted or ((readers.urgent or full) and rows.landing.done()):
                last[shape] = number
        for number, (rows, _) in pending:
            if number <= last.get(rows.readers.shape, -1):
                rows.landing.wait()  # without the lock, which all other threads need
                due.append(number)
        with self._lock:
            try:
                self._put(due)
            except Exception as error:
                self._error = error
            if raises and (found := self._error) is not None:
                self._error = None
                raise found

    def clear(self) -> None:
        """Drop the rows without scores."""
        self.pending.clear()
        self._steps = self._bytes = 0

    def news(self) -> Callable[[], list[News]] | None:
        """Return a function that returns the news of the last step; None if it scores nothing.

        The function may be called in any thread, and waits for the step.
        """
        last = self._last
        self._last = None
        if last is None:
            return None

        def of_step() -> list[News]:
            self.settle({}, news=last, raises=False)
            return last

        return of_step

    def _put(self, due: Iterable[int]) -> None:
        """Score the rows with these numbers that have no scores yet, and put their scores into the
        watches, in this order; add to the news.
        """
        items = list[_Pending]()
        alike = dict[tuple[StackShape, int], list[ScoredRows]]()  # in one bank
        scores = dict[int, np.ndarray]()
        for number in due:
            if (item := self.pending.pop(number, None)) is not None:
                items.append(item)
                rows, _ = item
                alike.setdefault((rows.readers.shape, id(rows.memory)), []).append(rows)
        for (shape, _), parts in alike.items():
            first = parts[0]
            if parts[1:] or first.readers.stacks[1:]:
                products = _together(shape, parts)
            else:
                (stack,) = first.readers.stacks
                products = _products(first.memory, first.numbers, stack.weight, stack.bias)
            flat = products.transpose(0, 1).reshape(products.shape[1], -1)
            found = flat.numpy()[:, shape.flat]
            at = 0
            for part in parts:
                scores[id(part)] = found[at : at + len(part.positions)]
                at += len(part.positions)
        for rows, news in items:
            readers = rows.readers
            positions = rows.positions
            shape = readers.shape
            slots = readers.slots
            table = readers.table
            found = scores[id(rows)]
            table.put(shape.columns, slots, positions, found, now=shape.last and readers.urgent)
            if readers.tells:
                news += table.news(readers.watches, slots, positions, readers.streams_from)


def _together(shape: StackShape, parts: Sequence[ScoredRows]) -> torch.Tensor:
    """Return the products, float32 `[ports, positions, width]`, of rows that alike probes read."""
    memory = parts[0].memory
    numbers = np.concatenate(list(map(_NUMBERS, parts)), axis=1)
    stacks = list(dict.fromkeys(itertools.chain.from_iterable(map(_STACKS, parts))))
    if not stacks[1:]:
        return _products(memory, numbers, stacks[0].weight, stacks[0].bias)
    of_position = _numbers_among(stacks, [part.readers for part in parts])
    counts = np.bincount(of_position, minlength=len(stacks))
    found = torch.empty(shape.ports, len(of_position), shape.width)
    for number in np.flatnonzero(counts > _PADDED).tolist():
        mine = np.flatnonzero(of_position == number)
        stack = stacks[number]
        made = _products(memory, numbers[:, mine], stack.weight, stack.bias)
        found[:, torch.from_numpy(mine)] = made
    few = np.flatnonzero((counts > 0) & (counts <= _PADDED))
    if not len(few):
        return found
    # each stack has as many rows as that with the most of these, if need be any
    among = np.full(len(stacks), -1)
    among[few] = np.arange(len(few))
    mine = np.flatnonzero(among[of_position] >= 0)
    mine = mine[np.argsort(of_position[mine], kind="stable")]
    places = among[of_position[mine]], numbers_of(np.zeros_like(few), counts[few])
    padded = np.zeros((shape.ports, len(few), int(counts[few].max())), dtype=np.int64)
    padded[:, *places] = numbers[:, mine]
    weights = [stacks[number].weight for number in few.tolist()]
    biases = [stacks[number].bias for number in few.tolist()]
    made = _products(
        memory,
        padded.reshape(-1, padded.shape[2]),
        torch.stack(weights, 1).flatten(0, 1),
        torch.stack(biases, 1).flatten(0, 1),
    )
    of_stacks = made.view(*padded.shape, shape.width)
    found[:, torch.from_numpy(mine)] = of_stacks[:, *map(torch.from_numpy, places)]
    return found


def _numbers_among(stacks: Sequence[WeightStack], parts: Sequence[Readers]) -> np.ndarray:
    """Return the number of each position's stack."""
    numbers = dict(zip(stacks, range(len(stacks)), strict=True))
    found = [np.array(list(map(numbers.__getitem__, each.stacks)))[each.stack] for each in parts]
    return np.concatenate(found)


def _products(
    memory: torch.Tensor, numbers: np.ndarray, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return products, float32 `[ports, rows, width]`, of the rows of `memory`
    `[rows, hidden_size]` with these numbers, `[ports, rows]`. `weight`, `bias`: of each port.

    Many rows are computed in chunks that stay in the cache.
    """
    ports, count = numbers.shape
    rows = memory.index_select(0, torch.from_numpy(numbers.reshape(-1))).view(ports, count, -1)
    hidden_size = rows.shape[2]
    if rows.numel() <= _CHUNK:
        return torch.baddbmm(bias, rows.float(), weight)
    products = torch.empty(ports, count, weight.shape[2])
    part = max(1, _CHUNK // hidden_size)
    for port in range(ports):
        for first in range(0, count, part):
            wide = rows[port, first : first + part].float()
            torch.addmm(
                bias[port],
                wide,
                weight[port],
                out=products[port, first : first + part],
            )
    return products
