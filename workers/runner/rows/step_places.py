"""Places of a step's captured rows: by port in the step, and in the arena, where each row stays.

Steps that repeat one another have the same layout, and their places advance with their positions.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np

from ..base.landings import Landing
from ..base.ranges import numbers_of
from ..probes.watches import Watch
from .arena import BankRows, RecordedBlock
from .capture import Readers, Recording, ScoredRows

#: Tokens of a request in a step, at most, that may go to two blocks: with drafts. Longer runs are
#: cut where a block ends.
FEW = 16


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Consecutive positions of a request that one of its recordings captures in a step."""

    request: str
    member: int  # index of the request among those of the step
    recording: Recording
    skip: int  # rows of the request before it in this step
    first_token: int  # its first row in the batch
    count: int


def runs_at_most(run: PositionRun, first: int, memory: BankRows) -> Iterator[PositionRun]:
    """Yield the parts of a run whose first position is `first`, each in one block if it is long."""
    left = run
    while left.count > FEW and (block := run.recording.block_of(first, memory)) is not None:
        count = min(left.count, block.span.stop - first)
        yield replace(left, count=count)
        skip = left.skip + count
        token = left.first_token + count
        left = replace(left, skip=skip, first_token=token, count=left.count - count)
        first += count
    if left.count:
        yield left


@dataclass(frozen=True)
class StepLayout:
    """A step's rows by port; read-only.

    Successive steps that generate one token of each request share a layout.
    """

    runs: Sequence[tuple[bytes, int, int]]  # each one's ports, as `Recording.wants`, token, count
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
        group, members = _groups_of(self.runs)
        counts = np.array([count for _, _, count in self.runs])
        of_group, ports = np.nonzero(members)
        widths = members.sum(axis=1)
        # a block for each port of each run, with a row for each of the run's positions
        ports_of = widths[group]
        run = np.repeat(np.arange(len(group)), ports_of)
        first_of_group = np.searchsorted(of_group, group)
        port = ports[numbers_of(first_of_group, ports_of)]
        return CapturedEntries(
            np.repeat(np.arange(len(counts)), counts),
            numbers_of(np.zeros_like(counts), counts),
            numbers_of((np.cumsum(counts) - counts)[run], counts[run]),
            np.repeat(numbers_of(np.zeros_like(ports_of), ports_of), counts[run]),
            numbers_of(self.base[port] + self.slots[run, self.pattern[port]], counts[run]),
        )


class CapturedEntries(NamedTuple):
    """Captured positions and rows of a step."""

    run: np.ndarray  # [positions]
    within: np.ndarray  # [positions]: tokens of the run before it
    position: np.ndarray  # [rows]: index of its position
    ordinal: np.ndarray  # [rows]: index of its port among those of its recording
    row: np.ndarray  # [rows]: its row in the step; several have one if captures name the same rows


def layout_of(runs: Sequence[tuple[bytes, int, int]]) -> StepLayout:
    """Return the layout of runs, each: ports as `Recording.wants`, first token, count."""
    group, masks = _groups_of(runs)
    members, pattern = _patterns_of(masks.tobytes(), masks.shape[1])
    firsts, counts = np.array([run[1:] for run in runs], dtype=np.int64).T
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
    return StepLayout(runs, pattern, tokens, np.cumsum(per_port) - per_port, slots)


