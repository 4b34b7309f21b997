"""Metrics of the calls to the artifact store, by this process and the ranks that report to it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from ...schemas.base.records import by_key
from ...schemas.base.store_calls import BOUNDS, StoreCalls, together
from ...storage.calls import CALLS
from .scraped_metrics import (
    Attributes,
    Labelled,
    MetricSample,
    ScrapedMetric,
    ScrapedMetrics,
    of_attributes,
)

#: Each returns mappings of operation → counts; workers add one for their ranks.
SOURCES: list[Callable[[], Iterable[Mapping[str, StoreCalls]]]] = [lambda: [CALLS.read()]]
_BOUNDS = (*map(str, BOUNDS), "+Inf")


class StoreOperation(NamedTuple):
    """The requests of one operation."""

    name: str
    calls: StoreCalls


def _operations() -> Iterator[StoreOperation]:
    counts = (item for source in SOURCES for each in source() for item in each.items())
    for name, parts in sorted(by_key(counts).items()):
        yield StoreOperation(name, together(*parts))


def _outcomes(operation: StoreOperation) -> Iterator[MetricSample]:
    for outcome, count in sorted(operation.calls.outcomes.items()):
        yield (operation.name, outcome), count


def _durations(operation: StoreOperation) -> Iterator[MetricSample]:
    counts = accumulate(operation.calls.buckets)
    yield (operation.name,), [*zip(_BOUNDS, counts, strict=True)], operation.calls.seconds


def _calls(operation: StoreOperation) -> Labelled:
    return [((operation.name,), operation.calls)]


_OF_CALLS: Attributes = {
    "retries": (
        CounterMetricFamily,
        "retries",
        "Requests that were repeated after a temporary error",
    ),
    "bytes": (CounterMetricFamily, "bytes", "Bytes of bodies sent or received"),
}
STORE = ScrapedMetrics(
    (
        ScrapedMetric(
            "store_requests",
            CounterMetricFamily,
            "Requests to object storage, by outcome",
            ("operation", "outcome"),
            _outcomes,
        ),
        *of_attributes("store_", ("operation",), _OF_CALLS, _calls),
        ScrapedMetric(
            "store_seconds",
            HistogramMetricFamily,
            "Duration of a request, or of an upload in parts",
            ("operation",),
            _durations,
        ),
    ),
    _operations,
)
