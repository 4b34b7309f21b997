"""Table of rows for the positions of live requests."""

import threading
from collections import deque
from typing import Any

import numpy as np

#: Positions for which an owner has room at first; it grows by doubling.
_ROOM = 256
#: Slots are added in such numbers.
_SLOTS = 64


class PositionTable:
    """A slot for each owner, and a range of rows, one for each position. Whoever writes to it holds
    the lock.
    """

    def __init__(self, row: np.dtype[Any], nothing: tuple[Any, ...], fields: list[Any]) -> None:
        """`row`: what each row has, and `nothing` before it is written. `fields`: what each slot
        has, as in a structured dtype.
        """
        self.lock = threading.RLock()
        self.rows = np.zeros(0, row)
        #: By slot: its rows; the first position that was never written; `fields`.
        places = [("first", np.int64), ("room", np.int64), ("reached", np.int64)]
        self.of = np.zeros(0, places + fields)
        #: Slots of owners that are gone, in whichever thread.
        self.returned: deque[int] = deque()
        self._end = 0  # of all ranges
        self._nothing = np.array(nothing, row)

    def take(self, *values: Any) -> int:
        """Return a slot with these values of its fields. It has the range of the one before."""
        with self.lock:
            if not self.returned:
                self.returned.extend(range(len(self.of), len(self.of) + _SLOTS))
                self.of = np.append(self.of, np.zeros(_SLOTS, self.of.dtype))
            slot = self.returned.pop()
            first, room, reached, *_ = self.of[slot].item()
            self.rows[first : first + reached] = self._nothing  # later ones were never written
            self.of[slot] = (first, room, 0, *values)
            self.reserve(slot, _ROOM)
            return slot

    def reserve(self, slot: int, rows: int) -> None:
        """Have room for this many rows of a slot. Its earlier range, at most half as long, is used
        no more.
        """
        with self.lock:
            first, had, *_ = self.of[slot].item()
            if rows > had:
                to = self._end
                room = max(_ROOM, 1 << (rows - 1).bit_length())
                self._end += room
                if self._end > len(self.rows):
                    self.rows = np.append(self.rows, np.zeros(self._end, self.rows.dtype))
                self.rows[to : to + room] = self._nothing
                self.rows[to : to + had] = self.rows[first : first + had]
                self.of["first"][slot] = to
                self.of["room"][slot] = room

    def rows_of(self, slot: int) -> np.ndarray:
        """Return the rows of a slot's positions."""
        first, room, *_ = self.of[slot].item()
        return self.rows[first : first + room]
