"""Ranges of numbers: the free ones of a memory, and the numbers of many at once."""

from bisect import bisect_left, insort

import numpy as np


def numbers_of(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the numbers of ranges, one range after the other, int64."""
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())


class FreeRanges:
    """The free ranges within one range, none of which touches the next. All calls take about the
    same time, however many there are.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self._stops = dict[int, int]()  # start → stop
        self._starts = dict[int, int]()  # stop → start
        self._sizes: list[tuple[int, int]] = []  # (size, start), ascending
        self._add(start, stop)

    def take(self, size: int, align: int = 1) -> int | None:
        """Take `size` numbers, from a multiple of `align` on, of one of the smallest ranges that
        have them; return the first one. None: no range has them.
        """
        # in the larger ones they fit wherever the range begins
        for needed in (size, size + align - 1):
            at = bisect_left(self._sizes, (needed, 0))
            if at == len(self._sizes):
                return None
            start = self._sizes[at][1]
            stop = self._stops[start]
            first = -(-start // align) * align
            if first + size <= stop:
                self._remove(start, stop)
                self._add(start, first)
                self._add(first + size, stop)
                return first
        return None

    def give(self, start: int, stop: int) -> None:
        """Return what was taken."""
        first = self._starts.get(start, start)
        last = self._stops.get(stop, stop)
        self._remove(first, start)
        self._remove(stop, last)
        self._add(first, last)

    def _add(self, start: int, stop: int) -> None:
        if start < stop:
            self._stops[start] = stop
            self._starts[stop] = start
            insort(self._sizes, (stop - start, start))

    def _remove(self, start: int, stop: int) -> None:
        if start < stop:
            del self._stops[start], self._starts[stop]
            del self._sizes[bisect_left(self._sizes, (stop - start, start))]
