"""Measures the space that captures take, against their quota."""

import threading
import time
from collections.abc import Iterable

from ..schemas.base.errors import MidstreamError
from .store import ArtifactStore

#: Seconds until the space is measured again, and until then when the quota seems used up; at least
#: `MEASURE_SHARE` times as long as the measurement took, which is long in a large tree.
MEASURE_S = 30.0
MEASURE_FULL_S = 1.0
MEASURE_SHARE = 20


class CaptureUsage:
    """The space that captures take, against their quota.

    May be shared by threads; each process measures separately.
    """

    def __init__(self, store: ArtifactStore, quota: int) -> None:
        """`quota`: bytes; 0: no quota, and nothing is measured."""
        self._store = store
        self._quota = quota
        self._lock = threading.Lock()
        self._used = 0
        self._due = 0.0
        self._due_if_full = 0.0

    def take(self, sizes: Iterable[int], spare: int = 0) -> None:
        """Reserve `sizes` bytes that are about to be written; `spare` more must stay free.

        Raises MidstreamError("quota_exceeded") if there is no room for them.
        """
        if not self._quota:
            return
        with self._lock:
            needed = sum(sizes)
            self._measure(self._due)
            if self._used + needed + spare > self._quota:
                self._measure(self._due_if_full)
            if self._used + needed + spare > self._quota:
                raise MidstreamError(
                    "quota_exceeded",
                    (
                        f"captures use {self._used >> 20} of {self._quota >> 20} "
                        "MiB (capture_quota_mib)"
                    ),
                    hint="delete captures, or raise the quota",
                )
            self._used += needed

    def left(self) -> int | None:
        """Return how many bytes of the quota are unused; None: no quota."""
        if not self._quota:
            return None
        with self._lock:
            self._measure(self._due)
            return max(0, self._quota - self._used)

    def _measure(self, due: float) -> None:
        start = time.monotonic()
        if start < due:
            return
        self._used = self._store.used()
        end = time.monotonic()
        self._due_if_full = end + max(MEASURE_FULL_S, MEASURE_SHARE * (end - start))
        self._due = end + max(MEASURE_S, MEASURE_SHARE * (end - start))
