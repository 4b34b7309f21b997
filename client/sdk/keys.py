"""Calls on keys and tenants, of both clients. All but `tenant` require scope admin."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import httpx

from ...schemas.keys import DEFAULT_TENANT, CreatedKey, KeyId, KeyList, KeyRequest, KeyView, Limits, TenantList, TenantName, TenantView
from . import wire
from .wire import Call

_KEYS, _TENANTS = "/v1/keys", "/v1/tenants"


def key_request(name: str, tenant: str, scopes: str | Sequence[str], expires_in: float | str | None) -> KeyRequest:
    """Raises MidstreamError naming what is wrong."""
    return wire.checked({"name": name, "tenant": tenant, "scopes": scopes, "expires_in": expires_in}, KeyRequest)


def _key(key_id: str) -> Call:
    return Call("DELETE", f"{_KEYS}/{wire.checked(key_id, KeyId, 'id')}")


def _tenant(method: str, name: str, limits: Limits | None = None) -> Call:
    return Call(method, f"{_TENANTS}/{wire.checked(name, TenantName, 'tenant')}", body=limits)


class KeyCalls(ABC):
    """Of the blocking client."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def create_key(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: str | Sequence[str] = ("submit", "read"),
        expires_in: float | str | None = None,
    ) -> CreatedKey:
        """A new key, which is shown here and never again. `expires_in`: seconds, or a text such as `90d` or `12h`."""
        body = key_request(name, tenant, scopes, expires_in)
        return wire.decode(self._send(Call("POST", _KEYS, body=body)), CreatedKey)

    def api_keys(self) -> list[KeyView]:
        return wire.decode(self._send(Call("GET", _KEYS)), KeyList).keys

    def revoke_key(self, key_id: str) -> None:
        """It is refused everywhere within five seconds. Raises `not_found`."""
        wire.raise_problem(self._send(_key(key_id)))

    def tenants(self) -> list[TenantView]:
        return wire.decode(self._send(Call("GET", _TENANTS)), TenantList).tenants

    def tenant(self, name: str | None = None) -> TenantView:
        """Limits as they hold and what is used; of the key's own tenant where no name is given."""
        return wire.decode(self._send(Call("GET", "/v1/tenant") if name is None else _tenant("GET", name)), TenantView)

    def set_tenant(self, name: str, limits: Limits) -> TenantView:
        """Set its limits; null takes the service's setting, 0 is no limit."""
        return wire.decode(self._send(_tenant("PUT", name, limits)), TenantView)


class AsyncKeyCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def create_key(
        self,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        scopes: str | Sequence[str] = ("submit", "read"),
        expires_in: float | str | None = None,
    ) -> CreatedKey:
        body = key_request(name, tenant, scopes, expires_in)
        return wire.decode(await self._send(Call("POST", _KEYS, body=body)), CreatedKey)

    async def api_keys(self) -> list[KeyView]:
        return wire.decode(await self._send(Call("GET", _KEYS)), KeyList).keys

    async def revoke_key(self, key_id: str) -> None:
        wire.raise_problem(await self._send(_key(key_id)))

    async def tenants(self) -> list[TenantView]:
        return wire.decode(await self._send(Call("GET", _TENANTS)), TenantList).tenants

    async def tenant(self, name: str | None = None) -> TenantView:
        return wire.decode(await self._send(Call("GET", "/v1/tenant") if name is None else _tenant("GET", name)), TenantView)

    async def set_tenant(self, name: str, limits: Limits) -> TenantView:
        return wire.decode(await self._send(_tenant("PUT", name, limits)), TenantView)
