"""Calls on webhook deliveries, secrets and receivers, of both clients."""

from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import quote

import httpx

from ...schemas.webhooks import Delivery, DeliveryPage, DeliveryState, DisabledEndpoint, DisabledList, RotateRequest, SecretList
from . import wire
from .wire import Call

_DELIVERIES, _SECRETS, _DISABLED = "/v1/webhooks/deliveries", "/v1/webhooks/secrets", "/v1/webhooks/disabled"
_DAY_S = 24 * 3600.0


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _one(method: str, delivery_id: str, *rest: str) -> Call:
    return Call(method, "/".join([_DELIVERIES, quote(delivery_id, safe=""), *rest]))


def _rotation(keep_former_s: float | str, own: bool) -> Call:
    return Call("POST", _SECRETS, body=wire.checked({"keep_former_s": keep_former_s, "own": own}, RotateRequest))


class WebhookCalls(ABC):
    """Webhook calls of the blocking client. `tenant` is for admins, who see all deliveries without it."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def deliveries(
        self,
        *,
        job: str | None = None,
        state: DeliveryState | None = None,
        tenant: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryPage:
        """One page of webhooks and their attempts, newest first; `next` of the page is the next `cursor`."""
        params = _given(job=job, state=state, tenant=tenant, limit=limit, cursor=cursor)
        return wire.decode(self._send(Call("GET", _DELIVERIES, params=params)), DeliveryPage)

    def delivery(self, delivery_id: str) -> Delivery:
        """`delivery_id`: the `webhook-id`. Raises `not_found`, also after the record has expired."""
        return wire.decode(self._send(_one("GET", delivery_id)), Delivery)

    def redeliver(self, delivery_id: str) -> Delivery:
        """Send it again under its id, or now if it waits. Raises `conflict` while its receiver is disabled."""
        return wire.decode(self._send(_one("POST", delivery_id, "redeliver")), Delivery)

    def webhook_secrets(self) -> SecretList:
        """The secrets that sign webhooks about jobs of this key, newest first; created if there are none."""
        return wire.decode(self._send(Call("GET", _SECRETS)), SecretList)

    def rotate_webhook_secret(self, *, keep_former_s: float | str = _DAY_S, own: bool = False) -> SecretList:
        """A new secret; the previous one also signs for `keep_former_s`: seconds, or `12h`. `own`: for this key only, from now on."""
        return wire.decode(self._send(_rotation(keep_former_s, own)), SecretList)

    def disabled_webhooks(self, *, tenant: str | None = None) -> list[DisabledEndpoint]:
        """Receivers that responded with 410."""
        return wire.decode(self._send(Call("GET", _DISABLED, params=_given(tenant=tenant))), DisabledList).endpoints

    def enable_webhooks(self, url: str, *, tenant: str | None = None) -> None:
        """Send to this receiver again. Raises `not_found` when it is not disabled."""
        wire.raise_problem(self._send(Call("DELETE", _DISABLED, params=_given(url=url, tenant=tenant))))


class AsyncWebhookCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def deliveries(
        self,
        *,
        job: str | None = None,
        state: DeliveryState | None = None,
        tenant: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryPage:
        params = _given(job=job, state=state, tenant=tenant, limit=limit, cursor=cursor)
        return wire.decode(await self._send(Call("GET", _DELIVERIES, params=params)), DeliveryPage)

    async def delivery(self, delivery_id: str) -> Delivery:
        return wire.decode(await self._send(_one("GET", delivery_id)), Delivery)

    async def redeliver(self, delivery_id: str) -> Delivery:
        return wire.decode(await self._send(_one("POST", delivery_id, "redeliver")), Delivery)

    async def webhook_secrets(self) -> SecretList:
        return wire.decode(await self._send(Call("GET", _SECRETS)), SecretList)

    async def rotate_webhook_secret(self, *, keep_former_s: float | str = _DAY_S, own: bool = False) -> SecretList:
        return wire.decode(await self._send(_rotation(keep_former_s, own)), SecretList)

    async def disabled_webhooks(self, *, tenant: str | None = None) -> list[DisabledEndpoint]:
        return wire.decode(await self._send(Call("GET", _DISABLED, params=_given(tenant=tenant))), DisabledList).endpoints

    async def enable_webhooks(self, url: str, *, tenant: str | None = None) -> None:
        wire.raise_problem(await self._send(Call("DELETE", _DISABLED, params=_given(url=url, tenant=tenant))))
