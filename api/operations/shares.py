"""How much of one thing the tenants do at the same time in this process."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.errors import MidstreamError

#: Seconds after which a refused call may be repeated.
AGAIN_S = 1.0


class Shares:
    """`most`: of one tenant. `what`: plural, for the refusal. Belongs to one event loop."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Counts one more until the block ends. Raises `rate_limited`."""
        if self._under_way[tenant] >= self._most:
            detail = f"{self._what} of tenant {tenant} under way: {self._under_way[tenant]}; the limit is {self._most}"
            raise MidstreamError("rate_limited", detail, allowed=f"wait {AGAIN_S:g} s", retry_after=AGAIN_S)
        self._under_way[tenant] += 1
        try:
            yield
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]
