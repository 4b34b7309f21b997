"""Relative sizes of the edits of live requests at the sites of one bank: four bytes for each edit,
in blocks of positions in the arena, until the request is over.

A position that is computed again has its sizes written again, so rows of rejected drafts and of
steps after a late end do not count. The process that writes files counts them.

A step is recorded as a whole, for all requests at once: the model's thread does this between two
steps, so its cost must not grow with the number of requests.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ....schemas.base import to_msgpack
from ..files.edit_sizes import SPAN, RecordedSizes
from ..hooks.sites import RankSite
from .arena import Arena, BankRows
from .finite_check import StepSizes


class RequestSizes:
    """The sizes of one request in one bank."""

    def __init__(self, table: "SizeTable", slot: int) -> None:
        """`slot`: of the request in the table."""
        self._table, self.slot = table, slot
        self.too_large = ""  # the first edit that exceeded its limit, by position and site
        # number → the block's place in the arena, and its memory
        self.blocks: dict[int, tuple[int, np.ndarray]] = {}
        # (position, site, size) of edits beyond their limits, which may be of rejected drafts
        self.beyond: list[tuple[int, int, float]] = []

    @property
    def recorded(self) -> RecordedSizes:
        """Where the sizes are."""
        places = [(number, start) for number, (start, _) in sorted(self.blocks.items())]
        return RecordedSizes(self._table.names, places)

    def close(self, stop: int) -> None:
        """Leave the table; no position from `stop` on counts."""
        if self.slot >= 0:
            self._table.close(self, stop)
            self.slot = -1

    def accept(self, stop: int) -> bool:
        """Know that positions below `stop` count, if they were computed; return whether edits there
        exceeded their limits.
        """
        counted = sorted(found for found in self.beyond if found[0] < stop)
        self.beyond = []
        for position, number, size in counted[:1]:
            site = self._table.sites[number]
            self.too_large = self.too_large or (
                f"the edit at {site.hook} of layer {site.layer}, position {position} is "
                f"{size:.4g} times as long as its row: more than its limit"
            )
        return bool(counted)


# Each size is kept (a thousandth of the KV cache), so that the median is exact. A histogram took
# ten times as long in a step, and counted rows that were computed before a stop string was found.
class SizeTable:
    """The sizes of all live requests in one bank."""

    def __init__(self, sites: Sequence[RankSite], arena: Arena) -> None:
        """`sites`: of the bank."""
        self.sites = sites
        self.names = to_msgpack([(site.hook, site.layer) for site in sites])
        self._memory = BankRows(arena, max(1, len(sites)), torch.float32)
        self._all = self._memory.all.numpy()
        self._requests: list[RequestSizes | None] = []  # by slot
        self._beyond: list[int] = []  # slots with edits beyond their limits
        # [slot]: positions of the block that the request is in, and how far the numbers of its rows
        # are from the positions
        self._first, self._stop, self._ahead = np.zeros((3, 0), dtype=np.int64)

    def begin(self) -> RequestSizes:
        """Return the sizes of another request."""
        if None not in self._requests:
            more = max(16, len(self._requests))
            self._requests += [None] * more
            self._first, self._stop, self._ahead = (
                np.append(part, np.zeros(more, dtype=np.int64))
                for part in (self._first, self._stop, self._ahead)
            )
        slot = self._requests.index(None)
        made = self._requests[slot] = RequestSizes(self, slot)
        return made

    def add(self, step: StepSizes, slots: np.ndarray, places: np.ndarray) -> bool:
        """Record the sizes of a step. `slots`: of its edited requests; `places`: their numbers in
        the step.

        Returns whether edits of earlier steps exceeded their limits. Raises HostMemoryError.
        """
        view = step.view
        counts, firsts = view.counts[places], view.positions[places]
        exceeded = False
        for place in np.flatnonzero(np.isin(slots, self._beyond)).tolist() if self._beyond else ():
            # the request goes on at the first position that was not accepted
            exceeded |= self._accept(int(slots[place]), int(firsts[place]))
        member = np.repeat(np.arange(len(counts)), counts)  # of each row
        within = np.arange(len(member)) - (np.cumsum(counts) - counts)[member]
        columns = (np.cumsum(view.counts) - view.counts)[places][member] + within
        of, positions = slots[member], firsts[member] + within
        rows = self._ahead[of] + positions
        if ((positions < self._first[of]) | (positions >= self._stop[of])).any():
            rows = self._rows_of(of, positions)
        values = np.full((len(rows), len(self.sites)), np.nan, dtype=np.float32)
        values[:, step.sites] = step.values[:, columns].T
        self._all[rows] = values
        for row, site in np.argwhere(values < 0).tolist() if (values < 0).any() else ():
            slot = int(of[row])
            self._of(slot).beyond.append((int(positions[row]), site, -float(values[row, site])))
            self._beyond.append(slot)
        return exceeded

    def close(self, sizes: RequestSizes, stop: int) -> None:
        """Forget a request, of which positions below `stop` count."""
        self._accept(sizes.slot, stop)
        self._requests[sizes.slot], self._stop[sizes.slot] = None, 0

    def _of(self, slot: int) -> RequestSizes:
        sizes = self._requests[slot]
        assert sizes is not None, "slots in use have a request"
        return sizes

    def _accept(self, slot: int, stop: int) -> bool:
        self._beyond = [other for other in self._beyond if other != slot]
        return self._of(slot).accept(stop)

    def _rows_of(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the number of each position's row; make the blocks that are missing."""
        blocks = np.stack([slots, positions // SPAN])
        starts = np.flatnonzero(np.append(True, np.diff(blocks).any(axis=0)))
        ahead = [self._enter(slot, number) for slot, number in blocks[:, starts].T.tolist()]
        return positions + np.repeat(ahead, np.diff(starts, append=len(slots)))

    def _enter(self, slot: int, number: int) -> int:
        """Have a request be in this block; return how far rows are from positions there."""
        blocks = self._of(slot).blocks
        if number not in blocks:
            start, memory = self._memory.take(SPAN * self._memory.row_bytes)
            memory.view(np.float32)[:] = np.nan
            blocks[number] = start, memory
        first = number * SPAN
        ahead = blocks[number][0] // self._memory.row_bytes - first
        self._first[slot], self._stop[slot], self._ahead[slot] = first, first + SPAN, ahead
        return ahead
