"""Captured rows of a request, from recording until they are written.

All rows that a step captures are in one slab `[rows, hidden]`, ordered by port (a site has two
ports: before and after its edits). The mover copies each request's rows from there into the
request's own pieces: memory, or a file under overload, with a place for every captured position. If
a position was recorded twice (after a preemption, or because a draft token was rejected), the last
row counts: later tokens attended to its keys and values.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ....schemas.base.records import by_key
from ....schemas.model.attention import AttentionKind
from ....schemas.model.banks import RESIDUAL
from ....schemas.model.routing import RoutingKind
from ....schemas.requests.specs import RankSpec, StoredCapture
from ..files.finished_rows import Columns, FinishedCapture
from ..hooks.sites import Site
from .extents import Extent, StepRows, as_array, bytes_of, contiguous
from .pending_rows import LANDED

if TYPE_CHECKING:
    from ..probes.watches import Watch
    from ..probes.weight_stacks import Stack

logger = logging.getLogger(__name__)

#: `new(rows, width, dtype)` returns uninitialised memory for a piece, `[rows, width]`.
NewMemory = Callable[[int, int, torch.dtype], torch.Tensor]
#: Positions of a piece at most, except where it is a block of the KV cache.
SPAN = 64


class Ports:
    """The capture ports of a bank: port 2·i is before the interventions of site i, port 2·i + 1
    after them.
    """

    def __init__(self, sites: Sequence[Site], columns: Columns | None = None) -> None:
        """`columns`: the columns of rows that this rank holds; None: the residual bank, whose rows
        every rank holds whole.
        """
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


class Piece:
    """Rows of one recording at its positions in a range, at all of its ports: filled by the mover,
    in any order.
    """

    def __init__(
        self,
        like: StepRows,
        ports: np.ndarray,
        positions: Sequence[int],
        span: range,
        new: NewMemory,
    ) -> None:
        """For rows like those of a step. `ports`: int64; `positions`: captured ones in `span`,
        ascending. Raises what `new` raises.
        """
        width, dtype = like.slab.shape[1], like.slab.dtype
        slab, base = new(len(ports) * len(positions), width, dtype), np.zeros_like(like.base)
        base[ports] = np.arange(len(ports)) * len(positions)
        self.rows, self.span = StepRows(slab, base, np.zeros_like(base), LANDED), span
        self.kept = False  # the row store has it too, so that its rows may not change
        self._ports, self._positions = ports, as_array(positions)
        self._by_port = slab.view(len(ports), len(positions), width)
        self._first = positions[0] if len(positions) else 0
        self._dense = isinstance(positions, range) and positions.step == 1
        self._held, self.num_positions = np.zeros(len(positions), dtype=bool), len(positions)

    @property
    def num_held(self) -> int:
        """Return the number of positions with rows."""
        return int(self._held.sum())

    def place(self, first: int, count: int) -> torch.Tensor:
        """Return the memory of these positions' rows, `[ports, positions, hidden_size]`, which the
        caller fills in place of earlier rows.
        """
        at = first - self._first if self._dense else int(np.searchsorted(self._positions, first))
        if self._dense:
            requested = at >= 0 and at + count <= len(self._held)
        else:
            requested = self._positions[at : at + count].tolist() == [*range(first, first + count)]
        if not requested:
            raise RuntimeError(
                f"positions {[*range(first, first + count)][:8]} were recorded but not requested"
            )
        self._held[at : at + count] = True
        return self._by_port.narrow(1, at, count)

    def runs(self, start: int = 0, stop: int = sys.maxsize) -> list[Extent]:
        """Return the rows of positions in `[start, stop)`, by position."""
        first, last = np.searchsorted(self._positions, (start, stop))
        slots = first + np.flatnonzero(self._held[first:last])
        if not len(slots):
            return []
        # places of a piece follow one another where its positions do
        return [
            Extent(self.rows, slots[at : at + 1], int(self._positions[slots[at]]), count)
            for at, count in contiguous(self._positions[slots])
        ]

    def copy(self, new: NewMemory, start: int = 0, stop: int = sys.maxsize) -> "Piece":
        """Copy the rows of positions in `[start, stop)`. Raises what `new` raises."""
        inside = (self._positions >= start) & (self._positions < stop)
        span = range(max(start, self.span.start), min(stop, self.span.stop))
        copied = Piece(self.rows, self._ports, self._positions[inside].tolist(), span, new)
        for run in self.runs(start, stop):
            copied.place(run.first_position, run.count).copy_(run.rows(self._ports))
        return copied


class RowSink(Protocol):
    """Destination of rows that leave a recording before its request ends: see `streams`."""

    part: int  # bytes of rows that leave together, at least
    begun: bool  # whether rows have left

    def push(self, pieces: list[Piece]) -> None: ...

    def drop(self) -> None: ...

    def seal(
        self, recording: "Recording", pieces: list[Piece], expected: set[int], stop: int
    ) -> tuple[list[int], int, Any]: ...


@dataclass
class Recording:
    """One capture of one request on this rank.

    The model's thread counts what it recorded; the mover fills the pieces; a writer reads them once
    the request has ended.
    """

    capture: StoredCapture
    ports: dict[tuple[str, int], int]  # (hook, layer) → port, at least one
    mask: np.ndarray  # bool [all ports of the rank]
    prompt_tokens: int
    recorded: int = 0  # positions recorded so far, repeated ones each time
    left: int = 0  # positions whose rows have left
    # rows that an earlier request recorded, see `row_store`
    reused: list[Extent] = field(default_factory=list)
    # positions that were not recorded when they were last computed, under overload
    dropped: set[int] = field(default_factory=set)
    stream: "RowSink | None" = None  # destination of rows that leave before the request ends
    watch: "Watch | None" = None  # the watch and the stack by which probes score the rows
    stack: "Stack | None" = None
    prepared: Any = None  # see `FinishedCapture`
    columns: Columns | None = None  # of the rows; None: those of the residual bank
    bank: str = RESIDUAL
    wants: bytes = b""  # bytes of `mask`: recordings with the same mask are planned together
    end: int = sys.maxsize  # rows of this position and of later ones are not needed
    # positions of a piece: of prompt tokens, which may be a block of the KV cache, and of generated
    # ones
    block: int = SPAN
    span: int = SPAN
    moved: "Future[None] | None" = None  # the mover has done everything that it had to
    opened: bool = False  # pieces were made since the last call of `leave`
    _numbers: np.ndarray = field(init=False)  # ports, int64, ascending
    _pieces: dict[int, Piece] = field(default_factory=dict)  # by first position of the range
    _reached: int = 0  # the position after the last one copied
    _open: Piece | None = None  # the last one that rows were copied to
    _error: Exception | None = None  # the first error of copying
    _forgotten: bool = False

    def __post_init__(self) -> None:
        self.wants = self.mask.tobytes()
        self._numbers = np.flatnonzero(self.mask)

    @classmethod
    def of(cls, capture: StoredCapture, ports: Ports, prompt_tokens: int) -> "Recording | None":
        """Return a capture's recording; None if this rank holds none of its sites or heads."""
        by_site = ports.of(capture)
        if not by_site or (ports.columns is not None and not ports.columns.chosen(capture.heads)):
            return None
        mask = np.zeros(ports.count, dtype=bool)
        mask[list(by_site.values())] = True
        return cls(capture, by_site, mask, prompt_tokens, columns=ports.columns, bank=capture.bank)

    def width(self, hidden_size: int) -> int:
        """Return the elements of a row on this rank, in a model of this hidden size."""
        return hidden_size if self.columns is None else self.columns.size

    def stored_width(self, hidden_size: int) -> int:
        """Return the elements of a stored row, which has only the requested heads."""
        if self.columns is None or not self.capture.heads:
            return self.width(hidden_size)
        return len(self.chosen) * self.columns.row.width

    @property
    def chosen(self) -> list[slice]:
        """Return the columns that are stored."""
        return [slice(None)] if self.columns is None else self.columns.chosen(self.capture.heads)

    @property
    def sites(self) -> dict[str, list[int]]:
        """Return hook → ascending layers that this rank holds."""
        return by_key(self.ports)

    @property
    def num_rows(self) -> int:
        """Return the rows in memory over all ports; rows of a repeated position count each time."""
        reused = sum(run.count for run in self.reused)
        return len(self.ports) * (self.recorded - self.left + reused)

    def forget(self) -> None:
        """Drop all rows, and those still to be copied."""
        self._forgotten = True
        if self.stream is not None:
            self.stream.drop()
        self._forget()
        self.reused.clear()

    # --- In the mover

    def places(
        self, first: int, count: int, like: StepRows, new: NewMemory
    ) -> Sequence[torch.Tensor]:
        """Return the memory of the rows of `count` positions from `first` on, which the caller
        fills, for each piece: `[ports, positions, hidden_size]`. Stops at `end`, and where it
        fails; `finish` then raises the error.
        """
        piece, places = self._open, list[torch.Tensor]()
        try:
            if count == 1 and piece is not None and first in piece.span and not piece.kept:
                self._reached = first + 1  # as below, but in a fraction of the time
                return (piece.place(first, 1),)
            if self._forgotten or self._error is not None:
                return places
            at, stop = first, min(first + count, self.end)
            while at < stop:
                piece = self._open = self._piece(at, like, new)
                places.append(piece.place(at, min(stop, piece.span.stop) - at))
                at = piece.span.stop
            self._reached = first + count
        except Exception as error:
            logger.exception("captured rows could not be copied")
            self.fail(error)
        if self._forgotten:  # meanwhile
            self._forget()
        return places

    def fail(self, error: Exception) -> None:
        """Drop the rows, because they could not be copied. `finish` raises the first error."""
        # the frames would keep the rows' memory
        self._error = self._error or error.with_traceback(None)
        self._forget()

    def _forget(self) -> None:
        self._pieces.clear()
        self._open = None

    def keep(self, start: int, stop: int, new: NewMemory) -> list[Extent]:
        """Return rows of positions in `[start, stop)`, which do not change any more: those of whole
        pieces as they are, others as copies. Raises the first error of copying.
        """
        if self._error is not None:
            raise self._error
        runs: list[Extent] = []
        for first, piece in list(self._pieces.items()):  # `forget` may clear them
            if first < stop and start < piece.span.stop:
                whole = start <= first and piece.span.stop <= stop
                piece.kept |= whole
                runs += (piece if whole else piece.copy(new, start, stop)).runs()
        return runs

    def _piece(self, position: int, like: StepRows, new: NewMemory) -> Piece:
        """Return the piece for a position."""
        prompt = self.prompt_tokens
        begin, size, end = (
            (0, self.block, prompt) if position < prompt else (prompt, self.span, self.end)
        )
        first = position - (position - begin) % size
        piece = self._pieces.get(first)
        if piece is None:
            stop = min(first + size, end)
            chosen = self.capture.select(first, stop, prompt)
            span = range(first, stop)
            piece = self._pieces[first] = Piece(like, self._numbers, chosen, span, new)
            self.opened = True
        elif piece.kept:
            piece = self._pieces[first] = piece.copy(new)
        return piece

    def leave(self) -> None:
        """Hand pieces that are complete to the stream, once they have enough rows; drop those that
        are scored, or that a window of the first and last positions has left behind.

        Called once it is known which of the copied rows are kept for other requests.
        """
        self.opened = False
        window = self.capture.window
        head, tail = (0, 0) if window is None else window.ends
        bounded = head + tail > 0
        if self.stream is None and not self.capture.scored and not bounded:
            return
        passed = {
            first: piece
            for first, piece in list(self._pieces.items())
            if piece.span.stop <= self._reached
        }
        if bounded and self.stream is None:
            # rejected drafts may have been recorded beyond the tokens that stay
            end, before = self._reached - tail - SPAN, 0  # captured positions before a piece
            for first, piece in sorted(passed.items()):
                if before < head or piece.span.stop > end:
                    before += piece.num_positions
                    del passed[first]
            self.left += sum(piece.num_held for piece in passed.values())
        if self.stream is not None:
            if sum(piece.rows.slab.nbytes for piece in passed.values()) < self.stream.part:
                return
            self.stream.push(list(passed.values()))
            self.left += sum(piece.num_held for piece in passed.values())
        self._open = None
        for first in passed:
            self._pieces.pop(first, None)

    # --- In a writer

    def pieces(self) -> list[Piece]:
        """Return the pieces of the ended request. Raises the first error of copying."""
        if self.moved is not None:
            self.moved.result()
        if self._error is not None:
            raise self._error
        return list(self._pieces.values())

    def fill(self, lacking: set[int]) -> list[Extent]:
        """Return the reused rows of these positions, each once."""
        runs, lacking = list[Extent](), set(lacking)  # a copy for each run would be quadratic
        for run in reversed(self.reused):
            found = sorted(lacking.intersection(run.positions))
            lacking.difference_update(found)
            runs += run.among(found)
        return runs

    def finish(
        self,
        spec: RankSpec,
        token_ids: list[int],
        *,
        rows: int | None = None,
        watch: "Watch | None" = None,
        hidden_size: int,
        dtype: torch.dtype,
        worker: str,
        rank: int,
        pp: int,
        stages: int,
        num_layers: int = 0,
        caveats: Sequence[str] = (),
        identity: str = "",
        attention: Sequence[AttentionKind] = (),
        routing: Sequence[RoutingKind] = (),
    ) -> FinishedCapture:
        """Return the capture to be stored for a request that ended with `token_ids` (prompt and
        generated).

        `rows`: number of tokens that have rows; None: all but the last one, which was never fed
        back. `watch`: the scores that the capture's window needs. Raises RuntimeError when an
        expected row is missing.
        """
        stop = len(token_ids) - 1 if rows is None else rows
        expected = set[int]()
        if stop >= spec.prompt_tokens:
            chosen, window = self.capture.select(0, stop, spec.prompt_tokens), self.capture.window
            expected = set(chosen)
            if window is not None:
                high = list[bool]()
                if window.when is not None:
                    assert watch is not None
                    high = watch.high(window.when.probe, window.when.at_least)
                expected = window.keep(chosen, token_ids, high)
        stored_as = dtype if self.capture.dtype == "model" else getattr(torch, self.capture.dtype)
        result: Any  # `_Rows`, or those of the stream
        pieces = self.pieces()
        if self.stream is not None and self.stream.begun:
            positions, reused, result = self.stream.seal(self, pieces, expected, stop)
        else:
            positions, reused, result = self._in_memory(pieces, expected, stop, stored_as)
        if missing := expected.difference(positions) - self.dropped:
            raise RuntimeError(
                f"positions {sorted(missing)[:8]} were not recorded ({len(missing)} of "
                f"{len(expected)})"
            )
        return FinishedCapture(
            spec=spec,
            capture=self.capture,
            sites=self.sites,
            hidden_size=self.stored_width(hidden_size),
            columns=self.columns,
            dtype=str(stored_as).removeprefix("torch."),
            positions=positions,
            token_ids=[token_ids[position] for position in positions],
            worker=worker,
            rank=rank,
            pp=pp,
            stages=stages,
            rows=result,
            non_finite=dict(Counter(place[:2] for place in result.unsound(stored_as))),
            unsound=min(result.unsound(dtype), key=lambda place: place[2], default=None),
            reused=len(self.ports) * reused,
            dropped=tuple(sorted((self.dropped & expected).difference(positions))),
            num_layers=num_layers,
            caveats=tuple(caveats),
            identity=identity,
            attention=tuple(attention),
            routing=tuple(routing),
            whole=result.blob,
            prepared=self.prepared,
        )

    def _in_memory(
        self, pieces: Sequence[Piece], expected: set[int], stop: int, stored_as: torch.dtype
    ) -> "tuple[list[int], int, _Rows]":
        """Return the positions below `stop` with rows, how many of them were reused, and their
        rows.
        """
        runs = [run for piece in pieces for run in piece.runs(stop=stop)]
        if self.capture.window is not None:
            runs = [part for run in runs for part in run.among(sorted(expected & {*run.positions}))]
        if self.dropped:  # earlier rows of these are of rejected drafts, or of a preempted run
            runs = [
                part
                for run in runs
                for part in run.among(sorted(set(run.positions) - self.dropped))
            ]
        held = {position for run in runs for position in run.positions}
        if extra := held - expected:
            raise RuntimeError(f"positions {sorted(extra)[:8]} were recorded but not requested")
        reused = self.fill(expected - held)
        runs = sorted([*runs, *reused], key=lambda run: run.first_position)
        return (
            [position for run in runs for position in run.positions],
            sum(run.count for run in reused),
            _Rows(self.ports, runs, stored_as, self.chosen),
        )


