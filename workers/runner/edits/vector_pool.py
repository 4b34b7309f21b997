"""Allocation of pool entries to configuration rows: a run of consecutive entries per site and
family; sites with the same content share a run.

A row's runs are one after the other, in the smallest gap with room for all of them. Only if there
is none, the entries of all rows are compacted, at once. Entry 0 stays zero.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.plan import Buffers
from ....schemas.requests.interventions import SCALARS
from ..base.host_memory import locked_copy
from ..base.ranges import FreeRanges, numbers_of

#: Vectors `[entries, hidden_size]`, scalars `[entries, SCALARS]`.
HeldVectors = tuple[torch.Tensor, torch.Tensor]
#: int64 `[runs, 4]`: site, family, first entry and number of entries of each. One object: Python's
#: garbage collector visits every one, and there are as many runs as requests times layers.
RunTable = np.ndarray
#: (site, family) → its vectors and scalars. An object that several sites share is stored once.
RowContent = Mapping[tuple[int, int], HeldVectors]


class JoinedRow(NamedTuple):
    """A row's content ready for upload: its distinct entries, concatenated.

    The tensors are on the CPU, and never change.
    """

    vectors: torch.Tensor  # [entries, hidden_size]
    scalars: torch.Tensor  # [entries, SCALARS]
    runs: RunTable  # the first entry counts from 0
    crc32: int  # of (site, family) and bytes of all content

    def fingerprint(self) -> int:
        """Return what `EntryPool.fingerprints` returns for this content once it is written."""
        return _fingerprint(self.runs.tolist(), self.vectors, self.scalars)

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return int(self.vectors.nbytes + self.scalars.nbytes)


def joined(content: RowContent, hidden_size: int, dtype: torch.dtype, *, pinned: bool) -> JoinedRow:
    """Concatenate a row's content. `hidden_size`, `dtype`: of the pool. `pinned`: into page-locked
    memory, so that uploads do not block.
    """
    # id of held tensors → these, their checksum, and the sites and families that share them
    shared: dict[int, tuple[HeldVectors, int, list[tuple[int, int]]]] = {}
    crc = 0
    for place, what in content.items():
        if id(what) not in shared:
            shared[id(what)] = what, crc32_of(*what), []
        shared[id(what)][2].append(place)
        crc = zlib.crc32(f"{place} {shared[id(what)][1]}".encode(), crc)
    held = [what for what, _, _ in shared.values()]
    if len(held) == 1:
        vectors, scalars = held[0]
    else:
        nothing = torch.empty(0, hidden_size, dtype=dtype), torch.empty(0, SCALARS)
        vectors, scalars = (torch.cat(item) for item in zip(nothing, *held, strict=True))
    if pinned:
        vectors = locked_copy(vectors)
        scalars = locked_copy(scalars)
    runs: list[tuple[int, int, int, int]] = []
    first = 0
    for (value, _), _, places in shared.values():
        runs += [(*place, first, len(value)) for place in places]
        first += len(value)
    return JoinedRow(vectors, scalars, np.array(runs, dtype=np.int64).reshape(-1, 4), crc)


# A table of vectors for each site and family would be nearly all zeros; a pool takes memory in
# proportion to the edits.
class EntryPool:
    """Owns `Buffers.pool`, `scalars` and `site_rows` of one rank.

    All writes are queued on the device after the work that is queued there already. Their number
    does not depend on the rows that are held.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._device = buffers.pool.device
        self._capacity = len(buffers.pool) - 1
        # by row: its runs, their first entry, and how many entries they have
        self._rows: dict[int, tuple[RunTable, int, int]] = {}
        self._free = FreeRanges(1, 1 + self._capacity)
        self.used = 0  # entries

    def write(self, row: int, content: JoinedRow) -> None:
        """Write a row's content into free entries.

        Raises RuntimeError, and changes nothing, when there are too few.
        """
        needed = len(content.vectors)
        if self.used + needed > self._capacity:
            raise RuntimeError(
                f"{needed} steering entries needed, {self._capacity - self.used} of "
                f"{self._capacity} free"
            )
        if (start := self._free.take(needed)) is None:
            self._close_gaps()
            start = self._free.take(needed) or 0
        self._buffers.pool[start : start + needed] = self._on_device(content.vectors)
        self._buffers.scalars[start : start + needed] = self._on_device(content.scalars)
        self._rows[row] = content.runs, start, needed
        self.used += needed
        self._write_places([row])

    def erase(self, row: int) -> None:
        """Free a row's entries and zero them."""
        _, start, entries = self._rows.pop(row)
        self._buffers.site_rows[:, :, row] = 0
        self._buffers.pool[start : start + entries] = 0
        self._buffers.scalars[start : start + entries] = 0
        self._free.give(start, start + entries)
        self.used -= entries

    def clear(self) -> None:
        """Zero everything, including entries that no row owns."""
        for buffer in (self._buffers.site_rows, self._buffers.pool, self._buffers.scalars):
            buffer.zero_()
        self._rows = {}
        self.used = 0
        self._free = FreeRanges(1, 1 + self._capacity)

    def fingerprints(self) -> dict[int, int]:
        """Return row in use → CRC32 of what its sites read on the device, wherever its entries are.

        Row 0 belongs to no request: its checksum covers row 0 and entry 0, which stay zero. Waits
        for the device.
        """
        buffers = self._buffers
        site_rows = buffers.site_rows.cpu()
        pool = buffers.pool.cpu()
        scalars = buffers.scalars.cpu()
        checksums = {0: crc32_of(site_rows[:, :, 0], pool[0], scalars[0])}
        for row, (runs, _, _) in self._rows.items():
            found = [
                [site, family, int(site_rows[site, family, row]), entries]
                for site, family, _, entries in runs.tolist()
            ]
            checksums[row] = _fingerprint(found, pool, scalars)
        return checksums

    def _close_gaps(self) -> None:
        """Compact the entries of all rows."""
        starts, sizes = np.array([place for _, *place in self._rows.values()]).T
        old = self._index(numbers_of(starts, sizes))
        pool = self._buffers.pool[old]
        scalars = self._buffers.scalars[old]  # copies
        for buffer, entries in ((self._buffers.pool, pool), (self._buffers.scalars, scalars)):
            buffer.zero_()
            buffer[1 : 1 + len(entries)] = entries
        moved = (1 + np.cumsum(sizes) - sizes).tolist()
        for (row, (runs, _, size)), start in zip(self._rows.items(), moved, strict=True):
            self._rows[row] = runs, start, size
        self._free = FreeRanges(1 + self.used, 1 + self._capacity)
        self._write_places([*self._rows])

    def _write_places(self, rows: Sequence[int]) -> None:
        """Write into `site_rows` where the rows' entries of each site begin."""
        held = [self._rows[row] for row in rows]
        counts = [len(runs) for runs, _, _ in held]
        starts = np.repeat([start for _, start, _ in held], counts)
        runs = np.concatenate([runs for runs, _, _ in held])
        index = np.stack([runs[:, 0], runs[:, 1], np.repeat(rows, counts), runs[:, 2] + starts])
        sites, families, of_rows, firsts = self._index(index)
        self._buffers.site_rows[sites, families, of_rows] = firsts.to(torch.int32)

    def _index(self, numbers: np.ndarray) -> torch.Tensor:
        return self._on_device(torch.from_numpy(numbers))

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the device, without waiting for the forward that runs there."""
        if values.device.type == self._device.type:
            return values
        return (values if values.is_pinned() else locked_copy(values)).to(
            self._device, non_blocking=True
        )


def _fingerprint(runs: list[list[int]], vectors: torch.Tensor, scalars: torch.Tensor) -> int:
    """Return the CRC32 of the entries in `runs`, by site and family."""
    crc = 0
    for site, family, first, entries in sorted(runs):
        crc = zlib.crc32(f"{site} {family}".encode(), crc)
        crc = crc32_of(vectors[first : first + entries], scalars[first : first + entries], crc=crc)
    return crc


def crc32_of(*tensors: torch.Tensor, crc: int = 0) -> int:
    """Return the CRC32 of the concatenated bytes of tensors on the CPU."""
    for tensor in tensors:
        # tensors of at most one element may have strides that a view as bytes rejects
        crc = zlib.crc32(torch.cat([tensor.reshape(-1)]).view(torch.uint8).numpy(), crc)
    return crc
