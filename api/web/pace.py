"""The pace at which the event loop reads large bodies and hands them to the twin.

A small call takes some ten turns of the loop. Without a pace, each turn would also handle a piece
of every large body that is under way, a millisecond for two of them, and the small call would take
several times as long as alone.
"""

import asyncio
import time

#: Bytes that are handled in a second, of all large bodies together: a piece that uvicorn reads,
#: 250 KiB, takes 0.3 ms of 2. The twin, which handles them next, decodes at most half as many.
BYTES_PER_S = 128 << 20


class Pace:
    """What large bodies wait for, in the order in which they ask."""

    def __init__(self) -> None:
        self._free = 0.0  # when the next piece may be handled (monotonic)

    async def wait(self, size: int) -> None:
        """Wait until the next `size` bytes of a large body may be handled."""
        now = time.monotonic()
        at = max(now, self._free)
        self._free = at + size / BYTES_PER_S
        if at > now:
            await asyncio.sleep(at - now)


#: The pace of this process.
PACE = Pace()
