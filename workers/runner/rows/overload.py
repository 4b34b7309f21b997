"""Overload policies, for captured rows that arrive faster than the disk takes them: requests wait,
and fail after a time without progress, or rows go to a file, or are dropped.

`block`: the scheduler gives no tokens to requests that capture, see `vllm.ring_budget`, for a
bounded time. `spill`: rows go to a file instead of memory. `drop`: rows are not recorded, and the
result reports it.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ....schemas.requests.specs import WriterWork
from ..base.backlog import WORKS, Backlog

#: Seconds without progress after which the waiting captures fail.
PATIENCE_S = 30.0


@dataclass(eq=False)
class Overload:
    """Applies a policy while a rank's backlog of one kind of work exceeds `limit`. The scheduler
    has them for each rank, beside the rank's own.
    """

    _policy: str
    _limit: int
    _backlog: Backlog
    _work: WriterWork = "writer"
    # what was freed when the backlog last exceeded the limit, and since when nothing more is
    _freed: int = -1
    _since: float = 0.0
    _gave_up: bool = False

    @property
    def dropping(self) -> bool:
        """Return whether rows may be dropped."""
        return self._policy == "drop"

    @property
    def behind(self) -> bool:
        """Return whether, with `block`, the writers freed nothing for `PATIENCE_S` while the
        backlog exceeded the limit, and it still does: then captures fail, and the worker admits
        none.
        """
        now = time.monotonic()
        freed = self._backlog.freed(self._work)
        if self._size <= self._limit:
            self._gave_up = False
        elif freed != self._freed:
            self._freed = freed
            self._since = now
        elif now - self._since > PATIENCE_S:
            self._gave_up = self._policy == "block"
        return self._gave_up

    @property
    def room(self) -> int:
        """Return how many bytes of rows the next step may capture; negative: requests that capture
        wait. If the writers are behind, none waits: the ranks fail it.
        """
        if self._policy != "block" or self.behind:
            return sys.maxsize
        return self._limit - self._size

    def check(self) -> None:
        """Raise TimeoutError if the writers are behind. Every step calls it."""
        if self._backlog.waiting(self._work) <= self._limit:
            self._gave_up = False
        elif self.behind:
            raise TimeoutError(
                f"the writers did not catch up within {PATIENCE_S:g} s: "
                f"{self._size >> 20} MiB of captured rows wait; "
                f"the limit is {self._limit >> 20} MiB (tuning.capture_queue_mib)"
            )

    def drops(self) -> bool:
        """Return whether to skip recording this step."""
        return self.dropping and self._size > self._limit

    def spills(self) -> bool:
        """Return whether rows get their places on the disk."""
        return self._policy == "spill" and self._size > self._limit

    @property
    def _size(self) -> int:
        return self._backlog.waiting(self._work)


#: Of each kind of work: one that is slow, or whose store is away, stops and fails no other.
Overloads = Mapping[WriterWork, Overload]


def overloads(policy: str, limit: int, backlog: Backlog) -> Overloads:
    """Return those of a rank; each kind of work has `limit`."""
    return {work: Overload(policy, limit, backlog, work) for work in WORKS}
