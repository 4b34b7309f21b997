"""Overload policies for captured rows that arrive faster than they are written, by bytes waiting.

`block`: steps wait. `spill`: rows go to a file instead of memory. `drop`: they are not recorded, and the result reports it.
"""

import time
from collections.abc import Callable

#: How often a step that waits looks again.
_WAIT_S = 0.005


class Overload:
    """`limit`: bytes; `backlog`: those of finished captures that the writers still hold."""

    def __init__(self, policy: str, limit: int, backlog: Callable[[], int]) -> None:
        self._policy, self._limit, self._backlog = policy, limit, backlog

    def wait(self) -> None:
        """With `block`: hold the step while the writers are behind."""
        while self._policy == "block" and self._backlog() > self._limit:
            time.sleep(_WAIT_S)

    def drops(self) -> bool:
        """Whether to skip recording this step."""
        return self._policy == "drop" and self._backlog() > self._limit

    def spills(self) -> bool:
        """Whether to spill this step's rows to disk."""
        return self._policy == "spill" and self._backlog() > self._limit