class _Rows:
    """Rows of an ended request in memory: a site's rows are buffers over its pieces, copied only
    for another dtype or some of the columns.
    """

    def __init__(
        self,
        ports: dict[tuple[str, int], int],
        runs: Sequence[Extent],
        dtype: torch.dtype,
        chosen: Sequence[slice],
    ) -> None:
        """`chosen`: the stored columns."""
        self._dtype, self._chosen = dtype, list(chosen)
        self._places = {site: number for number, site in enumerate(ports)}
        order = np.fromiter(ports.values(), dtype=np.int64, count=len(ports))
        self._parts = [(run, run.first_rows(order).tolist()) for run in runs]

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        for run, rows in self._parts:
            bad = run.step.unsound(dtype)
            if bad is None:
                continue
            for (hook, layer), place in self._places.items():
                first = rows[place]
                for offset in np.flatnonzero(bad[first : first + run.count]):
                    yield hook, layer, run.first_position + int(offset)

    def blob(self, capture: FinishedCapture) -> None:
        """Return None, because the rows are not in a file."""

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        place, buffers = self._places[hook, layer], []
        for run, rows in self._parts:
            first, slab = rows[place], run.step.slab
            if self._dtype == slab.dtype and self._chosen == [slice(None)]:
                size = slab.shape[1] * slab.itemsize
                buffers.append(run.step.view[first * size : (first + run.count) * size])
            else:
                buffers.append(bytes_of(slab[first : first + run.count], self._dtype, self._chosen))
        return buffers
