"""Captured rows of a request, from recording until they are written.

All rows that a step captures lie in one slab `[rows, hidden]`, port after port (a port is a site's
before or after); a request remembers the runs of rows that are its own and joins them when it ends.
A position recorded twice (after a preemption, or where a draft token was rejected) is written once,
as it was computed last: that is the row whose keys and values the later tokens saw.
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
        """`columns`: of the rows; None: those of the residual bank, which every rank holds
        whole.
        """
        self.columns = columns
        self.count = 2 * len(sites)
        self._numbers = {(site.hook, site.layer): number for number, site in enumerate(sites)}

    def of(self, capture: StoredCapture) -> dict[tuple[str, int], int]:
        """(hook, layer) → port, for those that this rank holds, in the order of the capture."""
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
    landing: (
        Landing  # of the rows in the slab: they may come from an accelerator, in their own time
    )
    #: dtype → which rows of the slab are not finite in it, bool `[rows]`; None: all are. Filled
    #: when a writer first asks.
    checked: dict[torch.dtype, np.ndarray | None] = field(default_factory=dict)

    def move(self, file: torch.Tensor) -> None:
        """To `file`, a slab of the same shape, once they have landed.

        In any thread: who reads meanwhile holds the slab.
        """
        self.landing.wait()
        self.slab = file.copy_(self.slab)

    def unsound(self, dtype: torch.dtype) -> np.ndarray | None:
        """Return which rows of the slab are not finite once they are stored as `dtype`; None: all
        are.

        Of landed rows.
        """
        if dtype not in self.checked:
            rows = self.slab.to(dtype)
            self.checked[dtype] = (
                None if all_finite(rows) else ~torch.isfinite(rows).all(dim=1).numpy()
            )
        return self.checked[dtype]


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` contiguous positions from `first_position`, in `step` at slot `slots[pattern]` of
    each port.
    """

    step: StepRows
    slots: np.ndarray  # int64 [patterns]
    first_position: int
    count: int

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.count)

    def first_rows(self, ports: np.ndarray) -> np.ndarray:
        """Slab row of the first position, for each port."""
        rows: np.ndarray = self.step.base[ports] + self.slots[self.step.pattern[ports]]
        return rows


class Rows(Protocol):
    """All rows of an ended request, for a `FinishedCapture`."""

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """(hook, layer, position) of the rows that are not finite as `dtype`."""

    def non_finite(self, dtype: torch.dtype) -> dict[tuple[str, int], int]:
        """(hook, layer) → how many of its rows are not finite as `dtype`, where some are."""

    def __call__(self, hook: str, layer: int) -> Sequence[memoryview]:
        """One site's, as buffers in order."""

    def blob(self, capture: FinishedCapture) -> Blob | None:
        """The capture's blob, where the rows are in a file that the store can take."""


