"""Notifies the ranks where requests end. Notices go to the engine core in batches, and to the ranks
with the engine's next step.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ...runner.base.engine_step import RequestEnd

#: Returns once the engine core has stored these ends.
Send = Callable[[list[RequestEnd]], Awaitable[None]]


@dataclass(eq=False)
class Ends:
    """One per engine. Ends within one turn of the event loop are one message."""

    _send: Send
    _due: list[RequestEnd] = field(default_factory=list)
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def notify(self, key: str, num_tokens: int) -> Awaitable[None]:
        """Send a notice, see `Requests.end`; it is sent whether or not the result is awaited.

        Await the result to continue only after the engine core has the notice.
        """
        self._due.append((key, num_tokens))
        if len(self._due) == 1:
            self._next = asyncio.ensure_future(self._flush())
            self._sending.add(self._next)
            self._next.add_done_callback(self._sending.discard)
        return asyncio.shield(self._next)

    async def _flush(self) -> None:
        due = self._due
        self._due = []
        await self._send(due)
