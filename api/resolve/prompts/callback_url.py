"""Validation of a `callback_url` at submission, before anything is sent to it."""

from ....broker.webhooks.targets import url_fault
from ....schemas.access.handling import Callback
from ....schemas.base import invalid
from ....schemas.settings.settings import Settings


def check_callback(callback: Callback | None, settings: Settings) -> None:
    """Raises a 400 naming `callback_url`.

    Its host name is resolved only when a webhook is sent, which fails then if the address is not
    allowed.
    """
    if callback is not None and (fault := url_fault(callback.url, settings.webhook_allow_private)):
        raise invalid("callback_url", fault, allowed="http or https, to a public address")
