"""Metrics that are read at each scrape, from what the ledger, the workers and their ranks report.
Adding one means a line here, and `python tools/pages/code_tables.py` for the reference.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...schemas.jobs.models import WorkerStats
from ...schemas.requests.steering import RankSteering, WorkerSteering
from ...schemas.service.status import ServiceStatus

T = TypeVar("T")

#: A counter, which grows, a gauge, which varies, or a histogram.
Family = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
#: Values of the labels, and the value; of a histogram, its buckets and the sum.
MetricSample = tuple[Any, ...]


class ScrapedMetric(NamedTuple, Generic[T]):
    """A metric that is read at each scrape. `samples`: returns its samples for a `T`."""

    name: str  # without the prefix, and without `_total`, which Prometheus adds to counters
    family: Family
    help: str
    labels: tuple[str, ...]
    samples: Callable[[T], Iterable[MetricSample]]


#: Name of a metric → its family, the attribute that has its value, its help.
Attributes = Mapping[str, tuple[Family, str, str]]
#: What has the attributes, each with the values of its labels.
Labelled = Iterable[tuple[tuple[str, ...], object]]


def of_attributes(
    prefix: str,
    labels: tuple[str, ...],
    metrics: Attributes,
    sources: Callable[[T], Labelled],
) -> Iterator[ScrapedMetric[T]]:
    """Yield metrics whose values are attributes of what `sources` returns."""
    for name, (family, attribute, words) in metrics.items():
        samples = partial(_values, attrgetter(attribute), sources)
        yield ScrapedMetric(prefix + name, family, words, labels, samples)


def _values(
    value: Callable[[object], float], sources: Callable[[T], Labelled], source: T
) -> Iterator[MetricSample]:
    for labels, found in sources(source):
        yield labels, value(found)


def _queues(status: ServiceStatus) -> Iterator[MetricSample]:
    for queue in status.queues:
        yield (queue.model, queue.priority, "sent"), queue.sent
        yield (queue.model, queue.priority, "waiting"), sum(queue.waiting.values())


def _workers(status: ServiceStatus) -> Iterator[MetricSample]:
    return iter(
        Tally(
            (worker.model, str(worker.healthy).lower())
            for worker in status.workers
            if not worker.queue
        ).items()
    )


def _whole(status: ServiceStatus) -> Labelled:
    return [((), status)]


_OF_STATUS: Attributes = {
    "jobs_live": (GaugeMetricFamily, "live", "Jobs that have not ended"),
    "relay_up": (GaugeMetricFamily, "relay.alive", "1 if the relay reported recently"),
    "callbacks_up": (
        GaugeMetricFamily,
        "callbacks.alive",
        "1 if the callbacks worker reported recently",
    ),
    "redis_memory_bytes": (GaugeMetricFamily, "redis.used_bytes", "Memory used by Redis"),
    "redis_memory_limit_bytes": (
        GaugeMetricFamily,
        "redis.limit_bytes",
        "Redis maxmemory; 0: no limit",
    ),
    "redis_memory_share": (
        GaugeMetricFamily,
        "redis.share",
        "Redis memory used / limit; 0 without a limit",
    ),
}
#: Metrics of the whole service, as the API reads them from the ledger.
OF_SERVICE: tuple[ScrapedMetric[ServiceStatus], ...] = (
    ScrapedMetric(
        "jobs",
        CounterMetricFamily,
        "How often jobs entered a state",
        ("model", "state"),
        lambda status: (
            ((model, state), count)
            for model, states in status.counts.items()
            for state, count in states.items()
        ),
    ),
    ScrapedMetric(
        "workers",
        GaugeMetricFamily,
        "Live workers, by model and health",
        ("model", "healthy"),
        _workers,
    ),
    ScrapedMetric(
        "queue_depth",
        GaugeMetricFamily,
        "Jobs waiting for a worker",
        ("model", "priority", "place"),
        _queues,
    ),
    *of_attributes("", (), _OF_STATUS, _whole),
)


class SteeringReport(NamedTuple):
    """A worker's last report on its ranks.

    `consistent`: pipeline stage → whether its ranks agree.
    """

    worker: WorkerSteering
    consistent: Mapping[int, bool]


#: Of a rank, as the API and its worker expose them.
_OF_EVERY_RANK: Attributes = {
    "rows_used": (GaugeMetricFamily, "rows_used", "Rows of the steering table in use"),
    "rows": (GaugeMetricFamily, "rows", "Rows of the steering table"),
    "entries_used": (GaugeMetricFamily, "entries_used", "Entries of the steering table in use"),
    "entries": (GaugeMetricFamily, "entries", "Entries of the steering table"),
    "backlog_bytes": (GaugeMetricFamily, "backlog", "Captured rows waiting for the writers"),
}
_WAITING_RECEIPTS = (GaugeMetricFamily, "outbox", "Receipts that the relay has not acknowledged")
_RESYNCS = "Rank disagreements that were resolved by a resync"
_STEERING_OF_WORKER: Attributes = {
    "waiting": (GaugeMetricFamily, "waiting", "Requests waiting for rows of the steering table"),
    "desyncs": (
        GaugeMetricFamily,
        "desyncs",
        "Rank disagreements found since the worker started",
    ),
    "resyncs": (GaugeMetricFamily, "resyncs", _RESYNCS),
}
_STEERING_OF_RANK: Attributes = {
    **_OF_EVERY_RANK,
    "vectors": (GaugeMetricFamily, "vectors", "Tensors held by the rank"),
    "requests": (
        GaugeMetricFamily,
        "requests",
        "Requests on the rank with an intervention or a capture",
    ),
    "actions": (
        GaugeMetricFamily,
        "actions",
        "Actions recorded by the rank since its last reset",
    ),
    "outbox": _WAITING_RECEIPTS,
}


def _steered_worker(report: SteeringReport) -> Labelled:
    return [((report.worker.model, report.worker.worker), report.worker)]


def _steered_ranks(report: SteeringReport) -> Labelled:
    worker = report.worker
    return (((worker.model, worker.worker, str(rank.rank)), rank) for rank in worker.ranks)


#: Metrics of every worker's steering, as the API reads them from the workers' reports.
OF_STEERING: tuple[ScrapedMetric[SteeringReport], ...] = (
    ScrapedMetric(
        "steering_state",
        GaugeMetricFamily,
        "1 for the worker's current state",
        ("model", "worker", "state"),
        lambda report: iter(
            [((report.worker.model, report.worker.worker, report.worker.state), 1)]
        ),
    ),
    ScrapedMetric(
        "steering_consistent",
        GaugeMetricFamily,
        "Whether the ranks of a stage agree",
        ("model", "worker", "stage"),
        lambda report: (
            ((report.worker.model, report.worker.worker, str(stage)), agree)
            for stage, agree in report.consistent.items()
        ),
    ),
    *of_attributes("steering_", ("model", "worker"), _STEERING_OF_WORKER, _steered_worker),
    *of_attributes("steering_", ("model", "worker", "rank"), _STEERING_OF_RANK, _steered_ranks),
)


class WorkerReport(NamedTuple):
    """A worker's report at a scrape."""

    model: str
    stats: WorkerStats
    ranks: list[RankSteering]


