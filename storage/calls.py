"""Counts this process's requests to object storage: outcomes, retries, sizes and durations."""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..schemas.base.store_calls import BOUNDS, StoreCalls


@dataclass
class StoreCall:
    """One running request; its caller sets both fields."""

    outcome: str = "ok"
    size: int = 0  # bytes of the body of the request or of its response


@dataclass
class _Operation:
    outcomes: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    bytes: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


class Tally:
    """Counts of requests by operation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: defaultdict[str, _Operation] = defaultdict(_Operation)

    @contextmanager
    def call(self, operation: str) -> Iterator[StoreCall]:
        call = StoreCall()
        began = time.monotonic()
        try:
            yield call
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                counts = self._operations[operation]
                counts.outcomes[call.outcome] += 1
                counts.bytes += call.size
                counts.seconds += seconds
                counts.buckets[bisect_left(BOUNDS, seconds)] += 1

    def repeated(self, operation: str) -> None:
        with self._lock:
            self._operations[operation].retries += 1

    def read(self) -> dict[str, StoreCalls]:
        """Return operation → its counts so far."""
        with self._lock:
            return {
                name: StoreCalls(
                    outcomes=dict(counts.outcomes),
                    retries=counts.retries,
                    bytes=counts.bytes,
                    seconds=round(counts.seconds, 6),
                    buckets=[*counts.buckets],
                )
                for name, counts in self._operations.items()
            }


#: The counts of this process.
CALLS = Tally()
