"""Metrics of the calls to the artifact store."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...schemas.base.records import by_key
from ...schemas.base.store_calls import BOUNDS, StoreCalls
from ...storage.calls import CALLS


class StoreReadings(Collector):
    """Metrics of requests to object storage, by this process and the ranks that report to it.

    `sources`: each returns mappings of operation → counts.
    """

    _BOUNDS = (*map(str, BOUNDS), "+Inf")

    def __init__(self) -> None:
        self.sources: list[Callable[[], Iterable[Mapping[str, StoreCalls]]]] = [
            lambda: [CALLS.read()]
        ]

    def describe(self) -> Iterator[Metric]:
        return iter(self._families())

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        requests, retries, size, seconds = families
        by_operation = by_key(
            item for source in self.sources for counts in source() for item in counts.items()
        )
        for operation, parts in sorted(by_operation.items()):
            outcomes = sum((Tally(calls.outcomes) for calls in parts), Tally())
            for outcome, count in sorted(outcomes.items()):
                requests.add_metric((operation, outcome), count)
            retries.add_metric((operation,), sum(calls.retries for calls in parts))
            size.add_metric((operation,), sum(calls.bytes for calls in parts))
            counts = accumulate(map(sum, zip(*(calls.buckets for calls in parts), strict=True)))
            buckets = [
                (bound, float(count)) for bound, count in zip(self._BOUNDS, counts, strict=True)
            ]
            seconds.add_metric((operation,), buckets, sum(calls.seconds for calls in parts))
        return iter(families)

    def _families(
        self,
    ) -> tuple[
        CounterMetricFamily, CounterMetricFamily, CounterMetricFamily, HistogramMetricFamily
    ]:
        name = "midstream_store"
        return (
            CounterMetricFamily(
                f"{name}_requests",
                "Requests to object storage, by outcome",
                labels=["operation", "outcome"],
            ),
            CounterMetricFamily(
                f"{name}_retries",
                "Requests that were repeated after a temporary error",
                labels=["operation"],
            ),
            CounterMetricFamily(
                f"{name}_bytes", "Bytes of bodies sent or received", labels=["operation"]
            ),
            HistogramMetricFamily(
                f"{name}_seconds",
                "Duration of a request, or of an upload in parts",
                labels=["operation"],
            ),
        )


STORE = StoreReadings()
