"""Webhooks (Standard Webhooks 1.0): payloads, deliveries and secrets."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..base.records import JsonObject, Record
from ..base.states import CallbackEvent

#: `pending`: waits for its first attempt or a retry. `delivered`: answered with 2xx. `failed`: the
#: last retry was not answered with 2xx, or an attempt with 410. `refused`: its address may not be
#: called.
DeliveryState = Literal["pending", "delivered", "failed", "refused"]


class HookData(Record):
    """Payload about a job: minimal, so that a receiver fetches details with its own key."""

    id: str  # the job's; with a policy's webhook about another tenant's job, a hash of it
    state: str
    attempt: int
    model: str
    # with `job.decided`: {policy, version, digest, request, triggers, inherited, first}
    decision: JsonObject | UnsetType = UNSET


class HookBody(Record):
    """The body that is sent, and signed as `{webhook-id}.{webhook-timestamp}.{body}`."""

    type: CallbackEvent
    timestamp: str  # of the event: ISO 8601, UTC
    data: HookData


class DeliveryAttempt(Record):
    at: float  # seconds since the epoch
    status: int | None = None  # HTTP status; null: no answer
    error: str = ""
    seconds: float = 0.0


class WebhookDelivery(Record):
    """One event for one receiver; `id` is the `webhook-id` of all its attempts."""

    id: str
    job: str  # with a policy's webhook about another tenant's job, a hash of it, except for admins
    event: CallbackEvent
    tenant: str
    url: str
    state: DeliveryState
    created: float
    next_attempt: float | None = None
    attempts: list[DeliveryAttempt] = []


class DeliveryPage(Record):
    deliveries: list[WebhookDelivery]
    next: str | None = None


class Secret(Record):
    """A signing secret, `whsec_…`; while the previous one is still accepted, both sign."""

    secret: str
    created: float
    until: float | None = None  # set on a replaced secret: until when it also signs


class SecretList(Record):
    """Answer of `GET /v1/webhooks/secrets`: newest first."""

    of: Literal["tenant", "key"]  # whether all keys of the tenant or only this key use them
    secrets: list[Secret]


class RotateRequest(Record):
    """Body of `POST /v1/webhooks/secrets`."""

    # how long the previous secret also signs, in seconds
    keep_former_s: Annotated[float, msgspec.Meta(ge=0, le=30 * 24 * 3600)] = 24 * 3600.0
    # rotate this key's own secret instead of its tenant's; a key with its own secret always rotates
    # that secret
    own: bool = False
