"""Relative sizes of the edits of live requests at the sites of one bank: four bytes for each edit,
in blocks of positions in the arena, until the request is over.

A position that is computed again has its sizes written again, even if nothing edits it this time,
so rows of rejected drafts and of steps after a late end do not count. The process that writes files
counts them.

A step is recorded as a whole, for all requests at once: the model's thread does this between two
steps, so its cost must not grow with the number of requests.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ....schemas.base.records import to_msgpack
from ..files.edit_sizes import SPAN, RecordedSizes
from ..hooks.sites import RankSite
from .arena import Arena, BankRows
from .finite_check import StepSizes

_OF = ("first", "stop", "ahead", "reached", "beyond", "site")
#: Of a slot in `SizeTable._of`: no edit of the last step exceeded its limit.
_NONE = sys.maxsize


@dataclass(eq=False)
class RequestSizes:
    """The sizes of one request in one bank."""

    _table: "SizeTable"
    slot: int  # of the request; 0: its sizes are out of the table
    too_large: str = ""  # the first edit that exceeded its limit, by position and site
    _last: tuple[int, int, float] = (_NONE, 0, 0.0)  # see `exceed`, of its last step
    # number → the block's place in the arena, and its memory
    blocks: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)

    @property
    def recorded(self) -> RecordedSizes:
        """Return where the sizes are."""
        places = [(number, start) for number, (start, _) in sorted(self.blocks.items())]
        return RecordedSizes(self._table.names, places)

    def leave(self) -> None:
        """Leave the table."""
        if self.slot:
            self._last = self._table.leave(self.slot)
            self.slot = 0

    def close(self, stop: int) -> None:
        """Leave the table; no position from `stop` on counts."""
        self.leave()
        if self._last[0] < stop:
            self.exceed(*self._last)

    def exceed(self, position: int, number: int, size: float) -> None:
        """Keep that the edit at this position and site exceeded its limit."""
        site = self._table.sites[number]
        self.too_large = self.too_large or (
            f"the edit at {site.hook} of layer {site.layer}, position {position} is "
            f"{size:.4g} times as long as its row: more than its limit"
        )


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
        self._requests: dict[int, RequestSizes] = {}  # by slot
        # by slot: whether a request here has it; positions of the block that the request is in, and
        # how far the numbers of its rows are from the positions; the first position without sizes;
        # of the first edit that exceeded its limit in the request's last step, the position, the
        # site and the size
        numbers = [(name, np.int64) for name in _OF]
        self._of = np.zeros(1, [("used", np.bool_), *numbers, ("size", np.float32)])

    def has(self, slots: np.ndarray) -> np.ndarray:
        """Return whether the requests of these slots are in the table, bool."""
        more = int(slots.max(initial=0)) + 1 - len(self._of)
        if more > 0:
            self._of = np.append(self._of, np.zeros(more, self._of.dtype))
        found: np.ndarray = self._of["used"][slots]
        return found

    def begin(self, slot: int) -> RequestSizes:
        """Return the sizes of another request, of which `has` was asked."""
        self._of[slot] = (True, 0, 0, 0, 0, _NONE, 0, 0)
        made = self._requests[slot] = RequestSizes(self, slot)
        return made

    def add(self, step: StepSizes, slots: np.ndarray, places: np.ndarray) -> bool:
        """Record the sizes of a step. `slots`: of its requests with sizes; `places`: their numbers
        in the step.

        Returns whether edits of earlier steps exceeded their limits. Raises HostMemoryError.
        """
        view = step.view
        counts = view.counts[places]
        firsts = view.positions[places]
        waits = bool((self._of["beyond"][slots] < _NONE).any())
        exceeded = waits and self._accept(slots, firsts)
        member = np.repeat(np.arange(len(counts)), counts)  # of each row
        within = np.arange(len(member)) - (np.cumsum(counts) - counts)[member]
        columns = (np.cumsum(view.counts) - view.counts)[places][member] + within
        slot = slots[member]
        positions = firsts[member] + within
        values = np.full((len(slot), len(self.sites)), np.nan, dtype=np.float32)
        values[:, step.sites] = step.values[:, columns].T
        # a row without edits matters where the request had one before
        matters = (positions < self._of["reached"][slot]) | ~np.isnan(values).all(axis=1)
        if not matters.all():
            slot = slot[matters]
            positions = positions[matters]
            values = values[matters]
        of = self._of[slot]
        rows = of["ahead"] + positions
        outside = (positions < of["first"]) | (positions >= of["stop"])
        if outside.any():
            rows[outside] = self._rows_of(slot[outside], positions[outside])
        self._all[rows] = values
        # positions ascend, so that the last one of each request is kept
        self._of["reached"][slot] = np.maximum(of["reached"], positions + 1)
        beyond = np.flatnonzero((values < 0).any(axis=1))
        found, first = np.unique(slot[beyond], return_index=True)  # the first one of each request
        row = beyond[first]
        site = (values[row] < 0).argmax(axis=1)
        self._of["beyond"][found] = positions[row]
        self._of["site"][found] = site
        self._of["size"][found] = -values[row, site]
        return exceeded

    def leave(self, slot: int) -> tuple[int, int, float]:
        """Forget a request. Return the first edit of its last step that exceeded its limit, see
        `RequestSizes.exceed`; its position is `sys.maxsize` if there was none.
        """
        del self._requests[slot]
        *_, position, number, size = self._of[slot].item()
        self._of[slot] = 0
        return position, number, size

    def _accept(self, slots: np.ndarray, stops: np.ndarray) -> bool:
        """Know that of the requests' last steps the positions below `stops` count, and no others;
        return whether edits there exceeded their limits.
        """
        exceeded = slots[self._of["beyond"][slots] < stops]
        for slot in exceeded.tolist():  # their requests fail
            *_, position, number, size = self._of[slot].item()
            self._requests[slot].exceed(position, number, size)
        self._of["beyond"][slots] = _NONE
        return bool(len(exceeded))

    def _rows_of(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the number of each position's row; make the blocks that are missing."""
        blocks = np.stack([slots, positions // SPAN])
        starts = np.flatnonzero(np.append(True, np.diff(blocks).any(axis=0)))
        ahead = [self._enter(slot, number) for slot, number in blocks[:, starts].T.tolist()]
        rows: np.ndarray = positions + np.repeat(ahead, np.diff(starts, append=len(slots)))
        return rows

    def _enter(self, slot: int, number: int) -> int:
        """Have a request be in this block; return how far rows are from positions there."""
        blocks = self._requests[slot].blocks
        if number not in blocks:
            start, memory = self._memory.take(SPAN * self._memory.row_bytes)
            memory.view(np.float32)[:] = np.nan
            blocks[number] = start, memory
        first = number * SPAN
        ahead = blocks[number][0] // self._memory.row_bytes - first
        place = self._of[slot]
        place["first"] = first
        place["stop"] = first + SPAN
        place["ahead"] = ahead
        return ahead
