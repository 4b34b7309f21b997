"""Calls on keys and tenants. All but `tenant` require scope admin."""

from collections.abc import Sequence

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
from . import wire
from .calls import Calls, call
from .wire import Call

_KEYS, _TENANTS = "/v1/keys", "/v1/tenants"


def key_request(
    name: str, tenant: str, scopes: str | Sequence[str], expires_in: float | str | None
) -> KeyRequest:
    """Raises MidstreamError naming what is wrong."""
    return wire.checked(
        {"name": name, "tenant": tenant, "scopes": scopes, "expires_in": expires_in}, KeyRequest
    )


def _key(key_id: str) -> Call:
    return Call("DELETE", f"{_KEYS}/{wire.checked(key_id, KeyId, 'id')}")


def _tenant(method: str, name: str, limits: Limits | None = None) -> Call:
    return Call(method, f"{_TENANTS}/{wire.checked(name, TenantName, 'tenant')}", body=limits)


class KeyCalls(Calls):
    @call
    async def create_key(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: str | Sequence[str] = ("submit", "read"),
        expires_in: float | str | None = None,
    ) -> CreatedKey:
        """A new key, which is shown here and never again.

        `expires_in`: seconds, or a text such as `90d` or `12h`.
        """
        body = key_request(name, tenant, scopes, expires_in)
        return await self._ask(Call("POST", _KEYS, body=body), CreatedKey)

    @call
    async def api_keys(self) -> list[KeyView]:
        """All keys, without their secrets."""
        return (await self._ask(Call("GET", _KEYS), KeyList)).keys

    @call
    async def revoke_key(self, key_id: str) -> None:
        """It is refused everywhere within five seconds. Raises `not_found`."""
        await self._do(_key(key_id))

    @call
    async def tenants(self) -> list[TenantView]:
        """All tenants: limits as they hold and what is used."""
        return (await self._ask(Call("GET", _TENANTS), TenantList)).tenants

    @call
    async def tenant(self, name: str | None = None) -> TenantView:
        """Limits as they hold and what is used; of the key's own tenant where no name is given."""
        return await self._ask(
            Call("GET", "/v1/tenant") if name is None else _tenant("GET", name), TenantView
        )

    @call
    async def set_tenant(self, name: str, limits: Limits) -> TenantView:
        """Set its limits; null takes the service's setting, 0 is no limit."""
        return await self._ask(_tenant("PUT", name, limits), TenantView)
