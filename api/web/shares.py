"""Per-tenant limits on concurrent use, in this process."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.base.errors import MidstreamError

#: Seconds after which a refused call may be repeated.
AGAIN_S = 1.0


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
