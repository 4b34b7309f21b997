"""Routes of webhooks: deliveries, redelivery, signing secrets."""

from typing import Annotated, Any

from litestar import Response, get, post
from litestar.params import JSONBody, PathParameter, QueryParameter

from midstream.api.context import AppContext
from midstream.api.routes.jobs import ERRORS, PROBLEM, CursorParameter, PageSize, Whose
from midstream.api.web.audit import audited, nothing
from midstream.api.web.auth import needs, tenant_asked
from midstream.schemas.access.keys import Caller
from midstream.schemas.access.webhooks import (
    DeliveryPage,
    DeliveryState,
    RotateRequest,
    SecretList,
    WebhookDelivery,
)
from midstream.schemas.base.limits import MAX_NAME

from .outbox import WebhookOutbox, not_found
from .secrets import WebhookSecrets

DeliveryId = Annotated[
    str,
    PathParameter(
        max_length=MAX_NAME,
        description="The delivery's id: the `webhook-id` header of all its attempts",
    ),
]
WITH_BODY = {400: PROBLEM, 413: PROBLEM, 415: PROBLEM, 503: PROBLEM}
#: Keeps caches from storing secrets.
UNKEPT = {"Cache-Control": "no-store"}


@get(
    "/v1/webhooks/deliveries",
    opt=needs("read"),
    summary="List webhook deliveries, newest first",
    responses=ERRORS,
)
async def list_deliveries(
    context: AppContext,
    caller: Caller,
    job: Annotated[
        str | None,
        QueryParameter(max_length=MAX_NAME, description="Only deliveries about this job"),
    ] = None,
    delivery_state: Annotated[
        DeliveryState | None,
        QueryParameter(name="state", description="Only deliveries in this state"),
    ] = None,
    limit: PageSize = 50,
    cursor: CursorParameter = None,
    tenant: Whose = None,
) -> DeliveryPage:
    return await WebhookOutbox(context.ledger).deliveries(
        tenant_asked(caller, tenant), job, delivery_state, limit, cursor, tenant_asked(caller, None)
    )


@get(
    "/v1/webhooks/deliveries/{delivery_id:str}",
    opt=needs("read"),
    summary="Get a webhook delivery and its attempts",
    responses=ERRORS,
)
async def get_delivery(
    delivery_id: DeliveryId, context: AppContext, caller: Caller
) -> WebhookDelivery:
    return await _seen(context, caller, delivery_id)


@post(
    "/v1/webhooks/deliveries/{delivery_id:str}/redeliver",
    opt=needs("submit"),
    status_code=202,
    summary="Redeliver a webhook",
    description=(
        "Keeps the `webhook-id`. Works in any state; "
        "a delivery waiting for its next attempt is sent now."
    ),
    responses=ERRORS,
)
async def redeliver(
    delivery_id: DeliveryId, context: AppContext, caller: Caller
) -> WebhookDelivery:
    await _seen(context, caller, delivery_id)
    return await WebhookOutbox(context.ledger).redeliver(delivery_id, tenant_asked(caller, None))


async def _seen(context: AppContext, caller: Caller, delivery_id: str) -> WebhookDelivery:
    """Return the delivery. Raises `not_found`, also if it belongs to another tenant."""
    delivery = await WebhookOutbox(context.ledger).delivery(delivery_id, tenant_asked(caller, None))
    if not caller.sees(delivery.tenant):
        raise not_found(delivery_id)
    return delivery


@get(
    "/v1/webhooks/secrets",
    opt=needs("submit"),
    summary="Get the signing secrets",
    description=(
        "The secrets that sign webhooks about jobs submitted with this key; created by "
        "this call if there are none."
    ),
    responses={503: PROBLEM},
)
async def get_secrets(context: AppContext, caller: Caller) -> Response[SecretList]:
    return Response(
        await WebhookSecrets(context.ledger).of(caller.tenant, caller.key),
        headers=UNKEPT,
    )


@post(
    "/v1/webhooks/secrets",
    opt=needs("submit") | audited("secret", nothing),
    summary="Rotate the signing secret",
    description=(
        "The previous secret also signs for `keep_former_s`, so that receivers can "
        "switch over; any older one stops signing."
    ),
    responses=WITH_BODY,
)
async def rotate_secret(
    data: JSONBody[RotateRequest], context: AppContext, caller: Caller
) -> Response[SecretList]:
    made = await WebhookSecrets(context.ledger).rotate(
        caller.tenant, caller.key, data.keep_former_s, data.own
    )
    return Response(made, status_code=201, headers=UNKEPT)


ROUTES: list[Any] = [
    list_deliveries,
    get_delivery,
    redeliver,
    get_secrets,
    rotate_secret,
]
