"""Handling of a job apart from its computation: priority, expiry and callbacks."""

from typing import Annotated, Literal

import msgspec

from ..base.errors import invalid
from ..base.limits import MAX_EVENTS, MAX_URL
from ..base.records import Record
from ..base.states import ENDS, CallbackEvent

#: `normal` is the default priority of the kind of job: the OpenAI-style endpoints have a waiting
#: client, batch jobs do not.
Priority = Literal["high", "normal", "low"]

MAX_EXPIRES_S = 30 * 24 * 3600


class Handling(Record, kw_only=True):
    """Fields that the body of every submission has."""

    priority: Priority = "normal"
    #: Seconds from its acceptance within which a worker must have begun it, or it is aborted.
    expires_in: Annotated[float, msgspec.Meta(gt=0, le=MAX_EXPIRES_S)] | None = None
    #: Signed webhooks go here (Standard Webhooks 1.0): http or https, and no private address unless
    #: the operator allows them.
    callback_url: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL)] | None = None
    callback_events: (
        Annotated[list[CallbackEvent], msgspec.Meta(min_length=1, max_length=MAX_EVENTS)] | None
    ) = None  # null: all events of a job's end


class Callback(Record):
    """The webhook receiver and events of a job, as stored in the ledger."""

    url: str
    events: list[CallbackEvent]
    key: str = ""  # id of the API key that submitted the job, whose secret signs the webhooks


def handling_of(body: Handling) -> Handling:
    """The part of a body that says how to handle the job."""
    return Handling(**{name: getattr(body, name) for name in Handling.__struct_fields__})


def callback_of(handling: Handling) -> Callback | None:
    """The requested callback with defaults filled in; None for none.

    Raises a 400 for events without a callback_url.
    """
    if handling.callback_url is None:
        if handling.callback_events is not None:
            raise invalid("callback_events", "requires callback_url")
        return None
    return Callback(
        url=handling.callback_url, events=list(dict.fromkeys(handling.callback_events or ENDS))
    )
