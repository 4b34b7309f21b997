"""Recorded rows that probes read: those of a step, and those that an earlier request recorded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from ..base.landings import Landing
from ..probes.watches import Watch
from ..probes.weight_stacks import WeightStack
from .arena import RecordedBlock
from .capture import Recording


class Readers:
    """The watches of positions whose rows the same probes read."""

    def __init__(self, stack: WeightStack, watches: Sequence[Watch]) -> None:
        self.stack, self.watches, self.table = stack, watches, watches[0].table
        self.slots = np.array([watch.slot for watch in watches])
        self.streams_from = np.array([watch.streams_from for watch in watches])
        streams = bool((self.streams_from >= 0).any())
        #: Whether the scores are needed as soon as a step is over; whether there is news in them.
        self.urgent = stack.kind.decides or streams
        self.tells = self.urgent and (streams or stack.kind.ends) and stack.last


class ScoredRows(NamedTuple):
    """Rows that the same probes read, at positions that ascend for each watch."""

    readers: Readers
    positions: np.ndarray
    numbers: np.ndarray  # [ports of the stack, positions]: of the rows in `memory`
    memory: torch.Tensor  # all rows of the bank
    landing: Landing
    blocks: object  # keeps the rows

    def has(self, needed: Mapping[Watch, int]) -> bool:
        """Return whether a row is among the first `needed` of its watch."""
        readers, positions = self.readers, self.positions
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
    reused, recording.reused = recording.reused, []
    stack, watch = cast(WeightStack, recording.stack), cast(Watch, recording.watch)
    for extent in reused:
        block, positions = cast(RecordedBlock, extent.block), np.array(extent.positions)
        first = block.row + np.searchsorted(block.ports, stack.ports) * block.place.count
        numbers = first[:, None] + extent.at + np.arange(extent.count)
        readers = Readers(stack, [watch] * extent.count)
        yield ScoredRows(readers, positions, numbers, block.all, extent.landing, block)
