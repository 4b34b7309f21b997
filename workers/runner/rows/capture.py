"""Captured rows of a request, from recording until they are written.

All rows that a step captures are in one slab `[rows, hidden]`, ordered by port (a site has two
ports: before and after its edits). A request keeps references to its runs of rows, and joins them
when it ends. If a position was recorded twice (after a preemption, or because a draft token was
rejected), only the last row is written: later tokens attended to its keys and values.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ....schemas.model.attention import AttentionKind
from ....schemas.model.banks import RESIDUAL
from ....schemas.model.routing import RoutingKind
from ....schemas.requests.specs import RankSpec, StoredCapture
from ....storage.blobs import Blob
from ..files.finished_rows import Columns, FinishedCapture
from ..hooks.sites import Site
from .finite_check import all_finite
from .mover import Mover
from .pending_rows import LANDED, Landing

if TYPE_CHECKING:
    from ..probes.watches import Watch
    from ..probes.weight_stacks import Stack


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


@dataclass(slots=True, eq=False)
class StepRows:
    """Captured rows of one forward pass.

    Rows of `port` begin at `base[port]`; ports of one pattern hold the same tokens.
    """

    slab: torch.Tensor  # [rows, hidden_size], CPU
    base: np.ndarray  # int64 [ports]
    pattern: np.ndarray  # int64 [ports]
    landing: Landing  # of the rows in the slab, which an accelerator may still be copying
    #: dtype → which rows of the slab are not finite in that dtype, bool `[rows]`; None: all are
    #: finite. Filled when a writer first needs an entry.
    checked: dict[torch.dtype, np.ndarray | None] = field(default_factory=dict)

    def move(self, file: torch.Tensor) -> None:
        """Move the rows to `file`, a slab of the same shape, once they have landed.

        In any thread: a concurrent reader keeps its reference to the old slab.
        """
        self.landing.wait()
        self.slab = file.copy_(self.slab)

    def unsound(self, dtype: torch.dtype) -> np.ndarray | None:
        """Return which rows of the slab are not finite when stored as `dtype`; None if all are
        finite. The rows must have landed.
        """
        if dtype not in self.checked:
            rows = self.slab.to(dtype)
            self.checked[dtype] = (
                None if all_finite(rows) else ~torch.isfinite(rows).all(dim=1).numpy()
            )
        return self.checked[dtype]


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` contiguous positions from `first_position`, whose rows are in `step`, from slot
    `slots[pattern]` of each port on.
    """

    step: StepRows
    slots: np.ndarray  # int64 [patterns]
    first_position: int
    count: int

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.count)

    def first_rows(self, ports: np.ndarray) -> np.ndarray:
        """Return the slab row of the first position, for each port."""
        rows: np.ndarray = self.step.base[ports] + self.slots[self.step.pattern[ports]]
        return rows


class Rows(Protocol):
    """All rows of an ended request, for a `FinishedCapture`."""

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""

    def non_finite(self, dtype: torch.dtype) -> dict[tuple[str, int], int]:
        """Return (hook, layer) → number of rows that are not finite as `dtype`, if any."""

    def __call__(self, hook: str, layer: int) -> Sequence[memoryview]:
        """Return one site's rows, as buffers in order."""

    def blob(self, capture: FinishedCapture) -> Blob | None:
        """Return the capture's blob if the rows are in a file that the store can adopt."""


class RowSink(Protocol):
    """Destination of rows that leave a recording before its request ends: see `streams`."""

    begun: bool  # whether rows have left

    def push(self, runs: list[Extent]) -> None: ...

    def flush(self) -> None: ...

    def drop(self) -> None: ...

    def seal(
        self, recording: "Recording", expected: set[int], stop: int
    ) -> tuple[list[int], int, Rows]: ...


