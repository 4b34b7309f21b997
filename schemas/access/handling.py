"""Handling of a job apart from its computation: priority, expiry and callbacks."""

from typing import Annotated, Literal

import msgspec

from ..base.errors import invalid
from ..base.limits import MAX_EVENTS, UrlText
from ..base.records import Record, fields_of
from ..base.states import ENDS, CallbackEvent

#: `normal` stands for the default of the kind of job: the OpenAI-style endpoints, where a client
#: waits, come before batch jobs.
Priority = Literal["high", "normal", "low"]

MAX_EXPIRES_S = 30 * 24 * 3600


class Handling(Record, kw_only=True):
    """Fields in the body of every submission."""

    priority: Priority = "normal"
    #: Seconds after acceptance within which a worker must start the job; otherwise it is aborted.
    expires_in: Annotated[float, msgspec.Meta(gt=0, le=MAX_EXPIRES_S)] | None = None
    #: URL that receives signed webhooks (Standard Webhooks 1.0): http or https, and no private
    #: address unless the operator allows them.
    callback_url: UrlText | None = None
    callback_events: (
        Annotated[list[CallbackEvent], msgspec.Meta(min_length=1, max_length=MAX_EVENTS)] | None
    ) = None  # null: all events of a job's end


class Callback(Record):
    """The webhook receiver and events of a job, as stored in the ledger."""

    url: str
    events: list[CallbackEvent]
    key: str = ""  # id of the API key that submitted the job, whose secret signs the webhooks
    # whose webhooks they are, with an action of a policy: the tenant that registered it; empty: the
    # job's
    tenant: str = ""


def handling_of(body: Handling) -> Handling:
    """Return the handling fields of a body."""
    return Handling(**fields_of(body, Handling) | {"priority": body.priority or "normal"})


def callback_of(handling: Handling) -> Callback | None:
    """Return the requested callback with defaults filled in; None if none is requested.

    Raises MidstreamError (400) for events without a callback_url.
    """
    if handling.callback_url is None:
        if handling.callback_events is not None:
            raise invalid("callback_events", "requires callback_url")
        return None
    return Callback(
        url=handling.callback_url, events=list(dict.fromkeys(handling.callback_events or ENDS))
    )
