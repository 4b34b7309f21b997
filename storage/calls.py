"""Counts this process's requests to object storage: outcomes, retries, sizes and durations."""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..schemas.base.store_calls import BOUNDS, NO_CALLS, StoreCalls, together


@dataclass
class StoreCall:
    """One running request; its caller sets both fields."""

    outcome: str = "ok"
    size: int = 0  # bytes of the body of the request or of its response


class Tally:
    """Counts of requests by operation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, StoreCalls] = {}

    @contextmanager
    def call(self, operation: str) -> Iterator[StoreCall]:
        call = StoreCall()
        began = time.monotonic()
        try:
            yield call
        finally:
            seconds = time.monotonic() - began
            buckets = [*NO_CALLS.buckets]
            buckets[bisect_left(BOUNDS, seconds)] = 1
            self._add(
                operation,
                StoreCalls(
                    outcomes={call.outcome: 1}, bytes=call.size, seconds=seconds, buckets=buckets
                ),
            )

    def repeated(self, operation: str) -> None:
        self._add(operation, StoreCalls(retries=1))

    def _add(self, operation: str, more: StoreCalls) -> None:
        with self._lock:
            self._operations[operation] = together(self._operations.get(operation, NO_CALLS), more)

    def read(self) -> dict[str, StoreCalls]:
        """Return operation → its counts so far."""
        with self._lock:
            return {**self._operations}


#: The counts of this process.
CALLS = Tally()