@dataclass
class Recording:
    """One capture of one request on this rank."""

    capture: StoredCapture
    ports: dict[tuple[str, int], int]  # (hook, layer) → port, at least one
    mask: np.ndarray  # bool [all ports of the rank]
    runs: list[Extent] = field(default_factory=list)
    recorded: int = 0  # positions in `runs`
    # rows that an earlier request recorded, see `row_store`
    reused: list[Extent] = field(default_factory=list)
    # positions that were not recorded when they were last computed, under overload
    dropped: set[int] = field(default_factory=set)
    stream: RowSink | None = None  # destination of rows that leave before the request ends
    watch: "Watch | None" = None  # the watch and the stack by which probes score the rows
    stack: "Stack | None" = None
    prepared: Any = None  # see `FinishedCapture`
    columns: Columns | None = None  # of the rows; None: those of the residual bank
    bank: str = RESIDUAL
    wants: bytes = b""  # bytes of `mask`: recordings with the same mask are planned together
    # the first this many runs are being copied
    _moving: tuple[int, "Future[list[Extent]]"] | None = None
    _compacted: int = 0  # the first this many runs are copies already

    def __post_init__(self) -> None:
        self.wants = self.mask.tobytes()

    @classmethod
    def of(cls, capture: StoredCapture, ports: Ports) -> "Recording | None":
        """Return a capture's recording; None if this rank holds none of its sites or heads."""
        by_site = ports.of(capture)
        if not by_site or (ports.columns is not None and not ports.columns.chosen(capture.heads)):
            return None
        mask = np.zeros(ports.count, dtype=bool)
        mask[list(by_site.values())] = True
        return cls(capture, by_site, mask, columns=ports.columns, bank=capture.bank)

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
        layers_of: dict[str, list[int]] = {}
        for hook, layer in self.ports:
            layers_of.setdefault(hook, []).append(layer)
        return layers_of

    @property
    def num_rows(self) -> int:
        """Return the rows in memory over all ports; rows of a repeated position count each time."""
        return len(self.ports) * (self.recorded + sum(run.count for run in self.reused))

    def add(self, run: Extent) -> None:
        self.runs.append(run)
        self.recorded += run.count
        if self.dropped:
            self.dropped.difference_update(run.positions)

    def leave(self, stop: int, least: int) -> int:
        """Hand runs that end at or before position `stop` to the stream, unless they have fewer
        than `least` rows; return the number of rows handed over.
        """
        if self.stream is None or len(self.ports) * self.recorded < least:
            return 0
        count = next(
            (number for number, run in enumerate(self.runs) if run.positions.stop > stop),
            len(self.runs),
        )
        positions = sum(run.count for run in self.runs[:count])
        if not count or len(self.ports) * positions < least:
            return 0
        self.stream.push(self.runs[:count])
        del self.runs[:count]
        self.recorded -= positions
        return len(self.ports) * positions

    def discard(self, stop: int) -> None:
        """Release the runs that end at or before position `stop`, whose rows are scored."""
        self.runs = [run for run in self.runs if run.first_position + run.count > stop]
        self.recorded = sum(run.count for run in self.runs)
        self._moving, self._compacted = None, 0

    def forget(self) -> None:
        if self.stream is not None:
            self.stream.drop()
        self.runs, self.recorded, self._moving, self._compacted = [], 0, None, 0
        self.reused.clear()

    def owners(self, start: int, stop: int) -> dict[int, Extent]:
        """Return recorded position in `[start, stop)` → the run with its last row."""
        owners: dict[int, Extent] = {}
        for run in self.runs:
            overlap = range(
                max(start, run.first_position), min(stop, run.first_position + run.count)
            )
            owners.update(dict.fromkeys(overlap, run))
        # An earlier row of a dropped position is that of a rejected draft, or of a preempted run.
        return (
            {position: run for position, run in owners.items() if position not in self.dropped}
            if self.dropped
            else owners
        )

    def selection(self, start: int, stop: int) -> "Selection | None":
        """Return the recorded rows of positions in `[start, stop)`, each once; None if there are
        none.
        """
        return self._selected(self.owners(start, stop))

    def _selected(self, owners: dict[int, Extent]) -> "Selection | None":
        if not owners:
            return None
        positions = sorted(owners)
        ports = np.fromiter(self.ports.values(), dtype=np.int64, count=len(self.ports))
        return Selection(ports, len(self.mask), positions, stretches(owners, positions))

    def compact(self, mover: Mover) -> None:
        """Have the mover copy the rows: until then each run keeps the whole slab of its step alive,
        with the rows of all requests.

        A later `settle` replaces the runs by the copies.
        """
        if self.stream is None and self._moving is None and len(self.runs) > self._compacted:
            taken = len(self.runs)
            owners: dict[int, Extent] = {}
            for run in self.runs[self._compacted : taken]:
                owners.update(dict.fromkeys(run.positions, run))
            selection = self._selected(owners)
            assert selection is not None, "a run has positions"
            self._moving = taken, mover.submit(selection.copy)

    @property
    def settles(self) -> bool:
        """Return whether copies of runs are ready to replace them."""
        return self._moving is not None and self._moving[1].done()

    def settle(self) -> None:
        """Replace runs by their copies, if these are ready. Raises what the copying raised."""
        if self._moving is None or not self._moving[1].done():
            return
        taken, copies = self._moving
        self._moving = None
        self.runs[self._compacted : taken] = copies.result()
        self._compacted += len(copies.result())
        self.recorded = sum(run.count for run in self.runs)

    def finish(
        self,
        spec: RankSpec,
        token_ids: list[int],
        *,
        rows: int | None = None,
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
        back. Raises RuntimeError when an expected row is missing.
        """
        stop = len(token_ids) - 1 if rows is None else rows
        expected = (
            set(self.capture.select(0, stop, spec.prompt_tokens))
            if stop >= spec.prompt_tokens
            else set()
        )
        stored_as = dtype if self.capture.dtype == "model" else getattr(torch, self.capture.dtype)
        result: Rows
        if self.stream is not None and self.stream.begun:
            positions, reused, result = self.stream.seal(self, expected, stop)
        else:
            positions, reused, result = self._in_memory(expected, stop, stored_as)
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
            non_finite=result.non_finite(stored_as),
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
        self, expected: set[int], stop: int, stored_as: torch.dtype
    ) -> "tuple[list[int], int, _Rows]":
        """Return the positions below `stop` with rows, how many of them were reused, and their
        rows.
        """
        owners = self.owners(0, stop)
        if extra := owners.keys() - expected:
            raise RuntimeError(f"positions {sorted(extra)[:8]} were recorded but not requested")
        reused = {
            position: run
            for run in self.reused
            for position in run.positions
            if position in expected and position not in owners
        }
        owners |= reused
        positions = sorted(owners)
        return (
            positions,
            len(reused),
            _Rows(self.ports, stretches(owners, positions), stored_as, self.chosen),
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of some positions at some ports, wherever they are in memory.

    Later changes of the recording do not affect it.
    """

    ports: np.ndarray  # int64, ports of the recording
    num_ports: int  # number of ports of the bank
    positions: list[int]  # ascending
    stretches: "list[Stretch]"

    def copy(self) -> list[Extent]:
        """Copy the rows to new memory, once they have landed.

        May be called from any thread.
        """
        slab = self.stretches[0].run.step.slab
        copied = torch.empty(len(self.ports), len(self.positions), slab.shape[1], dtype=slab.dtype)
        at = 0
        for stretch in self.stretches:
            stretch.run.step.landing.wait()
            indices = (
                stretch.run.first_rows(self.ports)[:, None]
                + stretch.offset
                + np.arange(stretch.count)
            )
            copied[:, at : at + stretch.count] = stretch.run.step.slab[torch.from_numpy(indices)]
            at += stretch.count
        base = np.zeros(self.num_ports, dtype=np.int64)
        base[self.ports] = np.arange(len(self.ports)) * len(self.positions)
        step = StepRows(
            copied.view(-1, slab.shape[1]), base, np.zeros(self.num_ports, dtype=np.int64), LANDED
        )
        runs = contiguous(np.array(self.positions))
        return [
            Extent(step, np.array([first]), self.positions[first], count) for first, count in runs
        ]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions that are contiguous in one step's slab."""

    run: Extent
    offset: int  # from the run's first position
    count: int


def stretches(owners: dict[int, Extent], positions: Sequence[int]) -> list[Stretch]:
    """Ascending `positions`, split where the next one is not contiguous."""
    merged: list[Stretch] = []
    for position in positions:
        run = owners[position]
        offset = position - run.first_position
        last = merged[-1] if merged else None
        if last is not None and last.run is run and last.offset + last.count == offset:
            merged[-1] = Stretch(run, last.offset, last.count + 1)
        else:
            merged.append(Stretch(run, offset, 1))
    return merged


class _Rows:
    """Rows of an ended request in memory: a site's rows are buffers over the slabs, copied only for
    another dtype or some of the columns.
    """

    def __init__(
        self,
        ports: dict[tuple[str, int], int],
        stretches: Sequence[Stretch],
        dtype: torch.dtype,
        chosen: Sequence[slice] = (slice(None),),
    ) -> None:
        """`chosen`: the stored columns."""
        self._chosen = chosen
        self._places = {site: number for number, site in enumerate(ports)}
        order = np.fromiter(ports.values(), dtype=np.int64, count=len(ports))
        self._dtype = dtype
        self._parts = [
            (stretch, stretch.run.first_rows(order) + stretch.offset) for stretch in stretches
        ]
        self._landed = False

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        self._wait()
        for stretch, rows in self._parts:
            bad = stretch.run.step.unsound(dtype)
            if bad is None:
                continue
            first_position = stretch.run.first_position + stretch.offset
            for (hook, layer), place in self._places.items():
                first = int(rows[place])
                for offset in np.flatnonzero(bad[first : first + stretch.count]):
                    yield hook, layer, first_position + int(offset)

    def non_finite(self, dtype: torch.dtype) -> dict[tuple[str, int], int]:
        """Return (hook, layer) → number of rows that are not finite as `dtype`, if any."""
        return dict(Counter((hook, layer) for hook, layer, _ in self.unsound(dtype)))

    def _wait(self) -> None:
        if not self._landed:
            for stretch, _ in self._parts:
                stretch.run.step.landing.wait()
            self._landed = True

    def blob(self, capture: FinishedCapture) -> None:
        """Return None, because the rows are not in a file."""

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        self._wait()
        place = self._places[hook, layer]
        return [
            bytes_of(
                stretch.run.step.slab[(first := int(rows[place])) : first + stretch.count],
                self._dtype,
                self._chosen,
            )
            for stretch, rows in self._parts
        ]


def bytes_of(
    rows: torch.Tensor, dtype: torch.dtype, chosen: Sequence[slice] = (slice(None),)
) -> memoryview:
    """Return the bytes of landed rows as they are stored: in `dtype`, with the `chosen` columns."""
    if list(chosen) != [slice(None)]:
        rows = torch.cat([rows[:, columns] for columns in chosen], dim=1) if chosen else rows[:, :0]
    view = rows.contiguous().to(dtype).view(torch.uint8)  # numpy does not have every dtype
    return memoryview(view.numpy()).cast("B").toreadonly()  # later requests may use the rows too


def contiguous(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (first index, length) of each run of consecutive values."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return [(a, b - a) for a, b in itertools.pairwise([0, *breaks.tolist(), len(values)])]
