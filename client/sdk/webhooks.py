"""Calls on webhook deliveries, secrets and receivers."""

from urllib.parse import quote

from ...schemas.access.webhooks import (
    Delivery,
    DeliveryPage,
    DeliveryState,
    DisabledEndpoint,
    DisabledList,
    RotateRequest,
    SecretList,
)
from . import wire
from .calls import Calls, call
from .wire import Call

_DELIVERIES, _SECRETS, _DISABLED = (
    "/v1/webhooks/deliveries",
    "/v1/webhooks/secrets",
    "/v1/webhooks/disabled",
)
_DAY_S = 24 * 3600.0


def _one(method: str, delivery_id: str, *rest: str) -> Call:
    return Call(method, "/".join([_DELIVERIES, quote(delivery_id, safe=""), *rest]))


def _rotation(keep_former_s: float | str, own: bool) -> Call:
    return Call(
        "POST",
        _SECRETS,
        body=wire.checked({"keep_former_s": keep_former_s, "own": own}, RotateRequest),
    )


class WebhookCalls(Calls):
    """`tenant` is for admins, who see all deliveries without it."""

    @call
    async def deliveries(
        self,
        *,
        job: str | None = None,
        state: DeliveryState | None = None,
        tenant: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryPage:
        """One page of webhooks and their attempts, newest first; `next` of the page is the next
        `cursor`.
        """
        params = wire.given(job=job, state=state, tenant=tenant, limit=limit, cursor=cursor)
        return await self._ask(Call("GET", _DELIVERIES, params=params), DeliveryPage)

    @call
    async def delivery(self, delivery_id: str) -> Delivery:
        """`delivery_id`: the `webhook-id`.

        Raises `not_found`, also after the record has expired.
        """
        return await self._ask(_one("GET", delivery_id), Delivery)

    @call
    async def redeliver(self, delivery_id: str) -> Delivery:
        """Send it again under its id, or now if it waits.

        Raises `conflict` while its receiver is disabled.
        """
        return await self._ask(_one("POST", delivery_id, "redeliver"), Delivery)

    @call
    async def webhook_secrets(self) -> SecretList:
        """The secrets that sign webhooks about jobs of this key, newest first; created if there are
        none.
        """
        return await self._ask(Call("GET", _SECRETS), SecretList)

    @call
    async def rotate_webhook_secret(
        self, *, keep_former_s: float | str = _DAY_S, own: bool = False
    ) -> SecretList:
        """A new secret; the previous one also signs for `keep_former_s`: seconds, or `12h`.

        `own`: for this key only, from now on.
        """
        return await self._ask(_rotation(keep_former_s, own), SecretList)

    @call
    async def disabled_webhooks(self, *, tenant: str | None = None) -> list[DisabledEndpoint]:
        """Receivers that responded with 410."""
        return (
            await self._ask(Call("GET", _DISABLED, params=wire.given(tenant=tenant)), DisabledList)
        ).endpoints

    @call
    async def enable_webhooks(self, url: str, *, tenant: str | None = None) -> None:
        """Send to this receiver again. Raises `not_found` when it is not disabled."""
        await self._do(Call("DELETE", _DISABLED, params=wire.given(url=url, tenant=tenant)))