def _stats(report: WorkerReport) -> Labelled:
    return [((report.model,), report.stats)]


def _ranks(report: WorkerReport) -> Labelled:
    return (((report.model, str(rank.rank)), rank) for rank in report.ranks)


_OF_STATS: Attributes = {
    "running_jobs": (GaugeMetricFamily, "jobs", "Jobs held by the worker"),
    "engine_running": (GaugeMetricFamily, "running", "Requests running in the engine"),
    "engine_waiting": (
        GaugeMetricFamily,
        "waiting",
        "Requests that wait for the engine or for rows of the steering table",
    ),
    "kv_cache_share": (GaugeMetricFamily, "kv_cache", "Share of the KV cache in use, 0 to 1"),
    "prompt_tokens": (
        CounterMetricFamily,
        "prompt_tokens",
        "Prompt tokens of requests that have begun to generate",
    ),
    "generated_tokens": (CounterMetricFamily, "generated_tokens", "Tokens generated"),
    "cells": (CounterMetricFamily, "cells", "Sweep cells completed"),
    "desyncs": (
        CounterMetricFamily,
        "desyncs",
        "Rank disagreements found by or reported to the worker",
    ),
    "resyncs": (CounterMetricFamily, "resyncs", _RESYNCS),
}
_OF_RANK: Attributes = {
    **_OF_EVERY_RANK,
    "outbox_depth": _WAITING_RECEIPTS,
    "captured_rows": (
        CounterMetricFamily,
        "captured_rows",
        "Rows captured: one hook of one layer at one position",
    ),
    "captured_bytes": (
        CounterMetricFamily,
        "captured_bytes",
        "Bytes of captured rows, as stored",
    ),
    "dropped_positions": (
        CounterMetricFamily,
        "dropped_positions",
        "Requested positions dropped under overload",
    ),
}
#: Metrics of one worker, exposed by its own process.
OF_WORKER: tuple[ScrapedMetric[WorkerReport], ...] = (
    ScrapedMetric(
        "tenant_tokens",
        CounterMetricFamily,
        "Tokens of prompts that have begun to generate, and tokens generated, by tenant",
        ("model", "tenant"),
        lambda report: (
            ((report.model, tenant), tokens)
            for tenant, tokens in report.stats.tenant_tokens.items()
        ),
    ),
    *of_attributes("", ("model",), _OF_STATS, _stats),
    *of_attributes("rank_", ("model", "rank"), _OF_RANK, _ranks),
)


class ScrapedMetrics(Collector, Generic[T]):
    """The metrics of a table.

    `sources`: called at each scrape; returns the objects to read, none while none are known.
    """

    def __init__(
        self, table: tuple[ScrapedMetric[T], ...], sources: Callable[[], Iterable[T]]
    ) -> None:
        self._table = table
        self._sources = sources

    def describe(self) -> Iterator[Metric]:
        """Return the names without values, for the registry."""
        return (_family(reading) for reading in self._table)

    def collect(self) -> Iterator[Metric]:
        sources = list(self._sources())
        for reading in self._table:
            family = _family(reading)
            for source in sources:
                for sample in reading.samples(source):
                    family.add_metric(*sample)
            yield family


def _family(reading: ScrapedMetric[Any]) -> Any:
    return reading.family(f"midstream_{reading.name}", reading.help, labels=reading.labels)
