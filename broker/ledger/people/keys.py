"""API keys in `ms:keys`, id → packed `StoredKey` with a hash of the secret; the secret itself is
never stored.

A secret has 256 random bits, so its plain SHA-256 cannot be brute-forced, and is fast enough to
check on each request.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ....schemas.access.keys import (
    DEFAULT_TENANT,
    KEY_PREFIX,
    CreatedKey,
    KeyRequest,
    KeyView,
    Scope,
    StoredKey,
)
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.records import fields_of, from_msgpack, now, to_msgpack
from ....schemas.settings.settings import PREFIX, Settings, SettingsError
from ..jobs.ledger import ALPHABET, Ledger, LedgerPart, reachable, unreadable

KEYS = "ms:keys"
ID_LENGTH = 12
SECRET_BYTES = 32
#: Minimum length of a self-chosen secret (`admin_key`), and maximum length of any secret, in
#: characters.
SECRET_LENGTH = (32, 256)
_KEY = re.compile(
    rf"{KEY_PREFIX}([0-9a-z]{{{ID_LENGTH}}})_([A-Za-z0-9]{{{SECRET_LENGTH[0]},{SECRET_LENGTH[1]}}})"
)

# The method `LedgerKeys.list` hides the builtin inside the class.

#: Settings that are keys, and their scopes. Such a key is always valid.
OF_SETTINGS: dict[str, Scope] = {"admin_key": "admin", "observe_key": "observe"}


class PresentedKey(NamedTuple):
    """The parts of a key as presented by its user."""

    id: str
    sha256: str  # of its secret, hex


#: Compared with the presented key when its id is unknown, so that the check takes as long.
UNKNOWN = PresentedKey("", hashlib.sha256(secrets.token_bytes(SECRET_BYTES)).hexdigest())


def parse(text: str) -> PresentedKey | None:
    """Parse a key; None if the text is not formatted like one."""
    match = _KEY.fullmatch(text)
    return (
        None
        if match is None
        else PresentedKey(match[1], hashlib.sha256(match[2].encode()).hexdigest())
    )


def new_key() -> str:
    """Return a random key, `ms_<id>_<secret>`."""
    key_id = "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))
    return f"{KEY_PREFIX}{key_id}_{secrets.token_hex(SECRET_BYTES)}"


def of_settings(settings: Settings) -> dict[str, StoredKey]:
    """Return the keys of the settings, by id. Raises SettingsError naming the setting."""
    keys: dict[str, StoredKey] = {}
    for setting, scope in OF_SETTINGS.items():
        if not (text := getattr(settings, setting)):
            continue
        name = f"{PREFIX}{setting.upper()}"
        if (shown := parse(text)) is None:
            low, high = SECRET_LENGTH
            raise SettingsError(
                f"{name}: is not a key: {KEY_PREFIX}<{ID_LENGTH} lower-case letters or "
                f"digits>_<{low} to {high} letters or digits>; "
                "`midstream create admin-key` prints one"
            )
        if shown.id in keys:
            raise SettingsError(
                f"{name}: has the id of another setting's key: `midstream create admin-key` prints "
                "another one"
            )
        keys[shown.id] = StoredKey(
            id=shown.id,
            name=f"the setting {setting}",
            tenant=DEFAULT_TENANT,
            scopes=[scope],
            sha256=shown.sha256,
            created=0.0,
        )
    return keys


def is_right(shown: PresentedKey, key: StoredKey | None) -> bool:
    """Return whether `key` matches the presented one and has not expired.

    Constant time, even for a missing key.
    """
    same = hmac.compare_digest(shown.sha256, UNKNOWN.sha256 if key is None else key.sha256)
    return same and key is not None and not has_expired(key)


def has_expired(key: StoredKey) -> bool:
    return key.expires is not None and now() >= key.expires


def view_of(key: StoredKey) -> KeyView:
    return KeyView(**fields_of(key, KeyView))


class LedgerKeys(LedgerPart):
    """API keys in the ledger's Redis.

    All calls raise MidstreamError("unavailable") while it is unreachable.
    """

    @reachable
    async def create(self, request: KeyRequest) -> CreatedKey:
        """Create a key; only the return value contains its secret."""
        at = now()
        while True:
            text = new_key()
            shown = parse(text)
            assert shown is not None
            key = StoredKey(
                id=shown.id,
                name=request.name,
                tenant=request.tenant,
                scopes=list(dict.fromkeys(request.scopes)),
                sha256=shown.sha256,
                created=at,
                expires=None if request.expires_in is None else at + request.expires_in,
            )
            if await self._redis.hsetnx(KEYS, key.id, to_msgpack(key)):
                return CreatedKey(**fields_of(key, KeyView), key=text)

    @reachable
    async def get(self, key_id: str) -> StoredKey | None:
        raw = await self._redis.hget(KEYS, key_id)
        return None if raw is None else _decoded(raw)

    @reachable
    async def valid(self, key_ids: Iterable[str]) -> set[str]:
        """Return the ids whose keys exist and have not expired; one round trip."""
        ids = [*key_ids]
        result = await self._redis.hmget(KEYS, ids) if ids else []
        return {
            key_id
            for key_id, raw in zip(ids, result, strict=True)
            if raw is not None and _holds(raw)
        }

    @reachable
    async def list(self) -> Sequence[StoredKey]:
        """Return all keys, including expired ones; oldest first."""
        return sorted(
            map(_decoded, await self._redis.hvals(KEYS)), key=lambda key: (key.created, key.id)
        )

    @reachable
    async def revoke(self, key_id: str) -> None:
        """Revoke a key. Raises MidstreamError("not_found").

        API processes that have cached the key forget it within `api.web.auth.KNOWN_S` seconds.
        """
        if not await self._redis.hdel(KEYS, key_id):
            raise MidstreamError("not_found", f"unknown key {key_id!r}", field="id")

    @reachable
    async def any(self) -> bool:
        """Return whether any key exists."""
        return bool(await self._redis.hlen(KEYS))


async def any_key(settings: Settings) -> bool:
    """Return whether the Redis of the settings holds a key.

    Raises MidstreamError("unavailable").
    """
    ledger = Ledger.connect(settings)
    try:
        return await LedgerKeys(ledger).any()
    finally:
        await ledger.close()


def _holds(raw: bytes) -> bool:
    """Return whether the key is valid; False if it cannot be read, since such a key admits no
    request.
    """
    try:
        return not has_expired(_decoded(raw))
    except MidstreamError:
        return False


def _decoded(raw: bytes) -> StoredKey:
    with Translated(msgspec.ValidationError, lambda error: unreadable("a key was stored", error)):
        return from_msgpack(raw, StoredKey)
