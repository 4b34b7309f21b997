"""Per-tenant limits on concurrent use and on rates, in this process."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.base.errors import MidstreamError
from ...schemas.base.recent import Recent

#: Seconds after which a refused call may be repeated, unless a better time is known.
AGAIN_S = 1.0
#: Tenants whose rate is remembered; the least recently counted one is forgotten.
REMEMBERED = 10_000


class Shares:
    """Limits concurrent use per tenant.

    `most`: at a time. `what`: plural noun for the error. `setting`: name of the setting for `most`.
    Belongs to one event loop.
    """

    def __init__(
        self,
        most: int,
        what: str,
        kind: str = "rate_limited",
        setting: str = "",
        again_s: float = AGAIN_S,
    ) -> None:
        self._most = most
        self._what = what
        self._kind = kind
        self._again_s = again_s
        self._named = f" (setting {setting})" if setting else ""
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Count one use until the block ends. Raises `kind` at the limit."""
        if self._under_way[tenant] >= self._most:
            detail = (
                f"{self._what} of tenant {tenant} under way: {self._under_way[tenant]}; the "
                f"limit is {self._most}{self._named}"
            )
            raise MidstreamError(
                self._kind, detail, hint=f"wait {self._again_s:g} s", retry_after=self._again_s
            )
        self._under_way[tenant] += 1
        try:
            yield
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]


class Rate:
    """Rate limit per tenant: `per_minute`, with bursts of `burst`.

    Belongs to one event loop.
    """

    def __init__(
        self,
        per_minute: int,
        burst: int,
        what: str,
        kind: str,
        setting: str,
        again_s: float = AGAIN_S,
    ) -> None:
        self._step_s = 60 / per_minute
        self._burst = burst
        self._kind = kind
        self._again_s = again_s
        self._refusal = (
            f"{what} of tenant {{}}: more than {per_minute} per minute (setting {setting})"
        )
        # tenant → monotonic time at which the rate will cover all its past uses
        self._paid = Recent[str, float](REMEMBERED)

    def count(self, tenant: str) -> None:
        """Count one use. At the limit, raises `kind` and counts nothing."""
        at = time.monotonic()
        paid = max(at, self._paid.get(tenant, at)) + self._step_s
        if (wait := paid - at - self._step_s * self._burst) > 0:
            wait = max(wait, self._again_s)
            raise MidstreamError(
                self._kind,
                self._refusal.format(tenant),
                hint=f"wait {wait:.0f} s",
                retry_after=wait,
            )
        self._paid[tenant] = paid
