"""Overload policies, for captured rows that arrive faster than they are written: what happens while
their backlog in bytes, in ended requests that wait for the writers, exceeds a limit.

`block`: steps wait, for a bounded time. `spill`: rows go to a file instead of memory. `drop`: rows
are not recorded, and the result reports it.
"""

import time
from collections.abc import Callable

#: Seconds between two checks of a waiting step.
_WAIT_S = 0.005
#: Seconds that a step waits at most: the other ranks of its stage, which are already in the
#: forward, give up after 300 s.
PATIENCE_S = 30.0


class Overload:
    """Applies a policy when `backlog()`, the bytes of rows that wait, exceeds `limit`."""

    def __init__(
        self,
        policy: str,
        limit: int,
        backlog: Callable[[], int],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._policy, self._limit, self._backlog, self._patience_s = (
            policy,
            limit,
            backlog,
            patience_s,
        )
        self.dropping = policy == "drop"
        self._gave_up = False

    @property
    def behind(self) -> bool:
        """Return whether a step gave up waiting and the backlog still exceeds the limit: then the
        worker admits no captures.
        """
        self._gave_up = self._gave_up and self._backlog() > self._limit
        return self._gave_up

    def wait(self) -> None:
        """With `block`, wait while the backlog exceeds the limit. Raises TimeoutError after
        `patience_s`.
        """
        start = time.monotonic()
        while self._policy == "block" and (waiting := self._backlog()) > self._limit:
            if time.monotonic() - start > self._patience_s:
                self._gave_up = True
                raise TimeoutError(
                    f"the writers did not catch up within {self._patience_s:g} s: {waiting >> 20} "
                    "MiB of captured rows wait; "
                    f"the limit is {self._limit >> 20} MiB (capture_queue_mib)"
                )
            time.sleep(_WAIT_S)

    def drops(self) -> bool:
        """Return whether to skip recording this step."""
        return self.dropping and self._backlog() > self._limit

    def spills(self) -> bool:
        """Return whether rows get their places on the disk."""
        return self._policy == "spill" and self._backlog() > self._limit
