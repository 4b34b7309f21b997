"""Key revocation during held responses and event streams, which can outlive the key they were opened with.

One check of all keys with open calls every `KNOWN_S`, however many calls there are; none while no call with a key is open.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...broker.ledger.keys import Keys
from ...schemas.errors import MidstreamError
from ...schemas.keys import Caller
from .auth import HOW, KNOWN_S

log = logging.getLogger("midstream.api")


class HeldKey:
    """One open call: `lost` is done once its key is revoked or expires; None: no key, or one that cannot be revoked."""

    def __init__(self, lost: asyncio.Future[None] | None = None) -> None:
        self.lost = lost

    @property
    def ends(self) -> tuple[asyncio.Future[None], ...]:
        """Futures to wait for in addition to the call's own."""
        return () if self.lost is None else (self.lost,)

    def check(self) -> None:
        """Raises `unauthorized`."""
        if self.lost is not None and self.lost.done():
            raise MidstreamError(
                "unauthorized", "the key was revoked or expired while the response was in progress", field="Authorization", allowed=HOW
            )


ALWAYS = HeldKey()


class KeyWatch:
    """All open calls of a process. Belongs to one event loop. `always`: id of the key that cannot be revoked."""

    def __init__(self, stored: Keys, always: str = "") -> None:
        self._stored = stored
        self._always = always
        self._held: dict[str, set[asyncio.Future[None]]] = {}  # by key
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, caller: Caller) -> Iterator[HeldKey]:
        """Whatever is answered inside ends when the caller's key is revoked, or expires: ask the `HeldKey`, or wait for it."""
        if caller.key in ("", self._always):
            yield ALWAYS
            return
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.setdefault(caller.key, set()).add(lost)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="midstream-stays")
        try:
            yield HeldKey(lost)
        finally:
            held = self._held[caller.key]
            held.discard(lost)
            if not held:
                del self._held[caller.key]

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        """Ends when no call is open."""
        while True:
            await asyncio.sleep(KNOWN_S)
            asked = set(self._held)
            if not asked:
                return
            try:
                valid = await self._stored.valid(asked)
            except MidstreamError as error:  # while Redis is unreachable, no key can be revoked either
                log.debug("cannot check the keys of held calls (count: %d); will retry: %s", len(asked), error)
                continue
            for key in asked - valid:
                for lost in self._held.get(key, ()):
                    if not lost.done():
                        lost.set_result(None)
