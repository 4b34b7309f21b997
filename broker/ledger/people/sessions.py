"""Logins to the web page: `ms:key-session:{name}` → packed `Session`, where `name` is the SHA-256
of the id that the browser has. `ms:key-sessions:{key}` has the names of a key's sessions, by the
time at which they end.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ....schemas.access.keys import StoredKey
from ....schemas.access.sessions import MAX_SESSIONS, SESSION_S, Session
from ....schemas.base.errors import MidstreamError
from ....schemas.base.records import from_msgpack, now, to_msgpack
from ..jobs.ledger import LedgerPart, reachable

SESSION = "ms:key-session:"
SESSIONS = "ms:key-sessions:"
ID_BYTES = 32
_ID = re.compile(r"[0-9a-f]{64}")


class NewSession(NamedTuple):
    id: str  # only the browser keeps it
    session: Session


def name_of(session_id: str) -> str | None:
    """Return the name under which a session is stored; None if it is not formatted like an id."""
    return hashlib.sha256(session_id.encode()).hexdigest() if _ID.fullmatch(session_id) else None


class Sessions(LedgerPart):
    """Sessions in the ledger's Redis.

    All calls raise MidstreamError("unavailable") while it is unreachable.
    """

    @reachable
    async def create(self, key: StoredKey) -> NewSession:
        """Create a session of `key`, which ends with the key. Raises `too_many_sessions`."""
        at = now()
        expires = min(at + SESSION_S, key.expires or at + SESSION_S)
        session = Session(
            key=key.id,
            sha256=key.sha256,
            csrf=secrets.token_hex(ID_BYTES),
            created=at,
            expires=expires,
        )
        session_id = secrets.token_hex(ID_BYTES)
        name = name_of(session_id)
        names = f"{SESSIONS}{key.id}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zremrangebyscore(names, "-inf", at).zadd(names, {name: expires}).zcard(
                names
            ).expire(names, SESSION_S)
            _, _, count, _ = await pipe.execute()
        if count > MAX_SESSIONS:
            await self._redis.zrem(names, name)
            raise MidstreamError(
                "too_many_sessions",
                f"sessions of this key: {MAX_SESSIONS}, the most that it may have at a time",
                hint="log out elsewhere, wait for a session to end, or use another key",
            )
        await self._redis.set(
            f"{SESSION}{name}", to_msgpack(session), px=max(1, int((expires - at) * 1000))
        )
        return NewSession(session_id, session)

    @reachable
    async def get(self, name: str) -> Session | None:
        """Return the session; None if it has ended, or if another version wrote it: its user logs
        in again.
        """
        raw = await self._redis.get(f"{SESSION}{name}")
        try:
            session = None if raw is None else from_msgpack(raw, Session)
        except msgspec.DecodeError:
            return None
        return None if session is None or session.expires <= now() else session

    @reachable
    async def valid(self, names: Iterable[str]) -> set[str]:
        """Return the names whose sessions have not ended; one round trip."""
        ordered = list(names)
        result = await self._redis.mget([f"{SESSION}{name}" for name in ordered]) if ordered else []
        return {name for name, raw in zip(ordered, result, strict=True) if raw is not None}

    @reachable
    async def end(self, name: str, key_id: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.delete(f"{SESSION}{name}").zrem(f"{SESSIONS}{key_id}", name).execute()
