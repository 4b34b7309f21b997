"""Validation of a webhook's receiver at submission, before anything is sent to it."""

from collections.abc import Callable
from functools import cache

from ....schemas import packages
from ....schemas.access.handling import Callback
from ....schemas.base.errors import invalid
from ....schemas.settings.settings import Settings

#: Entry points of what sends webhooks: name → function of a receiver's URL and of the setting
#: `webhook_allow_private` that returns what is wrong with the URL, or None.
RECEIVERS = "midstream.receivers"
WEBHOOKS = "webhooks"


def check_callback(callback: Callback | None, settings: Settings) -> None:
    """Raises a 400 naming `callback_url`.

    Its host name is resolved only when a webhook is sent, which fails then if the address is not
    allowed.
    """
    if callback is not None:
        check_receiver(callback.url, "callback_url", settings)


def check_receiver(url: str, field: str, settings: Settings) -> None:
    """Raises a 400 naming `field`, also if no package is installed that would send the webhook."""
    fault_of = _check()
    if isinstance(fault_of, packages.MissingPackageError):
        raise invalid(field, f"a webhook {fault_of}")
    if fault := fault_of(url, settings.webhook_allow_private):
        raise invalid(field, fault, allowed="http or https, to a public address")


@cache  # a look at everything that is installed
def _check() -> Callable[[str, bool], str | None] | packages.MissingPackageError:
    try:
        check: Callable[[str, bool], str | None] = packages.load(RECEIVERS, WEBHOOKS, WEBHOOKS)
    except packages.MissingPackageError as error:
        return error
    return check
