"""Captured rows of a request, from recording until they are written; and those that probes read.

Each row is recorded at the place where it stays, in a block with a place for every captured
position at each port (a site has two ports: before and after its edits). If a position was recorded
twice (after a preemption, or because a draft token was rejected), the last row counts: later tokens
attended to its keys and values.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from ....schemas.base.dtypes import ITEM_BYTES
from ....schemas.base.limits import MAX_DRAFTS
from ....schemas.requests.specs import StoredCapture, WriterWork
from ..base.landings import Landing
from ..base.shared_memory import HostMemoryError
from ..files.desk import DeskMessage, StreamDropped, StreamedRows
from ..files.finished_rows import BankColumns
from ..files.recorded import CaptureShape, EndedCapture, Extent, RowBlock, places_of
from ..files.streams import StreamOpened
from ..hooks.sites import RankSite
from ..probes.watches import Watch
from ..probes.weight_stacks import WeightStack
from .arena import BankRows, RecordedBlock

logger = logging.getLogger(__name__)

_SLOT = attrgetter("slot")
_STREAMS_FROM = attrgetter("streams_from")
#: Positions of a block at most, except where it is one of the KV cache.
SPAN = 64
#: Tokens that the ranks may have computed after the last one of a request when the scheduler ends
#: it: those of two steps under way, each with up to `MAX_DRAFTS` drafts.
LATE = 2 * (1 + MAX_DRAFTS)


class Ports:
    """The capture ports of a bank: port 2·i is before the interventions of site i, port 2·i + 1
    after them.
    """

    def __init__(
        self, sites: Sequence[RankSite], width: int, dtype: str, columns: BankColumns | None = None
    ) -> None:
        """`width`: elements of a row on this rank. `dtype`: of the rows. `columns`: the columns of
        rows that this rank holds; None: the residual bank, whose rows every rank holds whole.
        """
        self.width = width
        self.dtype = dtype
        self.columns = columns
        self.count = 2 * len(sites)
        self._numbers = {(site.hook, site.layer): number for number, site in enumerate(sites)}

    def of(self, capture: StoredCapture) -> dict[tuple[str, int], int]:
        """Return (hook, layer) → port, for sites of this rank, in the order of the capture."""
        after = capture.at == "after"
        return {
            (hook, layer): 2 * self._numbers[hook, layer] + after
            for hook, layers in capture.sites.items()
            for layer in layers
            if (hook, layer) in self._numbers
        }


@dataclass(eq=False)
class RowStream:
    """Rows of a capture that leave before its request ends."""

    # that of the channel to what writes them, see `delivery`
    _send: Callable[[DeskMessage, Sequence[object]], None]
    _opened: StreamOpened
    part: int  # bytes of rows that leave together, at least
    begun: int = 0  # the stream's number, once rows have left

    def push(self, blocks: list[RecordedBlock], landing: Landing) -> None:
        """Have these blocks written, whose rows are `landing`."""
        nbytes = sum(block.nbytes for block in blocks)
        opened = self._opened
        places = [block.place for block in blocks]
        self._send(
            StreamedRows(
                opened.stream,
                places,
                nbytes,
                landing.number,
                None if self.begun else opened,
                opened.spec.work,
            ),
            blocks,
        )
        self.begun = opened.stream

    def drop(self) -> None:
        """Have nothing more written, because the capture has failed."""
        self.part = sys.maxsize  # the step in which it failed may still record rows for it
        if self.begun:
            self._send(StreamDropped(self.begun), ())
            self.begun = 0


@dataclass
class Recording:
    """One capture of one request on this rank.

    The model's thread makes the blocks, and the forward fills them; a writer reads them once the
    request has ended, see `files.desk`.
    """

    capture: StoredCapture
    source: Ports  # of the bank whose rows it records
    prompt_tokens: int
    # rows that an earlier request recorded, see `row_store`
    reused: list[Extent] = field(default_factory=list)
    # its own rows that are kept for others, and may have been recorded again
    earlier: list[Extent] = field(default_factory=list)
    # positions that were not recorded when they were last computed, under overload
    dropped: set[int] = field(default_factory=set)
    stream: RowStream | None = None  # destination of rows that leave before the request ends
    watch: "Watch | None" = None  # the watch and the stack by which probes score the rows
    stack: "WeightStack | None" = None
    reads: bytes = b""  # which of its ports the stack reads, int64
    prepared: Any = None  # see `FinishedCapture`
    work: WriterWork = "writer"  # that of its request
    end: int = sys.maxsize  # rows of this position and of later ones are not needed
    # the request may turn out to have ended at any number of tokens from this one on
    ends_from: int = sys.maxsize
    # positions of a block: of prompt tokens, which may be one of the KV cache, and of generated
    # ones
    block: int = SPAN
    span: int = SPAN
    landing: int = 0  # of all its rows, once the request has ended
    # (hook, layer) → port, at least one
    ports: dict[tuple[str, int], int] = field(init=False)
    mask: np.ndarray = field(init=False)  # bool [all ports of the rank]
    # bytes of `mask`: recordings with the same mask are planned together
    wants: bytes = field(init=False)
    _blocks: dict[int, RecordedBlock] = field(
        default_factory=dict
    )  # by first position of the range
    _error: str = ""  # why rows cannot be recorded

    def __post_init__(self) -> None:
        self.ports = self.source.of(self.capture)
        self.mask = np.zeros(self.source.count, dtype=bool)
        self.mask[list(self.ports.values())] = True
        self.wants = self.mask.tobytes()

    @classmethod
    def of(cls, capture: StoredCapture, source: Ports, prompt_tokens: int) -> "Recording | None":
        """Return a capture's recording; None if this rank holds none of its sites or heads."""
        recording = cls(capture, source, prompt_tokens)
        columns = source.columns
        held = recording.ports and (columns is None or columns.chosen(capture.heads))
        return recording if held else None

    def shape(self, number: int) -> CaptureShape:
        """Return what is recorded. `number`: of the capture in the request."""
        ports = [(hook, layer, port) for (hook, layer), port in self.ports.items()]
        source = self.source
        return CaptureShape(number, ports, source.width, source.dtype, source.columns)

    @property
    def position_bytes(self) -> int:
        """Return the bytes of its rows at one position."""
        return len(self.ports) * self.source.width * ITEM_BYTES[self.source.dtype]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its blocks, and of the rows that it reuses."""
        blocks = sum(block.nbytes for block in self._blocks.values())
        return blocks + sum(run.nbytes for run in (*self.earlier, *self.reused))

    def forget(self) -> None:
        """Drop all rows."""
        if self.stream is not None:
            self.stream.drop()
        self._blocks.clear()
        self.earlier = []
        self.reused = []

    # --- In a step

    def block_of(self, position: int, memory: BankRows) -> RecordedBlock | None:
        """Return the block in which the row of a captured position is recorded; None if there is
        none, because it is beyond `end`, or because of an error, which the capture then has.
        """
        prompt = self.prompt_tokens
        begin, size, end = (
            (0, self.block, prompt) if position < prompt else (prompt, self.span, self.end)
        )
        first = position - (position - begin) % size
        block = self._blocks.get(first)
        if position >= end or self._error:
            return None
        if block is not None and not block.kept:
            return block
        # The kept rows are references to their block, so positions that are computed again get a
        # new one. The old rows count where that has none.
        if block is not None and self.watch is None:  # the rows that are not computed again
            self.earlier += block.runs(first, block.span.stop)
        try:
            span = range(first, min(first + size, end))
            chosen = self.capture.select(span.start, span.stop, prompt)
            block = self._blocks[first] = RecordedBlock(
                memory, _numbers_of(self.wants), chosen, span
            )
        except Exception as error:
            logger.exception("captured rows have no place")
            self._error = str(error) or repr(error)
            self._blocks.clear()
            return None
        return block

    def keep(self, start: int, stop: int, landing: Landing) -> list[Extent]:
        """Return rows of positions in `[start, stop)`, which do not change any more. `landing`: of
        the rows. Raises HostMemoryError if there is no place for them.
        """
        if self._error:
            raise HostMemoryError(self._error)
        runs: list[Extent] = []
        for first, block in self._blocks.items():
            if first < stop and start < block.span.stop:
                block.kept = True
                runs += block.runs(start, stop, landing)
        return runs

    def leave(self, reached: int, landing: Landing) -> None:
        """Hand complete blocks to the stream, once they have enough rows; drop those that are
        scored, or that a window of the first and last positions has left behind.

        `reached`: the position after the last one that is not recorded again. `landing`: of the
        rows. Called once it is known which of them are kept for other requests.
        """
        window = self.capture.window
        ends = (0, 0) if window is None else window.ends
        if self.stream is None and not self.capture.scored and not any(ends):
            return
        passed = {
            first: block for first, block in self._blocks.items() if block.span.stop <= reached
        }
        # `around` and `when` drop nothing early: a later token may match, and looking for it here
        # would cost every step of the model's thread.
        if any(ends) and self.stream is None:
            passed = _between(ends, passed, min(reached - LATE, self.ends_from))
        if self.stream is not None:
            if sum(block.nbytes for block in passed.values()) < self.stream.part:
                return
            self.stream.push(list(passed.values()), landing)
        for first in passed:
            del self._blocks[first]

    def ended(self, number: int, high: list[bool]) -> EndedCapture:
        """Return what its request hands over at the end. `number`: of the capture in the request.
        `high`: see `EndedCapture`.
        """
        return EndedCapture(
            shape=self.shape(number),
            landing=self.landing,
            blocks=[block.place for block in self._blocks.values()],
            earlier=places_of(self.earlier),
            reused=places_of(self.reused),
            dropped=sorted(self.dropped),
            high=high,
            stream=0 if self.stream is None else self.stream.begun,
            error=self._error,
        )

    @property
    def held(self) -> list[RowBlock]:
        """Return all blocks with its rows."""
        return [*self._blocks.values(), *(run.block for run in (*self.earlier, *self.reused))]


def _between(
    ends: tuple[int, int], passed: Mapping[int, RecordedBlock], stop: int
) -> dict[int, RecordedBlock]:
    """Return those of these blocks that have none of a window's first and last positions if its
    request ends at token `stop`, or later.
    """
    blocks = [(first, block) for first, block in sorted(passed.items()) if block.span.stop <= stop]
    between = dict[int, RecordedBlock]()
    before = 0
    after = sum(block.place.count for _, block in blocks)
    for first, block in blocks:
        after -= block.place.count
        if before >= ends[0] and after >= ends[1]:
            between[first] = block
        before += block.place.count
    return between


@lru_cache(maxsize=256)
def _numbers_of(wants: bytes) -> bytes:
    """Return the ports of a mask as `BlockPlace` has them."""
    return np.flatnonzero(np.frombuffer(wants, dtype=bool)).tobytes()


class Readers:
    """The watches of positions whose rows alike probes read, and the weights of these."""

    def __init__(
        self, watches: Sequence[Watch], stacks: Sequence[WeightStack], member: np.ndarray
    ) -> None:
        """`watches`, `stacks`: of recordings; `member`: of each position, its recording."""
        self._watches = watches
        self._stacks = stacks
        self._member = member
        self.shape = stacks[0].shape
        self.table = watches[0].table
        self.slots = np.array(list(map(_SLOT, watches)))[member]
        self.streams_from = np.array(list(map(_STREAMS_FROM, watches)))[member]
        #: The stacks, each once, and the number of each position's.
        self.stacks = list(dict.fromkeys(stacks))
        numbers = dict(zip(self.stacks, range(len(self.stacks)), strict=True))
        self.stack = np.array(list(map(numbers.__getitem__, stacks)))[member]
        kind = self.shape.kind
        streams = bool((self.streams_from >= 0).any())
        #: Whether the scores are needed as soon as a step is over; whether there is news in them.
        self.urgent = kind.decides or streams
        self.tells = self.urgent and (streams or kind.ends) and self.shape.last

    @cached_property
    def watches(self) -> list[Watch]:
        """The watch of each position."""
        return list(map(self._watches.__getitem__, self._member.tolist()))

    def only(self, chosen: np.ndarray) -> "Readers":
        """Return those of the chosen positions."""
        return Readers(self._watches, self._stacks, self._member[chosen])


class ScoredRows(NamedTuple):
    """Rows that alike probes read, at positions that ascend for each watch."""

    readers: Readers
    positions: np.ndarray
    numbers: np.ndarray  # [ports of the stacks, positions]: of the rows in `memory`
    memory: torch.Tensor  # all rows of the bank
    landing: Landing
    blocks: object  # keeps the rows

    def has(self, needed: Mapping[Watch, int]) -> bool:
        """Return whether a row is among the first `needed` of its watch."""
        readers = self.readers
        positions = self.positions
        return any(
            watch.table is readers.table
            and bool((positions[readers.slots == watch.slot] < n).any())
            for watch, n in needed.items()
        )

    @property
    def nbytes(self) -> int:
        return int(self.numbers.size * self.memory.shape[1] * self.memory.itemsize)


def reused_rows(recording: Recording) -> Iterator[ScoredRows]:
    """Yield the rows that an earlier request recorded for this one, once."""
    reused = recording.reused
    recording.reused = []
    stack = cast(WeightStack, recording.stack)
    watch = cast(Watch, recording.watch)
    for extent in reused:
        block = cast(RecordedBlock, extent.block)
        positions = np.array(extent.positions)
        first = block.row + np.searchsorted(block.ports, stack.ports) * block.place.count
        numbers = first[:, None] + extent.at + np.arange(extent.count)
        readers = Readers([watch], [stack], np.zeros(extent.count, dtype=np.int64))
        yield ScoredRows(readers, positions, numbers, block.all, extent.landing, block)