class Leaving(Protocol):
    """Destination of rows that leave before their request ends: see `streams`."""

    begun: bool  # whether any have

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
    reused: list[Extent] = field(
        default_factory=list
    )  # rows that an earlier request recorded, see `row_store`
    dropped: set[int] = field(default_factory=set)  # positions not recorded, under overload
    stream: Leaving | None = None  # where rows go that leave before the request ends
    watch: "Watch | None" = None  # of rows that probes score, and the next
    stack: "Stack | None" = None
    prepared: Any = None  # see `FinishedCapture`
    columns: Columns | None = None  # of the rows; None: those of the residual bank
    bank: str = RESIDUAL
    wants: bytes = b""  # names `mask`: recordings with the same one are planned together
    _moving: tuple[int, "Future[list[Extent]]"] | None = (
        None  # runs up to this one are being copied
    )
    _compacted: int = 0  # that many of `runs` are copies already

    def __post_init__(self) -> None:
        self.wants = self.mask.tobytes()

    @classmethod
    def of(cls, capture: StoredCapture, ports: Ports) -> "Recording | None":
        """None when this rank holds none of its sites."""
        own = ports.of(capture)
        if not own or (ports.columns is not None and not ports.columns.chosen(capture.heads)):
            return None
        mask = np.zeros(ports.count, dtype=bool)
        mask[list(own.values())] = True
        return cls(capture, own, mask, columns=ports.columns, bank=capture.bank)

    def width(self, hidden_size: int) -> int:
        """Elements of a row on this rank, in a model of this hidden size."""
        return hidden_size if self.columns is None else self.columns.size

    def stored_width(self, hidden_size: int) -> int:
        """The same of a row as it is stored: of the heads that were asked for."""
        if self.columns is None or not self.capture.heads:
            return self.width(hidden_size)
        return len(self.chosen) * self.columns.row.width

    @property
    def chosen(self) -> list[slice]:
        """The columns that are stored."""
        return [slice(None)] if self.columns is None else self.columns.chosen(self.capture.heads)

    @property
    def sites(self) -> dict[str, list[int]]:
        """hook → ascending layers that this rank holds."""
        layers_of: dict[str, list[int]] = {}
        for hook, layer in self.ports:
            layers_of.setdefault(hook, []).append(layer)
        return layers_of

    @property
    def num_rows(self) -> int:
        """Rows recorded so far over all ports, counting those recorded twice."""
        return len(self.ports) * (self.recorded + sum(run.count for run in self.reused))

    def add(self, run: Extent) -> None:
        self.runs.append(run)
        self.recorded += run.count

    def leave(self, stop: int, least: int) -> int:
        """Hand runs that end at or before position `stop` to the stream, unless they have fewer
        than `least` rows; how many left.
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
        """Let go of the runs that end at or before position `stop`: their rows are scored."""
        self.runs = [run for run in self.runs if run.first_position + run.count > stop]
        self.recorded = sum(run.count for run in self.runs)
        self._moving, self._compacted = None, 0

    def forget(self) -> None:
        if self.stream is not None:
            self.stream.drop()
        self.runs, self.recorded, self._moving, self._compacted = [], 0, None, 0
        self.reused.clear()

    def owners(self, start: int, stop: int) -> dict[int, Extent]:
        """Recorded position in `[start, stop)` → the run that computed it last."""
        owners: dict[int, Extent] = {}
        for run in self.runs:
            overlap = range(
                max(start, run.first_position), min(stop, run.first_position + run.count)
            )
            owners.update(dict.fromkeys(overlap, run))
        return owners

    def selection(self, start: int, stop: int) -> "Selection | None":
        """The recorded rows of positions in `[start, stop)`, each once; None when there are
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
        """Have the rows copied: until then each run keeps the whole slab of its step alive, with
        the rows of all requests.

        What was copied takes the runs' place in a later `settle`.
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
        """Return whether copies of its runs are made that have not taken their place."""
        return self._moving is not None and self._moving[1].done()

    def settle(self) -> None:
        """Replace runs by their copies, if those are made. Raises what the copying raised."""
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
        """Return what should be stored of a request that ended with `token_ids` (prompt and
        generated), of which the first `rows` have rows; None: all but the last, which was never fed
        back.

        Raises RuntimeError when a row that should be there is not.
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
        """Return what is here of the positions below `stop`: (those, how many were reused, their
        rows).
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
    """Rows of some positions at some ports, wherever they are.

    What a recording does later does not change it.
    """

    ports: np.ndarray  # int64, those of the recording
    num_ports: int  # of the rank
    positions: list[int]  # ascending
    stretches: "list[Stretch]"

    def copy(self) -> list[Extent]:
        """The same rows in memory of their own, once they have landed.

        May be called from any thread.
        """
        slab = self.stretches[0].run.step.slab
        copied = torch.empty(len(self.ports), len(self.positions), slab.shape[1], dtype=slab.dtype)
        at = 0
        for stretch in self.stretches:
            stretch.run.step.landing.wait()
            needed = (
                stretch.run.first_rows(self.ports)[:, None]
                + stretch.offset
                + np.arange(stretch.count)
            )
            copied[:, at : at + stretch.count] = stretch.run.step.slab[torch.from_numpy(needed)]
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
    """(hook, layer) → its rows as buffers over the slabs: nothing is copied unless another dtype is
    requested.
    """

    def __init__(
        self,
        ports: dict[tuple[str, int], int],
        stretches: Sequence[Stretch],
        dtype: torch.dtype,
        chosen: Sequence[slice] = (slice(None),),
    ) -> None:
        """`chosen`: the columns that are stored."""
        self._chosen = chosen
        self._places = {site: number for number, site in enumerate(ports)}
        order = np.fromiter(ports.values(), dtype=np.int64, count=len(ports))
        self._dtype = dtype
        self._parts = [
            (stretch, stretch.run.first_rows(order) + stretch.offset) for stretch in stretches
        ]
        self._landed = False

    def unsound(self, dtype: torch.dtype) -> Iterator[tuple[str, int, int]]:
        """(hook, layer, position) of the rows that are not finite as `dtype`."""
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
        """(hook, layer) → how many of its rows are not finite as `dtype`, where some are."""
        return dict(Counter((hook, layer) for hook, layer, _ in self.unsound(dtype)))

    def _wait(self) -> None:
        if not self._landed:
            for stretch, _ in self._parts:
                stretch.run.step.landing.wait()
            self._landed = True

    def blob(self, capture: FinishedCapture) -> None:
        """None: slabs are not a file."""

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
    """Return landed rows as they are stored: these columns of them."""
    if list(chosen) != [slice(None)]:
        rows = torch.cat([rows[:, columns] for columns in chosen], dim=1) if chosen else rows[:, :0]
    view = rows.contiguous().to(dtype).view(torch.uint8)  # numpy does not have every dtype
    return memoryview(view.numpy()).cast("B").toreadonly()  # the rows may also serve later requests


def contiguous(values: np.ndarray) -> list[tuple[int, int]]:
    """(first index, length) of each run of consecutive values."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return [(a, b - a) for a, b in itertools.pairwise([0, *breaks.tolist(), len(values)])]
