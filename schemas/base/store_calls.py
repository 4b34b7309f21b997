"""Counts of requests to object storage, as ranks report them to their worker."""

from collections import Counter
from itertools import zip_longest

from .records import Record

#: Upper bounds of the histogram's buckets, in seconds; one more bucket counts slower requests.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class StoreCalls(Record):
    """Counts of one operation: head | get | put | upload (in parts) | delete | list | probe."""

    outcomes: dict[str, int] = {}  # ok | missing | stale | refused | full | away | error → requests
    # requests repeated after a temporary error; repeats of an upload's parts are unknown
    retries: int = 0
    bytes: int = 0  # of bodies that were sent or received
    seconds: float = 0.0  # total duration
    # requests by duration, one number for each of `BOUNDS` and one for the rest
    buckets: list[int] = []


#: The counts of an operation without requests.
NO_CALLS = StoreCalls(buckets=[0] * (len(BOUNDS) + 1))


def together(*counts: StoreCalls) -> StoreCalls:
    """Return the sums of some counts of one operation."""
    outcomes = sum((Counter(each.outcomes) for each in counts), Counter[str]())
    buckets = zip_longest(*(each.buckets for each in counts), fillvalue=0)
    return StoreCalls(
        outcomes=dict(outcomes),
        retries=sum(each.retries for each in counts),
        bytes=sum(each.bytes for each in counts),
        seconds=sum(each.seconds for each in counts),
        buckets=[*map(sum, buckets)],
    )
