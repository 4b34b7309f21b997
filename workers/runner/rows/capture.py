"""Captured rows of a request, from recording until they are written.

Each row is recorded at the place where it stays, in a block with a place for every captured
position at each port (a site has two ports: before and after its edits). If a position was recorded
twice (after a preemption, or because a draft token was rejected), the last row counts: later tokens
attended to its keys and values.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
from .arena import BankRows
from .extents import Block, Extent, bytes_of
from .landings import LANDED, Landing

if TYPE_CHECKING:
    from ..probes.watches import Watch
    from ..probes.weight_stacks import Stack

logger = logging.getLogger(__name__)

#: Positions of a block at most, except where it is one of the KV cache.
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


class RowSink(Protocol):
    """Destination of rows that leave a recording before its request ends: see `streams`."""

    part: int  # bytes of rows that leave together, at least
    begun: bool  # whether rows have left

    def push(self, blocks: list[Block], landing: Landing) -> None: ...

    def drop(self) -> None: ...

    def seal(
        self, recording: "Recording", blocks: list[Block], expected: set[int], stop: int
    ) -> tuple[list[int], int, Any]: ...


@dataclass
class Recording:
    """One capture of one request on this rank.

    The model's thread makes the blocks, and the forward fills them; a writer reads them once the
    request has ended.
    """

    capture: StoredCapture
    ports: dict[tuple[str, int], int]  # (hook, layer) → port, at least one
    mask: np.ndarray  # bool [all ports of the rank]
    prompt_tokens: int
    # rows that an earlier request recorded, see `row_store`
    reused: list[Extent] = field(default_factory=list)
    # its own rows that are kept for others, and may have been recorded again
    earlier: list[Extent] = field(default_factory=list)
    # positions that were not recorded when they were last computed, under overload
    dropped: set[int] = field(default_factory=set)
    stream: "RowSink | None" = None  # destination of rows that leave before the request ends
    watch: "Watch | None" = None  # the watch and the stack by which probes score the rows
    stack: "Stack | None" = None
    prepared: Any = None  # see `FinishedCapture`
    columns: Columns | None = None  # of the rows; None: those of the residual bank
    bank: str = RESIDUAL
    wants: bytes = b""  # bytes of `mask`: recordings with the same mask are planned together
    scattered: bool = False  # its positions need not follow one another
    end: int = sys.maxsize  # rows of this position and of later ones are not needed
    # positions of a block: of prompt tokens, which may be one of the KV cache, and of generated
    # ones
    block: int = SPAN
    span: int = SPAN
    landing: Landing = LANDED  # of all its rows, once the request has ended
    _numbers: np.ndarray = field(init=False)  # ports, int64, ascending
    _blocks: dict[int, Block] = field(default_factory=dict)  # by first position of the range
    _error: Exception | None = None  # why rows cannot be recorded

    def __post_init__(self) -> None:
        self.wants = self.mask.tobytes()
        self._numbers = _numbers_of(self.wants)

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
    def nbytes(self) -> int:
        """Return the bytes of its blocks, and of the rows that it reuses."""
        blocks = sum(block.nbytes for block in self._blocks.values())
        return blocks + sum(run.nbytes for run in (*self.earlier, *self.reused))

    def forget(self) -> None:
        """Drop all rows."""
        if self.stream is not None:
            self.stream.drop()
        self._blocks.clear()
        self.earlier, self.reused = [], []

    # --- In a step

    def block_of(self, position: int, memory: BankRows) -> Block | None:
        """Return the block in which the row of a captured position is recorded; None if there is
        none, because it is beyond `end`, or because of an error, which `finish` then raises.
        """
        prompt = self.prompt_tokens
        begin, size, end = (
            (0, self.block, prompt) if position < prompt else (prompt, self.span, self.end)
        )
        first = position - (position - begin) % size
        block = self._blocks.get(first)
        if position >= end or self._error is not None:
            return None
        if block is not None and not block.kept:
            return block
        if block is not None and self.watch is None:  # the rows that are not computed again
            self.earlier += block.runs(first, block.span.stop)
        try:
            span = range(first, min(first + size, end))
            chosen = self.capture.select(span.start, span.stop, prompt)
            block = self._blocks[first] = Block(memory, self._numbers, chosen, span)
        except Exception as error:
            logger.exception("captured rows have no place")
            self._error = error.with_traceback(None)  # the frames would keep other rows' memory
            self._blocks.clear()
            return None
        return block

    def keep(self, start: int, stop: int, landing: Landing) -> list[Extent]:
        """Return rows of positions in `[start, stop)`, which do not change any more. `landing`: of
        the rows. Raises the error that there is no place for them.
        """
        if self._error is not None:
            raise self._error
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
        head, tail = (0, 0) if window is None else window.ends
        bounded = head + tail > 0
        if self.stream is None and not self.capture.scored and not bounded:
            return
        passed = {
            first: block for first, block in self._blocks.items() if block.span.stop <= reached
        }
        if bounded and self.stream is None:
            # rejected drafts may have been recorded beyond the tokens that stay
            end, before = reached - tail - SPAN, 0  # captured positions before a block
            for first, block in sorted(passed.items()):
                if before < head or block.span.stop > end:
                    before += block.num_positions
                    del passed[first]
        if self.stream is not None:
            if sum(block.nbytes for block in passed.values()) < self.stream.part:
                return
            self.stream.push(list(passed.values()), landing)
        for first in passed:
            del self._blocks[first]

    # --- In a writer

    def blocks(self) -> list[Block]:
        """Return the blocks of the ended request, whose rows have landed. Raises the error that
        there was no place for a row.
        """
        self.landing.wait()
        if self._error is not None:
            raise self._error
        return list(self._blocks.values())

    def fill(self, lacking: set[int]) -> tuple[list[Extent], int]:
        """Return earlier rows of these positions, each once, and how many of them are reused."""
        # rows of dropped positions are of rejected drafts, or of a preempted run
        own, left = _among(self.earlier, lacking - self.dropped)
        reused, _ = _among(self.reused, left | (lacking & self.dropped))
        return [*own, *reused], sum(run.count for run in reused)

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
        blocks = self.blocks()
        if self.stream is not None and self.stream.begun:
            positions, reused, result = self.stream.seal(self, blocks, expected, stop)
        else:
            positions, reused, result = self._in_memory(blocks, expected, stop, stored_as)
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
        self, blocks: Sequence[Block], expected: set[int], stop: int, stored_as: torch.dtype
    ) -> "tuple[list[int], int, _Rows]":
        """Return the positions below `stop` with rows, how many of them were reused, and their
        rows.
        """
        runs = [run for block in blocks for run in block.runs(0, stop)]
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
        more, reused = self.fill(expected - held)
        runs = sorted([*runs, *more], key=lambda run: run.first_position)
        return (
            [position for run in runs for position in run.positions],
            reused,
            _Rows(self.ports, runs, stored_as, self.chosen),
        )


def _among(runs: Sequence[Extent], positions: set[int]) -> tuple[list[Extent], set[int]]:
    """Return the parts of runs at these positions, of the last run that has each, and the positions
    that no run has.
    """
    found, left = list[Extent](), set(positions)  # a copy for each run would be quadratic
    for run in reversed(runs):
        here = sorted(left.intersection(run.positions))
        left.difference_update(here)
        found += run.among(here)
    return found, left


@lru_cache(maxsize=256)
def _numbers_of(wants: bytes) -> np.ndarray:
    """Return the ports of a mask; recordings with the same ports share the array."""
    return np.flatnonzero(np.frombuffer(wants, dtype=bool))


class _Rows:
    """Rows of an ended request in memory: a site's rows are buffers over its blocks, copied only
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
        self._parts = [(run, np.searchsorted(run.block.ports, order).tolist()) for run in runs]

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        for run, ports in self._parts:
            bad = run.unsound(dtype)
            if bad is None:
                continue
            for (hook, layer), place in self._places.items():
                for offset in np.flatnonzero(bad[ports[place]]):
                    yield hook, layer, run.first_position + int(offset)

    def blob(self, capture: FinishedCapture) -> None:
        """Return None, because the rows are not in a file."""

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        place = self._places[hook, layer]
        return [
            bytes_of(
                run.block.rows[ports[place], run.at : run.at + run.count], self._dtype, self._chosen
            )
            for run, ports in self._parts
        ]
