"""Signing secrets of webhooks: a tenant's, created on first use, and for a while the previous one;
or those of an API key.

They are stored in Redis unhashed, because the signer needs them.
"""

import base64
import secrets

from midstream.broker.ledger.core.script_arguments import pack
from midstream.broker.ledger.jobs.ledger import Ledger, LedgerPart, reachable
from midstream.schemas.access.webhooks import Secret, SecretList
from midstream.schemas.base.records import now

from .http import SECRET_PREFIX
from .outbox import LUA, PARTS

SECRET_BYTES = 32


class WebhookSecrets(LedgerPart):
    """The secrets in a ledger's Redis. Belongs to the ledger's event loop."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._own = ledger.scripts_of(LUA, PARTS)

    async def of(self, tenant: str, key: str) -> SecretList:
        """Return the secrets that sign webhooks of jobs submitted with `key` (empty: without a
        key), newest first; one is created if there is none.
        """
        if key and await self._has_own(tenant, key):
            return SecretList(of="key", secrets=await self._rotate(_owner(tenant, key), keep=True))
        return SecretList(of="tenant", secrets=await self._rotate(tenant, keep=True))

    async def rotate(
        self, tenant: str, key: str, keep_former_s: float, own: bool = False
    ) -> SecretList:
        """Create a secret. The previous one also signs for another `keep_former_s` seconds (0: it
        stops immediately); the one before it stops signing.

        `own`: create it for `key` alone; from then on, the key has its own secrets instead of its
        tenant's.
        """
        if key and (own or await self._has_own(tenant, key)):
            result = await self._rotate(_owner(tenant, key), keep_former_s, inherit_from=tenant)
            return SecretList(of="key", secrets=result)
        return SecretList(of="tenant", secrets=await self._rotate(tenant, keep_former_s))

    @reachable
    async def _has_own(self, tenant: str, key: str) -> bool:
        return bool(await self._redis.exists(f"ms:hook-secret:{_owner(tenant, key)}"))

    @reachable
    async def _rotate(
        self, owner: str, keep_former_s: float = 0.0, inherit_from: str = "", keep: bool = False
    ) -> list[Secret]:
        at = now()
        fresh = SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
        result = await self._own.hooks_rotate(
            args=pack(
                at,
                owner=owner,
                secret=fresh,
                ends=repr(at + keep_former_s),
                inherit_from=inherit_from or None,
                keep=keep,
            )
        )
        signing = [Secret(secret=result[0].decode(), created=float(result[1]))]
        if result[2] is not None and float(result[4]) > at:
            signing.append(
                Secret(secret=result[2].decode(), created=float(result[3]), until=float(result[4]))
            )
        return signing


def _owner(tenant: str, key: str) -> str:
    return f"{tenant}/{key}"
