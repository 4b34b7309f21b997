"""Notices of where requests end, sent to the engine core together; the ranks receive them with the
engine's next step.
"""

import asyncio
from collections.abc import Awaitable, Callable

#: Takes (`RankSpec.key`, number of tokens or -1) of each request; returns once the engine core has
#: stored them.
Send = Callable[[list[tuple[str, int]]], Awaitable[None]]


class Ends:
    """One per engine. What ends in one turn of the event loop is one message."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._due: list[tuple[str, int]] = []
        self._sending: set[asyncio.Task[None]] = set()

    def notify(self, key: str, num_tokens: int) -> Awaitable[None]:
        """See `DataPlane.end`.

        Await it where the notice must precede something; it is sent in any case.
        """
        self._due.append((key, num_tokens))
        if len(self._due) == 1:
            self._next = asyncio.ensure_future(self._flush())
            self._sending.add(self._next)
            self._next.add_done_callback(self._sending.discard)
        return asyncio.shield(self._next)

    async def _flush(self) -> None:
        due, self._due = self._due, []
        await self._send(due)
