"""Calls on keys and tenants, and on the deliveries, secrets and receivers of webhooks."""

from __future__ import annotations

from collections.abc import Sequence

from ...schemas.access.audit import AuditPage
from ...schemas.access.keys import (
    DEFAULT_TENANT,
    CreatedKey,
    KeyId,
    KeyList,
    KeyRequest,
    KeyView,
    Limits,
    TenantList,
    TenantName,
    TenantView,
)
from ...schemas.access.webhooks import (
    DeliveryPage,
    DeliveryState,
    RotateRequest,
    SecretList,
    WebhookDelivery,
)
from ..notebook import Listing
from . import wire
from .calls import Calls, M, call
from .wire import HttpCall, JobLike

_KEYS = "/v1/keys"
_TENANTS = "/v1/tenants"
_DELIVERIES = "/v1/webhooks/deliveries"
_SECRETS = "/v1/webhooks/secrets"
_DAY_S = 24 * 3600.0


def key_request(
    name: str, tenant: str, scopes: str | Sequence[str], expires_in: float | str | None
) -> KeyRequest:
    """Build the body of `POST /v1/keys`. Raises MidstreamError that names an invalid field."""
    return wire.checked(
        {"name": name, "tenant": tenant, "scopes": scopes, "expires_in": expires_in}, KeyRequest
    )


def _tenant(name: str) -> str:
    return f"{_TENANTS}/{wire.checked(name, TenantName, 'tenant')}"


class Keys(Calls[M]):
    """API keys (docs/keys.md); the calls require the scope `admin`."""

    @call
    async def create(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: str | Sequence[str] = ("submit", "read"),
        expires_in: float | str | None = None,
    ) -> CreatedKey:
        """Create a key; its secret is returned only here.

        `expires_in`: seconds, or a text such as `90d` or `12h`.
        """
        body = key_request(name, tenant, scopes, expires_in)
        return await self._ask(HttpCall("POST", _KEYS, body=body), CreatedKey)

    @call
    async def list(self) -> Listing[KeyView]:
        """Return all keys, without their secrets."""
        return Listing((await self._get(_KEYS, KeyList)).keys)

    @call
    async def delete(self, key_id: str) -> None:
        """Revoke a key: every process rejects it within five seconds. Raises `not_found`."""
        await self._do(HttpCall("DELETE", f"{_KEYS}/{wire.checked(key_id, KeyId, 'id')}"))


class Tenants(Calls[M]):
    """Tenants (docs/keys.md#tenants); the calls require the scope `admin`, except `get()`."""

    @call
    async def list(self) -> Listing[TenantView]:
        """Return all tenants, with the limits in effect and their usage."""
        return Listing((await self._get(_TENANTS, TenantList)).tenants)

    @call
    async def get(self, name: str | None = None) -> TenantView:
        """Return the limits in effect and the usage of a tenant, by default the key's own."""
        return await self._get("/v1/tenant" if name is None else _tenant(name), TenantView)

    @call
    async def put(self, name: str, limits: Limits) -> TenantView:
        """Set a tenant's limits. A limit of None: the service's setting; 0: no limit."""
        return await self._ask(HttpCall("PUT", _tenant(name), limits), TenantView)


class Changes(Calls[M]):
    """The audit log (docs/keys.md#audit-log); the call requires the scope `admin`."""

    @call
    async def list(self, *, limit: int | None = None, cursor: str | None = None) -> AuditPage:
        """Return one page of changes, newest first: who changed what, before and after. Its `next`
        is the next `cursor`.
        """
        return await self._get("/v1/audit", AuditPage, limit=limit, cursor=cursor)


class Webhooks(Calls[M]):
    """Webhooks that were sent (docs/webhooks.md). An admin may name a `tenant`; without it, an
    admin sees those of all tenants.
    """

    @call
    async def list(
        self,
        *,
        job: JobLike | None = None,
        state: DeliveryState | None = None,
        tenant: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryPage:
        """Return one page of webhooks with their attempts, newest first; its `next` is the next
        `cursor`.
        """
        of = None if job is None else wire.id_of(job)
        query = {"job": of, "state": state, "tenant": tenant, "limit": limit, "cursor": cursor}
        return await self._get(_DELIVERIES, DeliveryPage, **query)

    @call
    async def get(self, delivery_id: str) -> WebhookDelivery:
        """Return one webhook and its attempts. `delivery_id`: its `webhook-id`.

        Raises `not_found`, also if the record has expired.
        """
        return await self._get(wire.path("webhooks", "deliveries", delivery_id), WebhookDelivery)

    @call
    async def redeliver(self, delivery_id: str) -> WebhookDelivery:
        """Send a webhook again under the same id; if it is waiting for its next attempt, send it
        immediately.
        """
        path = wire.path("webhooks", "deliveries", delivery_id, "redeliver")
        return await self._ask(HttpCall("POST", path), WebhookDelivery)


class Secrets(Calls[M]):
    """Secrets that sign webhooks (docs/webhooks.md#secrets)."""

    @call
    async def list(self) -> SecretList:
        """Return the secrets that sign webhooks about jobs of this key, newest first; create one if
        there is none.
        """
        return await self._get(_SECRETS, SecretList)

    @call
    async def create(self, *, keep_former_s: float | str = _DAY_S, own: bool = False) -> SecretList:
        """Create a secret. The previous one also signs for `keep_former_s` more: seconds, or a text
        such as `12h`.

        `own`: the secret is for webhooks about this key's jobs only.
        """
        body = wire.checked({"keep_former_s": keep_former_s, "own": own}, RotateRequest)
        return await self._ask(HttpCall("POST", _SECRETS, body=body), SecretList)
