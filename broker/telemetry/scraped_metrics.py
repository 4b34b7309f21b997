"""Metrics that are read at each scrape, from what the ledger, the workers and their ranks report.
Adding one means a line here and a row in docs/observability.md.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...schemas.jobs.models import WorkerStats
from ...schemas.requests.steering import RankSteering, WorkerSteering
from ...schemas.service.status import ServiceStatus

T = TypeVar("T")

#: A counter, which grows, or a gauge, which varies.
Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
#: Values of the labels, and the value.
MetricSample = tuple[tuple[str, ...], float]


class ScrapedMetric(NamedTuple, Generic[T]):
    """A metric that is read at each scrape. `samples`: returns its samples for a `T`."""

    name: str  # without the prefix, and without `_total`, which Prometheus adds to counters
    family: Family
    help: str
    labels: tuple[str, ...]
    samples: Callable[[T], Iterable[MetricSample]]


def _one(value: Callable[[T], float]) -> Callable[[T], Iterable[MetricSample]]:
    """Return the function that samples a metric without labels."""
    return lambda source: [((), float(value(source)))]


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
    ScrapedMetric(
        "jobs_live",
        GaugeMetricFamily,
        "Jobs that have not ended",
        (),
        _one(lambda status: status.live),
    ),
    ScrapedMetric(
        "relay_up",
        GaugeMetricFamily,
        "1 if the relay reported recently",
        (),
        _one(lambda status: status.relay.alive),
    ),
    ScrapedMetric(
        "callbacks_up",
        GaugeMetricFamily,
        "1 if the callbacks worker reported recently",
        (),
        _one(lambda status: status.callbacks.alive),
    ),
    ScrapedMetric(
        "redis_memory_bytes",
        GaugeMetricFamily,
        "Memory used by Redis",
        (),
        _one(lambda status: status.redis.used_bytes),
    ),
    ScrapedMetric(
        "redis_memory_limit_bytes",
        GaugeMetricFamily,
        "Redis maxmemory; 0: no limit",
        (),
        _one(lambda status: status.redis.limit_bytes),
    ),
    ScrapedMetric(
        "redis_memory_share",
        GaugeMetricFamily,
        "Redis memory used / limit; 0 without a limit",
        (),
        _one(lambda status: status.redis.share),
    ),
)


class SteeringReport(NamedTuple):
    """A worker's last report on its ranks.

    `consistent`: pipeline stage → whether its ranks agree.
    """

    worker: WorkerSteering
    consistent: Mapping[int, bool]


def _steering(
    name: str, words: str, value: Callable[[WorkerSteering], float]
) -> ScrapedMetric[SteeringReport]:
    return ScrapedMetric(
        f"steering_{name}",
        GaugeMetricFamily,
        words,
        ("model", "worker"),
        lambda report: [((report.worker.model, report.worker.worker), value(report.worker))],
    )


def _steering_rank(
    name: str, words: str, value: Callable[[RankSteering], float]
) -> ScrapedMetric[SteeringReport]:
    return ScrapedMetric(
        f"steering_{name}",
        GaugeMetricFamily,
        words,
        ("model", "worker", "rank"),
        lambda report: (
            ((report.worker.model, report.worker.worker, str(rank.rank)), value(rank))
            for rank in report.worker.ranks
        ),
    )


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
    _steering(
        "waiting", "Requests waiting for rows of the steering table", lambda worker: worker.waiting
    ),
    _steering(
        "desyncs",
        "Rank disagreements found since the worker started",
        lambda worker: worker.desyncs,
    ),
    _steering(
        "resyncs",
        "Rank disagreements that were resolved by a resync",
        lambda worker: worker.resyncs,
    ),
    _steering_rank("rows_used", "Rows of the steering table in use", lambda rank: rank.rows_used),
    _steering_rank("rows", "Rows of the steering table", lambda rank: rank.rows),
    _steering_rank(
        "entries_used", "Entries of the steering table in use", lambda rank: rank.entries_used
    ),
    _steering_rank("entries", "Entries of the steering table", lambda rank: rank.entries),
    _steering_rank("vectors", "Tensors held by the rank", lambda rank: rank.vectors),
    _steering_rank(
        "requests",
        "Requests on the rank with an intervention or a capture",
        lambda rank: rank.requests,
    ),
    _steering_rank(
        "actions", "Actions recorded by the rank since its last reset", lambda rank: rank.actions
    ),
    _steering_rank(
        "outbox", "Receipts that the relay has not acknowledged", lambda rank: rank.outbox
    ),
    _steering_rank(
        "backlog_bytes", "Captured rows waiting for the writers", lambda rank: rank.backlog
    ),
)


class WorkerReport(NamedTuple):
    """A worker's report at a scrape."""

    model: str
    stats: WorkerStats
    ranks: list[RankSteering]


