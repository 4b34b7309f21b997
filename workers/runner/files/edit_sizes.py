"""The sizes of an ended request's edits, for its receipt."""

import zlib
from typing import NamedTuple

import numpy as np

from ....schemas.base.edit_sizes import EditSizes
from ....schemas.base.records import Wire, from_msgpack

#: Positions of a block.
SPAN = 128


class RecordedSizes(Wire):
    """The sizes of one request in one bank, where its rank recorded them."""

    sites: bytes  # MessagePack of each site of the bank, (hook, layer)
    # each block's number and its place in the shared memory, where it has float32 `[SPAN, sites]`:
    # NaN where nothing was edited, negative beyond a limit
    blocks: list[tuple[int, int]]

    def counted(self, memory: np.ndarray, stop: int) -> "CountedSizes":
        """Count the sizes at positions below `stop`. `memory`: the shared memory, uint8."""
        sites = from_msgpack(self.sites, list[tuple[str, int]])
        size = SPAN * len(sites) * np.dtype(np.float32).itemsize
        parts = [
            memory[start : start + size].view(np.float32).reshape(SPAN, -1)[: stop - number * SPAN]
            for number, start in self.blocks
            if number * SPAN < stop
        ]
        none = np.zeros((0, len(sites)), dtype=np.float32)
        values = np.sort(np.abs(np.concatenate([none, *parts])), axis=0)
        rows = np.count_nonzero(~np.isnan(values), axis=0)  # NaN is sorted last
        places = np.flatnonzero(rows)
        rows = rows[places]
        values = values[:, places]
        middle, largest = (
            np.take_along_axis(values, numbers, axis=0)
            for numbers in (np.stack([(rows - 1) // 2, rows // 2]), rows[None] - 1)
        )
        return CountedSizes(
            [sites[place] for place in places.tolist()],
            rows,
            middle.mean(axis=0, dtype=np.float64),
            largest[0],
        )


class CountedSizes(NamedTuple):
    """The sizes of one request in one bank, over all its edited rows."""

    sites: list[tuple[str, int]]  # (hook, layer) of each edited site
    rows: np.ndarray  # int64 `[sites]`
    medians: np.ndarray  # float64 `[sites]`
    largest: np.ndarray  # float32 `[sites]`

    def report(self, request: int) -> list[EditSizes]:
        """Return the report of each edited site. `request`: see `EditSizes`."""
        found = zip(self.sites, *(part.tolist() for part in self[1:]), strict=True)
        return [
            EditSizes(
                request=request, hook=hook, layer=layer, rows=rows, median=median, largest=largest
            )
            for (hook, layer), rows, median, largest in found
        ]

    def checksum(self, crc: int) -> int:
        """Continue a CRC32 with everything that was counted."""
        crc = zlib.crc32(str(self.sites).encode(), crc)
        for part in self[1:]:
            crc = zlib.crc32(part.tobytes(), crc)
        return crc
