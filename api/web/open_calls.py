"""Limits on each tenant's open calls and event streams, counted per process.

A call counts from its authorization until its answer ends or its client leaves (`Call.held`).
"""

from ...schemas.settings.settings import Settings
from .request_context import current
from .shares import Rate, Shares

#: Member of a route's `opt` that marks event streams to which clients reconnect.
EVENTS = {"events": True}
#: Seconds after which a refused client may retry; many may do so at the same time.
AGAIN_S = 5.0


class OpenCalls:
    """All open calls of a process. Belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        most = settings.tuning.tenant_streams
        self._calls = Shares(
            settings.tuning.tenant_connections,
            "requests",
            "too_many_connections",
            "tuning.tenant_connections",
            AGAIN_S,
        )
        self._streams = Shares(
            most, "event streams", "too_many_streams", "tuning.tenant_streams", AGAIN_S
        )
        self._openings = Rate(
            settings.tuning.tenant_streams_per_minute,
            most,
            "new event streams",
            "too_many_streams",
            "tuning.tenant_streams_per_minute",
            AGAIN_S,
        )

    def enter(self, tenant: str, is_stream: bool) -> None:
        """Count the current call.

        Raises `too_many_connections` and `too_many_streams`.
        """
        held = current().held
        held.enter_context(self._calls.of(tenant))
        if is_stream:
            held.enter_context(self._streams.of(tenant))
            self._openings.count(tenant)