def _worker(
    name: str, family: Family, words: str, value: Callable[[WorkerStats], float]
) -> ScrapedMetric[WorkerReport]:
    return ScrapedMetric(
        name, family, words, ("model",), lambda report: [((report.model,), value(report.stats))]
    )


def _rank(
    name: str, family: Family, words: str, value: Callable[[RankSteering], float]
) -> ScrapedMetric[WorkerReport]:
    return ScrapedMetric(
        f"rank_{name}",
        family,
        words,
        ("model", "rank"),
        lambda report: (((report.model, str(rank.rank)), value(rank)) for rank in report.ranks),
    )


#: Metrics of one worker, exposed by its own process.
OF_WORKER: tuple[ScrapedMetric[WorkerReport], ...] = (
    _worker("running_jobs", GaugeMetricFamily, "Jobs held by the worker", lambda stats: stats.jobs),
    _worker(
        "engine_running",
        GaugeMetricFamily,
        "Requests running in the engine",
        lambda stats: stats.running,
    ),
    _worker(
        "engine_waiting",
        GaugeMetricFamily,
        "Requests that wait for the engine or for rows of the steering table",
        lambda stats: stats.waiting,
    ),
    _worker(
        "kv_cache_share",
        GaugeMetricFamily,
        "Share of the KV cache in use, 0 to 1",
        lambda stats: stats.kv_cache,
    ),
    _worker(
        "prompt_tokens",
        CounterMetricFamily,
        "Prompt tokens of requests that have begun to generate",
        lambda stats: stats.prompt_tokens,
    ),
    _worker(
        "generated_tokens",
        CounterMetricFamily,
        "Tokens generated",
        lambda stats: stats.generated_tokens,
    ),
    _worker("cells", CounterMetricFamily, "Sweep cells completed", lambda stats: stats.cells),
    _worker(
        "desyncs",
        CounterMetricFamily,
        "Rank disagreements found by or reported to the worker",
        lambda stats: stats.desyncs,
    ),
    _worker(
        "resyncs",
        CounterMetricFamily,
        "Rank disagreements that were resolved by a resync",
        lambda stats: stats.resyncs,
    ),
    _rank(
        "rows_used",
        GaugeMetricFamily,
        "Rows of the steering table in use",
        lambda rank: rank.rows_used,
    ),
    _rank("rows", GaugeMetricFamily, "Rows of the steering table", lambda rank: rank.rows),
    _rank(
        "entries_used",
        GaugeMetricFamily,
        "Entries of the steering table in use",
        lambda rank: rank.entries_used,
    ),
    _rank("entries", GaugeMetricFamily, "Entries of the steering table", lambda rank: rank.entries),
    _rank(
        "outbox_depth",
        GaugeMetricFamily,
        "Receipts that the relay has not acknowledged",
        lambda rank: rank.outbox,
    ),
    _rank(
        "backlog_bytes",
        GaugeMetricFamily,
        "Captured rows waiting for the writers",
        lambda rank: rank.backlog,
    ),
    _rank(
        "captured_rows",
        CounterMetricFamily,
        "Rows captured: one hook of one layer at one position",
        lambda rank: rank.captured_rows,
    ),
    _rank(
        "captured_bytes",
        CounterMetricFamily,
        "Bytes of captured rows, as stored",
        lambda rank: rank.captured_bytes,
    ),
    _rank(
        "dropped_positions",
        CounterMetricFamily,
        "Requested positions dropped under overload",
        lambda rank: rank.dropped_positions,
    ),
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
                for labels, value in reading.samples(source):
                    family.add_metric(labels, float(value))
            yield family


def _family(reading: ScrapedMetric[Any]) -> CounterMetricFamily | GaugeMetricFamily:
    return reading.family(f"midstream_{reading.name}", reading.help, labels=reading.labels)
