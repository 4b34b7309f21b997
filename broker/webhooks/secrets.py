"""Signing secrets of webhooks: a tenant's own, created on first use, and for a while the previous
one; or those of a key.

They are stored in Redis unhashed, because the signer needs them.
"""

import base64
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from ...schemas.access.webhooks import Secret, SecretList
from ...schemas.base.records import now
from ..ledger.core.script_arguments import ARGUMENTS, pack
from ..ledger.jobs.ledger import Ledger, reachable
from .http import SECRET_PREFIX

SECRET_BYTES = 32


class WebhookSecrets:
    """Over a ledger. Belongs to the ledger's event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._redis: Any = ledger.redis
        self._script = ledger.redis.register_script(_source())

    async def of(self, tenant: str, key: str) -> SecretList:
        """Return what signs the webhooks of jobs submitted with `key` (empty: without one): newest
        first.

        Made now if there is none.
        """
        if key and await self._own(tenant, key):
            return SecretList(of="key", secrets=await self._turn(_owner(tenant, key), keep=True))
        return SecretList(of="tenant", secrets=await self._turn(tenant, keep=True))

    async def rotate(
        self, tenant: str, key: str, keep_former_s: float, own: bool = False
    ) -> SecretList:
        """A new secret; the previous one signs as well for `keep_former_s` (0: no more).

        One that was former before signs no more.

        `own`: for `key` alone, which then has secrets apart from its tenant's for good.
        """
        if key and (own or await self._own(tenant, key)):
            result = await self._turn(_owner(tenant, key), keep_former_s, heir_of=tenant)
            return SecretList(of="key", secrets=result)
        return SecretList(of="tenant", secrets=await self._turn(tenant, keep_former_s))

    @reachable
    async def _own(self, tenant: str, key: str) -> bool:
        return bool(await self._redis.exists(f"ms:hook-secret:{_owner(tenant, key)}"))

    @reachable
    async def _turn(
        self, owner: str, keep_former_s: float = 0.0, heir_of: str = "", keep: bool = False
    ) -> list[Secret]:
        at = now()
        fresh = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        result = await self._script(
            args=pack(
                at,
                owner=owner,
                secret=fresh,
                ends=repr(at + keep_former_s),
                heir_of=heir_of or None,
                keep=keep,
            )
        )
        known = [Secret(secret=result[0].decode(), created=float(result[1]))]
        if result[2] is not None and float(result[4]) > at:
            known.append(
                Secret(secret=result[2].decode(), created=float(result[3]), until=float(result[4]))
            )
        return known


def _owner(tenant: str, key: str) -> str:
    return f"{tenant}/{key}"


@cache
def _source() -> str:
    return ARGUMENTS.read_text() + (Path(__file__).parent / "lua" / "hooks_rotate.lua").read_text()