def _groups_of(runs: Sequence[tuple[bytes, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Group runs by their ports: return the group of each run, and the ports of each group, bool
    `[groups, ports]`.
    """
    groups: dict[bytes, int] = {}
    group = np.array([groups.setdefault(wants, len(groups)) for wants, _, _ in runs])
    return group, np.frombuffer(b"".join(groups), dtype=bool).reshape(len(groups), -1)


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
    """Places in the arena of the rows of steps with one layout.

    Of each run the blocks of this step's positions are known; from `_ends` on nobody needs a row.
    """

    def __init__(self, layout: StepLayout, runs: Sequence[PositionRun], memory: BankRows) -> None:
        self.layout = layout
        self._memory = memory
        self._recordings = recordings = [run.recording for run in runs]
        #: Request → the ports that capture its rows.
        self.captures = [(run.request, run.recording.mask) for run in runs]
        self._members, self._skips, self._counts = np.array(
            [(run.member, run.skip, run.count) for run in runs]
        ).T
        #: Recordings with a new block → the position after their last row that may not change.
        self.begun: dict[int, tuple[Recording, int]] = {}
        self._blocks: list[list[RecordedBlock]] = [[] for _ in runs]  # kept until the step is over
        few = [run for run in runs if run.count <= FEW]
        most = 2 + max(
            (-(-run.count // min(run.recording.block, run.recording.span)) for run in few),
            default=0,
        )
        # of each block of a run: the position after its last one, and what the number of a row, of
        # the next port's row and of the mark are, less the position
        self._stops, self._rows, self._strides, self._marks = np.zeros(
            (4, most, len(runs)), dtype=np.int64
        )
        self._known = np.full(len(runs), -1)  # positions below this one have blocks
        self._ends = np.array([recording.end for recording in recordings])
        self._dropped = [number for number, item in enumerate(recordings) if item.dropped]
        self.positions = np.zeros(len(runs), dtype=np.int64)  # of the runs' first tokens
        self._positions = np.zeros(0, dtype=np.int64)  # [positions]
        self._needed = np.zeros(0, dtype=np.int64)  # [positions]
        self.rows = np.zeros(0, dtype=np.int64)  # [entries]: number of the row in the bank's rows
        self.marks = np.zeros(0, dtype=np.int64)  # [positions]: place of the mark in the arena

    def move_to(self, positions: np.ndarray) -> None:
        """Set the places of the step whose requests begin at these positions."""
        self.begun = {}
        self.positions = positions[self._members] + self._skips
        firsts = self.positions
        stops = np.minimum(firsts + self._counts, self._ends)
        for run in np.flatnonzero((stops > self._known) & (stops > firsts)).tolist():
            self._find(run, int(firsts[run]), int(stops[run]))
        entries = self.layout.entries
        run = entries.run
        position = firsts[entries.run] + entries.within
        block = (position >= self._stops[:, run]).sum(axis=0)
        needed = position < self._ends[run]
        block = np.where(needed, block, 0)
        rows = np.where(needed, self._rows[block, run] + position, 0)
        self.marks = np.where(needed, self._marks[block, run] + position, 0)
        strides = np.where(needed, self._strides[block, run], 0)
        self._positions = position
        self._needed = needed
        self.rows = rows[entries.position] + entries.ordinal * strides[entries.position]

    def _find(self, run: int, first: int, stop: int) -> None:
        """Find the blocks of a run's positions `first … stop`."""
        recording = self._recordings[run]
        before = self._blocks[run]
        blocks = list[RecordedBlock]()
        at = first
        self._stops[:, run] = sys.maxsize
        while at < stop:
            if (block := recording.block_of(at, self._memory)) is None:  # it failed
                self._ends[run] = 0
                return
            number = len(blocks)
            slot = block.slot(at) - at
            self._stops[number, run] = block.span.stop
            self._rows[number, run] = block.row + slot
            self._strides[number, run] = block.place.count
            self._marks[number, run] = block.place.mark + slot
            blocks.append(block)
            at = block.span.stop
        self._blocks[run] = blocks
        self._known[run] = at
        if not before or blocks[-1] is not before[-1]:
            # rows of drafts may be recorded again in the block that they are in now
            reached = max(first + 1, min(stop, recording.prompt_tokens))
            self.begun[id(recording)] = recording, reached

    def of_rows(self) -> np.ndarray:
        """Return the place of each of the step's rows, one of them if it has several."""
        places = np.zeros(self.layout.rows, dtype=np.int64)
        if len(places) == len(self.rows):
            places[self.layout.entries.row] = self.rows
        else:  # those that nobody needs are the smallest
            np.maximum.at(places, self.layout.entries.row, self.rows)
        return places

    @cached_property
    def _read(self) -> Sequence[tuple[Readers, np.ndarray, np.ndarray, Callable[..., object]]]:
        """Return what probes read: of each set of them the readers, their positions among those of
        the step, the entries `[ports, positions]`, and what takes their blocks from `_blocks`.
        """
        entries = self.layout.entries
        found = []
        stacks = [recording.stack for recording in self._recordings]
        for stack in dict.fromkeys(stack for stack in stacks if stack is not None):
            # [positions, ports of a recording]: index of the row among the entries
            rows = np.zeros((len(entries.run), int(entries.ordinal.max()) + 1), dtype=np.int64)
            rows[entries.position, entries.ordinal] = np.arange(len(entries.row))
            runs = [run for run, of_run in enumerate(stacks) if of_run is stack]
            places = np.flatnonzero(np.isin(entries.run, runs))
            watches = [self._recordings[run].watch for run in entries.run[places].tolist()]
            ports = np.flatnonzero(self._recordings[runs[0]].mask)
            of_ports = rows[places][:, np.searchsorted(ports, stack.ports)].T
            readers = Readers(stack, cast(list[Watch], watches))
            found.append((readers, places, of_ports, itemgetter(*runs)))
        return found

    def drain(self, landing: Landing) -> list[ScoredRows]:
        """Count the rows of this step as recorded; return those that probes read."""
        found = list[ScoredRows]()
        memory = self._memory.all
        self._memory.arena.bytes[self.marks] = 1
        for run in self._dropped:
            first = int(self.positions[run])
            self._recordings[run].dropped.difference_update(
                range(first, first + int(self._counts[run]))
            )
        for readers, places, entries, blocks in self._read:
            positions = self._positions[places]
            numbers = self.rows[entries]
            needed = self._needed[places]
            if not needed.all():
                positions = positions[needed]
                numbers = numbers[:, needed]
                if not len(positions):
                    continue
                readers = Readers(readers.stack, [*compress(readers.watches, needed.tolist())])
            held = blocks(self._blocks)
            found.append(ScoredRows(readers, positions, numbers, memory, landing, held))
        return found
