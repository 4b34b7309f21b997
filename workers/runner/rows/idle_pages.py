"""Memory of the arena that no rows are in: it is given back to the system after a while.

Not at once: to touch new pages takes longer than to copy rows to them, and requests that capture
much follow each other. In a thread of its own, because it takes a tenth of a second for 256 MiB,
and the model's thread returns much of the memory.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from ..base.shared_memory import PAGE, SharedMemory

#: Seconds after which memory without rows is given back.
REST_S = 5.0
#: Pages that are given back at a time: whoever takes memory waits for them.
_AT_ONCE = 64
_MADV_REMOVE = 9


class IdlePages:
    """The pages of a part of the memory."""

    def __init__(self, memory: SharedMemory, start: int, stop: int, rest_s: float = REST_S) -> None:
        self._memory = memory
        self._first = -(-start // PAGE)
        self._last = stop // PAGE
        self._rest_s = rest_s
        #: When the rows of a page were over, by `time.monotonic`; 0: it is in use, or given back.
        #: Of the pages up to the last one in which rows ever were.
        self._since = np.zeros(0)
        #: Ranges of pages without rows, and since when, that are not in the table yet: it may grow
        #: in another thread while a range is left, and a mark in the old one would be lost.
        self._gone = deque[tuple[int, int, float]]()
        self._lock = threading.Lock()
        self._left = queue.SimpleQueue[bool]()  # whether to go on
        threading.Thread(target=self._run, name="midstream-arena", daemon=True).start()

    def enter(self, start: int, stop: int) -> None:
        """Have rows in this range from now on."""
        first = max(start // PAGE - self._first, 0)
        last = min(-(-stop // PAGE), self._last) - self._first
        if first >= last:
            return
        with self._lock:
            if last > len(self._since):
                more = max(last, 2 * len(self._since)) - len(self._since)
                self._since = np.concatenate([self._since, np.zeros(more)])
            self._mark()
            self._since[first:last] = 0

    def leave(self, start: int, stop: int) -> None:
        """Have none in it. Called from any thread, also by garbage collection, before others may
        `enter` there; so no lock is taken.
        """
        first = max(-(-start // PAGE) - self._first, 0)
        last = min(stop // PAGE, self._last) - self._first
        if first < last:
            self._gone.append((first, last, time.monotonic()))
            self._left.put(True)

    def close(self) -> None:
        self._left.put(False)

    def _mark(self) -> None:
        """Enter in the table what was left; with the lock."""
        while self._gone:
            first, last, since = self._gone.popleft()
            self._since[first:last] = since

    def _run(self) -> None:
        while self._left.get():
            idle = True
            while idle:
                time.sleep(self._rest_s)
                while not self._left.empty():
                    if not self._left.get():
                        return
                idle = self._give_back(time.monotonic() - self._rest_s)

    def _give_back(self, before: float) -> bool:
        """Give back what has been idle since `before`; return whether more is idle."""
        with self._lock:
            self._mark()
        since = self._since
        idle = np.flatnonzero(since)
        for first, last in _runs(idle[since[idle] <= before]):
            with self._lock:
                if self._since[first:last].all():  # no rows have come meanwhile
                    self._memory.advise(
                        (self._first + first) * PAGE, (self._first + last) * PAGE, _MADV_REMOVE
                    )
                    self._since[first:last] = 0
        return bool(self._since.any())


def _runs(pages: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of pages that follow one another, each of `_AT_ONCE` at most."""
    for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
        for at in range(0, len(run), _AT_ONCE):
            part = run[at : at + _AT_ONCE]
            yield int(part[0]), int(part[-1]) + 1
