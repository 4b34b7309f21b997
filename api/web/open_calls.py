"""Limits on each tenant's open calls and event streams, counted per process.

A call counts from its authorization until its answer ends or its client leaves (`Call.held`).
"""

import time

from ...schemas.base.errors import MidstreamError
from ...schemas.base.recent import Recent
from ...schemas.settings.settings import Settings
from .request_context import current
from .shares import Shares

#: Member of a route's `opt` that marks event streams to which clients reconnect.
EVENTS = {"events": True}
#: Seconds after which a refused client may retry; many may do so at the same time.
AGAIN_S = 5.0
#: Tenants whose streams are remembered; the one that opened none for the longest is forgotten.
REMEMBERED = 10_000


class StreamRate:
    """Limits how often a tenant opens event streams: `per_minute`, with bursts of `burst`.

    Belongs to one event loop.
    """

    def __init__(self, per_minute: int, burst: int) -> None:
        self._per_minute = per_minute
        self._burst = burst
        # tenant → monotonic time at which the rate will cover all its past uses
        self._paid = Recent[str, float](REMEMBERED)

    def count(self, tenant: str) -> None:
        """Count one use. At the limit, raises `too_many_streams` and counts nothing."""
        step_s = 60 / self._per_minute
        at = time.monotonic()
        paid = max(at, self._paid.get(tenant, at)) + step_s
        if (wait := paid - at - step_s * self._burst) > 0:
            wait = max(wait, AGAIN_S)
            raise MidstreamError(
                "too_many_streams",
                f"new event streams of tenant {tenant}: more than {self._per_minute} per minute "
                "(setting tuning.tenant_streams_per_minute)",
                hint=f"wait {wait:.0f} s",
                retry_after=wait,
            )
        self._paid[tenant] = paid


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
        self._openings = StreamRate(settings.tuning.tenant_streams_per_minute, most)

    def enter(self, tenant: str, is_stream: bool) -> None:
        """Count the current call.

        Raises `too_many_connections` and `too_many_streams`.
        """
        held = current().held
        held.enter_context(self._calls.of(tenant))
        if is_stream:
            held.enter_context(self._streams.of(tenant))
            self._openings.count(tenant)
