"""Lanes of a bank: each recording of a live request has one, with its places in arrays.

A lane is taken when its request begins, and given back when it ends. So a step in which requests
come or go looks for places of their recordings alone, and reads those of all others at once.
"""

import sys
from collections.abc import Iterable, Iterator

import numpy as np

from .arena import BankRows, RecordedBlock
from .capture import Recording

#: Tokens of a request in a step, at most, that may go to two blocks: with drafts. Longer runs are
#: cut where a block ends.
FEW = 16
#: Lanes are added so many at a time.
_MORE = 64


def parts_of(
    recording: Recording, first: int, count: int, memory: BankRows
) -> Iterator[tuple[int, int]]:
    """Yield the parts (tokens before it, count) of a run whose first position is `first`, each in
    one block if it is long.
    """
    skip = 0
    while count - skip > FEW and (block := recording.block_of(first + skip, memory)) is not None:
        part = min(count - skip, block.span.stop - first - skip)
        yield skip, part
        skip += part
    if skip < count:
        yield skip, count - skip


class Masks:
    """Ports that recordings capture: a number for each set of them, while a lane has it."""

    def __init__(self, ports: int) -> None:
        self.rows = np.zeros((0, ports), dtype=bool)  # [numbers, ports]
        self._numbers: dict[bytes, int] = {}
        self._users: list[int] = []  # of each number: the lanes that have it
        self._unused: list[int] = []

    def take(self, recording: Recording) -> int:
        """Return the number of a recording's ports."""
        number = self._numbers.get(recording.wants)
        if number is None:
            if not self._unused:
                self._unused.append(len(self.rows))
                self._users.append(0)
                self.rows = np.concatenate([self.rows, recording.mask[None]])
            number = self._numbers[recording.wants] = self._unused.pop()
            self.rows[number] = recording.mask
        self._users[number] += 1
        return number

    def give(self, recording: Recording) -> None:
        number = self._numbers[recording.wants]
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[recording.wants]
            self._unused.append(number)


class Lanes:
    """The lanes of one bank; 0 is none."""

    def __init__(self, memory: BankRows, ports: int) -> None:
        self.memory = memory
        self.masks = Masks(ports)
        self.recordings: dict[int, Recording] = {}
        #: Recordings with a new block → the position after their last row that may not change.
        self.begun: dict[int, tuple[Recording, int]] = {}
        self.dropped = set[int]()  # lanes whose recordings dropped positions
        self._free = list[int]()
        #: Lane → the blocks of its last step's positions, kept until the forward is over.
        self.blocks: dict[int, list[RecordedBlock]] = {}
        # of each block of a lane: the position after its last one, and what the number of a row, of
        # the next port's row and of the mark are, less the position
        self.places = np.zeros((4, 2, 1), dtype=np.int64)
        # [lanes]: the first position of its last step, from which on those before `known` have
        # blocks; the first one that nobody needs; the number of its ports; whether its positions
        # need not follow one another, and whether probes read its rows
        self.begins, self.known, self.ends, self.mask = np.zeros((4, 1), dtype=np.int64)
        self.scattered, self.read = np.zeros((2, 1), dtype=bool)

    def add(self, recording: Recording, *, scattered: bool = False) -> int:
        """Return a lane for a recording. `scattered`: its positions need not follow one another, so
        that they need a lane in each step, see `Planner`.
        """
        if not self._free:
            self._grow()
        lane = self._free.pop()
        self.recordings[lane] = recording
        self.begins[lane] = 0
        self.known[lane] = -1
        self.ends[lane] = recording.end
        self.mask[lane] = self.masks.take(recording)
        self.scattered[lane] = scattered
        self.read[lane] = recording.stack is not None
        if recording.dropped:
            self.dropped.add(lane)
        blocks = 2 + -(-FEW // min(recording.block, recording.span))
        if blocks > self.places.shape[1]:
            more = blocks - self.places.shape[1]
            self.places = np.pad(self.places, ((0, 0), (0, more), (0, 0)))
        return lane

    def remove(self, lanes: Iterable[int]) -> None:
        for lane in lanes:
            self.masks.give(self.recordings.pop(lane))
            self.blocks.pop(lane, None)
            self.dropped.discard(lane)
            self._free.append(lane)

    def _grow(self) -> None:
        have = len(self.known)
        self._free = list(range(have + _MORE - 1, have - 1, -1))
        self.places = np.pad(self.places, ((0, 0), (0, 0), (0, _MORE)))
        self.begins, self.known, self.ends, self.mask, self.scattered, self.read = (
            np.pad(part, (0, _MORE))
            for part in (
                self.begins,
                self.known,
                self.ends,
                self.mask,
                self.scattered,
                self.read,
            )
        )

    def find(self, lane: int, first: int, stop: int) -> None:
        """Find the blocks of the positions `first … stop`."""
        recording = self.recordings[lane]
        before = self.blocks.get(lane)
        blocks = list[RecordedBlock]()
        at = first
        stops, rows, strides, marks = self.places[:, :, lane]
        stops[:] = sys.maxsize
        while at < stop:
            if (block := recording.block_of(at, self.memory)) is None:  # it failed
                self.ends[lane] = 0
                return
            number = len(blocks)
            slot = block.slot(at) - at
            stops[number] = block.span.stop
            rows[number] = block.row + slot
            strides[number] = block.place.count
            marks[number] = block.place.mark + slot
            blocks.append(block)
            at = block.span.stop
        self.blocks[lane] = blocks
        self.known[lane] = at
        if not before or blocks[-1] is not before[-1]:
            # rows of drafts may be recorded again in the block that they are in now
            reached = max(first + 1, min(stop, recording.prompt_tokens))
            self.begun[id(recording)] = recording, reached
