"""Counts of this process's requests to object storage: how many, how they ended, how often
repeated, how large and how slow.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..schemas.base.store_calls import BOUNDS, StoreCalls


@dataclass
class Call:
    """One request that is under way; its caller sets both fields."""

    outcome: str = "ok"
    size: int = 0  # bytes of its body, or of the answer's


@dataclass
class _Operation:
    outcomes: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    bytes: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


class Tally:
    """May be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: defaultdict[str, _Operation] = defaultdict(_Operation)

    @contextmanager
    def call(self, operation: str) -> Iterator[Call]:
        call, began = Call(), time.monotonic()
        try:
            yield call
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                of = self._of[operation]
                of.outcomes[call.outcome] += 1
                of.bytes += call.size
                of.seconds += seconds
                of.buckets[bisect_left(BOUNDS, seconds)] += 1

    def repeated(self, operation: str) -> None:
        with self._lock:
            self._of[operation].retries += 1

    def read(self) -> dict[str, StoreCalls]:
        """Operation → its counts so far."""
        with self._lock:
            return {
                name: StoreCalls(
                    outcomes=dict(of.outcomes),
                    retries=of.retries,
                    bytes=of.bytes,
                    seconds=round(of.seconds, 6),
                    buckets=[*of.buckets],
                )
                for name, of in self._of.items()
            }


#: Of this process.
CALLS = Tally()
