"""Places of a step's captured rows: by port in the step, and in the arena, where each row stays.

Steps that repeat one another have the same layout, and their places advance with their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..base.landings import Landing
from ..base.ranges import numbers_of
from .capture import Readers, ScoredRows
from .lanes import Lanes

_STACK = attrgetter("stack")
_SHAPE = attrgetter("stack.shape")
_WATCH = attrgetter("watch")
_READS = attrgetter("reads")


class Runs(NamedTuple):
    """Runs of a step: consecutive positions of a request that one recording captures. Each int64
    `[runs]`.
    """

    lanes: np.ndarray
    members: np.ndarray  # index of the request among those of the step
    skips: np.ndarray  # rows of the request before it in this step
    tokens: np.ndarray  # its first row in the batch
    counts: np.ndarray


@dataclass(frozen=True)
class StepLayout:
    """A step's rows by port; read-only.

    Successive steps that generate one token of each request share a layout.
    """

    runs: np.ndarray  # int64 [3, runs]: the number of each one's ports, its first token, its count
    group: np.ndarray  # [runs]: among the distinct sets of ports
    members: np.ndarray  # bool [groups, ports]
    pattern: np.ndarray  # [ports]: pattern of the port
    tokens: list[np.ndarray]  # for each pattern: tokens, sorted and distinct
    base: np.ndarray  # [ports]: first row of the port
    slots: np.ndarray  # [runs, patterns]: slot of the run's first token

    @cached_property
    def rows(self) -> int:
        """The number of rows over all ports."""
        return int(self.base[-1]) + len(self.tokens[self.pattern[-1]]) if self.tokens else 0

    @cached_property
    def entries(self) -> "CapturedEntries":
        """The positions of all runs, and the rows of all positions."""
        counts = self.runs[2]
        of_group, ports = np.nonzero(self.members)
        widths = self.members.sum(axis=1)
        # a block for each port of each run, with a row for each of the run's positions
        ports_of = widths[self.group]
        run = np.repeat(np.arange(len(self.group)), ports_of)
        first_of_group = np.searchsorted(of_group, self.group)
        port = ports[numbers_of(first_of_group, ports_of)]
        sizes = ports_of * counts
        return CapturedEntries(
            np.repeat(np.arange(len(counts)), counts),
            numbers_of(np.zeros_like(counts), counts),
            numbers_of(np.cumsum(sizes) - sizes, counts),
            numbers_of((np.cumsum(counts) - counts)[run], counts[run]),
            np.repeat(numbers_of(np.zeros_like(ports_of), ports_of), counts[run]),
            numbers_of(self.base[port] + self.slots[run, self.pattern[port]], counts[run]),
        )


class CapturedEntries(NamedTuple):
    """Captured positions and rows of a step."""

    run: np.ndarray  # [positions]
    within: np.ndarray  # [positions]: tokens of the run before it
    first: (
        np.ndarray
    )  # [positions]: its row at the first port; as many positions on, the next port's
    position: np.ndarray  # [rows]: index of its position
    ordinal: np.ndarray  # [rows]: index of its port among those of its recording
    row: np.ndarray  # [rows]: its row in the step; several have one if captures name the same rows


def layout_of(runs: np.ndarray, masks: np.ndarray) -> StepLayout:
    """Return the layout of runs, see `StepLayout.runs`. `masks`: ports by number, bool."""
    numbers, firsts, counts = runs
    used, group = np.unique(numbers, return_inverse=True)
    of_groups = masks[used]
    members, pattern = _patterns_of(of_groups.tobytes(), of_groups.shape[1])
    # Where any run begins or ends, tokens are cut into pieces, each of which is whole in its runs:
    # two captures of one request may name the same row.
    edges, places = np.unique(np.append(firsts, firsts + counts), return_inverse=True)
    begins, ends = np.split(places, 2)
    of_runs = numbers_of(begins, ends - begins)
    order = np.argsort(of_runs, kind="stable")
    pieces, starts = np.unique(of_runs[order], return_index=True)
    of_pieces = np.repeat(group, ends - begins)[order]
    captured = np.logical_or.reduceat(members[of_pieces], starts, axis=0)  # [pieces, patterns]
    sizes = np.diff(edges)[pieces]
    stops = np.cumsum(captured * sizes[:, None], axis=0)  # slots after each piece
    slots = (stops - captured * sizes[:, None])[np.searchsorted(pieces, begins)]
    _, piece = np.nonzero(captured.T)
    tokens = np.split(numbers_of(edges[pieces[piece]], sizes[piece]), np.cumsum(stops[-1])[:-1])
    per_port = stops[-1][pattern]
    return StepLayout(
        runs=runs,
        group=group,
        members=of_groups,
        pattern=pattern,
        tokens=tokens,
        base=np.cumsum(per_port) - per_port,
        slots=slots,
    )


@lru_cache(maxsize=64)
def _patterns_of(masks: bytes, ports: int) -> tuple[np.ndarray, np.ndarray]:
    """Group ports by the runs that capture them: return which groups of runs are in each pattern,
    bool `[groups, patterns]`, and the pattern of each port.

    Cached, because the steps of a request need the same ports again and again.
    """
    members, pattern = np.unique(
        np.frombuffer(masks, dtype=bool).reshape(-1, ports), axis=1, return_inverse=True
    )
    return members, pattern.reshape(-1)


class Places:
    """Places in the arena of the rows of steps with one layout."""

    def __init__(self, layout: StepLayout, runs: Runs, ids: Sequence[str], lanes: Lanes) -> None:
        """`ids`: of the step's requests."""
        self.layout = layout
        self._runs = runs
        self._ids = ids
        self._lanes = lanes
        # of each run's lane, see `Lanes.places`; None: they have changed
        self._places: np.ndarray | None = None
        self._ends = lanes.ends[runs.lanes]
        self._dropped: list[int] = []
        if lanes.dropped:
            self._dropped = np.flatnonzero(np.isin(runs.lanes, list(lanes.dropped))).tolist()
        self.positions = np.zeros(len(runs.lanes), dtype=np.int64)  # of the runs' first tokens
        self._positions = np.zeros(0, dtype=np.int64)  # [positions]
        self._needed = np.zeros(0, dtype=np.int64)  # [positions]
        self.rows = np.zeros(0, dtype=np.int64)  # [entries]: number of the row in the bank's rows
        self.marks = np.zeros(0, dtype=np.int64)  # [positions]: place of the mark in the arena

    def captures(self) -> list[tuple[str, np.ndarray]]:
        """Return requests, and the ports that capture rows of each, bool `[ports]`."""
        masks = self.layout.members[self.layout.group]
        ids = [self._ids[member] for member in self._runs.members.tolist()]
        return list(zip(ids, masks, strict=True))

    def move_to(self, positions: np.ndarray) -> None:
        """Set the places of the step whose requests begin at these positions."""
        lanes = self._lanes
        of_runs = self._runs.lanes
        self.positions = firsts = positions[self._runs.members] + self._runs.skips
        stops = np.minimum(firsts + self._runs.counts, self._ends)
        new = (stops > lanes.known[of_runs]) | (firsts < lanes.begins[of_runs])
        for run in np.flatnonzero(new & (stops > firsts)).tolist():
            lanes.find(int(of_runs[run]), int(firsts[run]), int(stops[run]))
            self._places = None
        lanes.begins[of_runs] = firsts
        if self._places is None:
            self._places = lanes.places[:, :, of_runs]
            self._ends = lanes.ends[of_runs]
        found_stops, found_rows, found_strides, found_marks = self._places
        entries = self.layout.entries
        run = entries.run
        position = firsts[run] + entries.within
        block = (position >= found_stops[:, run]).sum(axis=0)
        needed = position < self._ends[run]
        block = np.where(needed, block, 0)
        rows = np.where(needed, found_rows[block, run] + position, 0)
        self.marks = np.where(needed, found_marks[block, run] + position, 0)
        strides = np.where(needed, found_strides[block, run], 0)
        self._positions = position
        self._needed = needed
        self.rows = rows[entries.position] + entries.ordinal * strides[entries.position]

    def of_rows(self) -> np.ndarray:
        """Return the place of each of the step's rows, one of them if it has several."""
        places = np.zeros(self.layout.rows, dtype=np.int64)
        if len(places) == len(self.rows):
            places[self.layout.entries.row] = self.rows
        else:  # those that nobody needs are the smallest
            np.maximum.at(places, self.layout.entries.row, self.rows)
        return places

    @cached_property
    def _read(self) -> Sequence[tuple[Readers, np.ndarray, np.ndarray, Sequence[int]]]:
        """Return what probes read: of each set of alike ones the readers, their positions among
        those of the step, the entries `[ports, positions]`, and the lanes.
        """
        entries = self.layout.entries
        found = list[tuple[Readers, np.ndarray, np.ndarray, Sequence[int]]]()
        runs = np.flatnonzero(self._lanes.read[self._runs.lanes])
        if not len(runs):
            return found
        every = list(map(self._lanes.recordings.__getitem__, self._runs.lanes[runs].tolist()))
        shapes = list(map(_SHAPE, every))
        kinds = dict(zip(shapes, range(len(shapes)), strict=True))  # of each the last run
        of_runs = np.array(list(map(kinds.__getitem__, shapes)))
        for number in kinds.values():
            mine = np.flatnonzero(of_runs == number)
            recordings = list(map(every.__getitem__, mine.tolist()))
            place_of = np.full(len(self._runs.lanes), -1)
            place_of[runs[mine]] = np.arange(len(mine))
            member = place_of[entries.run]
            places = np.flatnonzero(member >= 0)
            member = member[places]
            reads = np.frombuffer(b"".join(map(_READS, recordings)), dtype=np.int64)
            ordinals = reads.reshape(len(mine), -1)[member]
            counts = self._runs.counts[entries.run[places]]
            of_ports = entries.first[places] + ordinals.T * counts
            readers = Readers(list(map(_WATCH, recordings)), list(map(_STACK, recordings)), member)
            found.append((readers, places, of_ports, self._runs.lanes[runs[mine]].tolist()))
        return found

    def drain(self, landing: Landing) -> list[ScoredRows]:
        """Count the rows of this step as recorded; return those that probes read."""
        found = list[ScoredRows]()
        bank = self._lanes.memory
        bank.arena.bytes[self.marks] = 1
        for run in self._dropped:
            first = int(self.positions[run])
            recording = self._lanes.recordings[int(self._runs.lanes[run])]
            recording.dropped.difference_update(range(first, first + int(self._runs.counts[run])))
        for readers, places, entries, lanes in self._read:
            positions = self._positions[places]
            numbers = self.rows[entries]
            needed = self._needed[places]
            if not needed.all():
                positions = positions[needed]
                numbers = numbers[:, needed]
                if not len(positions):
                    continue
                readers = readers.only(needed)
            held = list(map(self._lanes.blocks.get, lanes))
            found.append(ScoredRows(readers, positions, numbers, bank.all, landing, held))
        return found
