"""The keys of open calls. Held responses and event streams end when their key is revoked or
expires, or when their user logs out.

All keys and sessions with open calls are checked together every `KNOWN_S`, however many calls there
are; nothing is checked while none is open.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ...broker.ledger.people.keys import LedgerKeys
from ...broker.ledger.people.sessions import Sessions
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from .auth import HOW, KNOWN_S

log = logging.getLogger("midstream.api")


class HeldKey:
    """The key of an open call: `lost` is done once it is revoked or expires; None: no key, or one
    that cannot be revoked.
    """

    def __init__(self, lost: asyncio.Future[None] | None = None) -> None:
        self.lost = lost

    @property
    def ends(self) -> tuple[asyncio.Future[None], ...]:
        """Futures to wait for in addition to the call's own."""
        return () if self.lost is None else (self.lost,)

    def check(self) -> None:
        """Raises `unauthorized` if the key is lost."""
        if self.lost is not None and self.lost.done():
            raise MidstreamError(
                "unauthorized",
                (
                    "the key was revoked or expired, or its user has logged out, while the "
                    "response was in progress"
                ),
                field="Authorization",
                hint=HOW,
            )


ALWAYS = HeldKey()


class KeyWatch:
    """Watches the keys of all open calls of a process.

    Belongs to one event loop. `always`: ids of the keys that cannot be revoked.
    """

    def __init__(
        self, stored: LedgerKeys, sessions: Sessions, always: Collection[str] = ()
    ) -> None:
        self._stored = stored
        self._sessions = sessions
        self._always = always
        # by (key, session); an empty one cannot end
        self._held: dict[tuple[str, str], set[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, caller: Caller) -> Iterator[HeldKey]:
        """Watch the caller's key for the length of the block.

        The response must end when the key is revoked or expires: poll the `HeldKey`, or wait
        for it.
        """
        held_by = ("" if caller.key in self._always else caller.key, caller.session)
        if held_by == ("", ""):
            yield ALWAYS
            return
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.setdefault(held_by, set()).add(lost)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="midstream-key-watch")
        try:
            yield HeldKey(lost)
        finally:
            held = self._held[held_by]
            held.discard(lost)
            if not held:
                del self._held[held_by]

    def end(self, session: str) -> None:
        """End the calls of a session whose user has logged out here."""
        for held_by in [held_by for held_by in self._held if held_by[1] == session]:
            self._lose(held_by)

    def _lose(self, held_by: tuple[str, str]) -> None:
        for lost in self._held.get(held_by, ()):
            if not lost.done():
                lost.set_result(None)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        """Check the held keys until no call is open."""
        while True:
            await asyncio.sleep(KNOWN_S)
            watched = set(self._held)
            if not watched:
                return
            try:
                keys = await self._stored.valid({key for key, _ in watched if key})
                sessions = await self._sessions.valid(
                    {session for _, session in watched if session}
                )
            except MidstreamError as error:
                # while Redis is unreachable, no key can be revoked either
                log.debug(
                    "cannot check the keys of held calls (count: %d); will retry: %s",
                    len(watched),
                    error,
                )
                continue
            for held_by in watched:
                if (held_by[0] and held_by[0] not in keys) or (
                    held_by[1] and held_by[1] not in sessions
                ):
                    self._lose(held_by)
