"""Every metric of Midstream, in one place: adding one means a line here and a row in
docs/observability.md.

The counters, gauges and histograms of the first part are updated where things happen. The tables of
the second part are read at each scrape, from what the ledger, the workers and their ranks report. A
process exposes only what it has counted itself: a gauge without labels is shown as 0 once it is
registered, so the process that measures it registers it.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...schemas.base import by_key
from ...schemas.base.store_calls import BOUNDS, StoreCalls
from ...schemas.jobs.models import WorkerStats
from ...schemas.requests.steering import RankSteering, WorkerSteering
from ...schemas.service.status import ServiceStatus
from ...storage.calls import CALLS

# `_created` would be an unused second series for every counter.
disable_created_metrics()  # type: ignore[no-untyped-call]

#: Upper bounds in seconds: from an answer without a model to a job that waited for a day.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86400)

#: Upper bounds of a probe's scores, which are log-odds where `midstream.probes.fit` made it.
SCORES = (-20, -10, -5, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 5, 10, 20)

BUILD = Gauge("midstream_build_info", "1; labels: process, version", ["process", "version"])

# A job's stages, each observed where it ends
QUEUE_WAIT = Histogram(
    "midstream_queue_wait_seconds",
    "From acceptance (or return to the queue) to the claim",
    ["model"],
    buckets=SECONDS,
)
FIRST_TOKEN = Histogram(
    "midstream_first_token_seconds",
    "From the claim to a prompt's first token",
    ["model"],
    buckets=SECONDS,
)
GENERATION = Histogram(
    "midstream_generation_seconds",
    "From the claim until all outputs are stored",
    ["model"],
    buckets=SECONDS,
)
DURABLE = Histogram(
    "midstream_durable_seconds",
    "From stored outputs to the last receipt, for jobs with receipts",
    ["model"],
    buckets=SECONDS,
)
JOB = Histogram("midstream_job_seconds", "From acceptance to success", ["model"], buckets=SECONDS)
RELEASE = Histogram(
    "midstream_release_seconds",
    "From POST to the response, for held responses",
    ["route"],
    buckets=SECONDS,
)

# What workers do
ATTEMPTS = Counter(
    "midstream_attempts_total", "Attempts that this worker has ended", ["model", "outcome"]
)
HARVESTED_TOKENS = Counter(
    "midstream_harvest_tokens_total", "Tokens of committed harvest units", ["model"]
)
HARVESTED_ROWS = Counter(
    "midstream_harvest_rows_total",
    "Positions whose rows are in committed harvest units",
    ["model"],
)
HARVESTED_BYTES = Counter(
    "midstream_harvest_bytes_total", "Bytes of shards of committed harvest units", ["model"]
)
HARVEST_WAITS = Counter(
    "midstream_harvest_store_failures_total",
    "Times that a harvest's store refused a write",
    ["model"],
)

# What the relay does
RECEIPTS = Counter("midstream_receipts_total", "Receipts, by outcome", ["status"])
LOST = Counter(
    "midstream_receipts_lost_jobs_total",
    "Jobs that failed because an outbox lost their receipts",
    ["worker"],
)
DISAGREEMENTS = Counter(
    "midstream_disagreements_total", "Requests whose ranks reported different actions", ["worker"]
)
REFUSED_FRAMES = Counter(
    "midstream_relay_refused_frames_total", "Frames rejected by the relay", ["reason"]
)

PROBED = Counter(
    "midstream_probed_prompts_total", "Prompts that a probe has scored", ["model", "probe"]
)
CROSSED = Counter(
    "midstream_probe_crossings_total",
    "Prompts whose aggregate reached a label's threshold",
    ["model", "probe", "label"],
)
PROBE_SCORE = Histogram(
    "midstream_probe_score",
    "A label's aggregate over a prompt and its generated tokens",
    ["model", "probe", "label"],
    buckets=SCORES,
)
#: Relative sizes; steered text usually breaks above 1.
EDIT_SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 4, 8, 16)
EDIT_SIZE = Histogram(
    "midstream_edit_relative_size",
    "Largest edit of a prompt at a site, as a share of its row's norm",
    buckets=EDIT_SIZES,
)

# What the callbacks worker does
SWEPT = Counter("midstream_swept_total", "Actions of the reaper, by kind", ["action"])
WEBHOOK_ATTEMPTS = Counter(
    "midstream_webhook_attempts_total", "Webhook attempts, by outcome", ["outcome"]
)
WEBHOOK_DEPTH = Gauge(
    "midstream_webhook_outbox_depth", "Pending deliveries, over all senders", registry=None
)
WEBHOOK_OLDEST = Gauge(
    "midstream_webhook_oldest_due_seconds", "Age of the most overdue delivery", registry=None
)

# What the API does
GLOBAL_CAPTURE_SKIPPED = Counter(
    "midstream_global_captures_left_out_total",
    "Prompts for which global capture was skipped, by reason",
    ["reason"],
)
LEDGER_DURABLE = Gauge(
    "midstream_ledger_durable",
    "1 if Redis has an append-only file and evicts no keys, or redis_allow_lossy is set",
    registry=None,
)
LEDGER = Gauge(
    "midstream_ledger_reachable", "1 if the job ledger (Redis) answers this process", registry=None
)
READY = Gauge("midstream_ready", "1 if /readyz answers 200: a job would run now", registry=None)
HELD = Gauge(
    "midstream_held_responses", "Calls to this process waiting for a job to change", registry=None
)
REFUSALS = Counter(
    "midstream_refusals_total", "Calls rejected because of a limit, a quota or overload", ["kind"]
)

#: Created now, so that a scrape right after the start shows zeros instead of nothing.
for _counter, _values in (
    (RECEIPTS, ("ok", "partial", "error", "duplicate", "stale", "unknown", "beyond_gap")),
    (WEBHOOK_ATTEMPTS, ("delivered", "retried", "failed", "disabled", "refused")),
):
    for _value in _values:
        _counter.labels(_value)


T = TypeVar("T")
#: Values of the labels, and the value.
MetricSample = tuple[tuple[str, ...], float]


class ScrapedMetric(NamedTuple, Generic[T]):
    """A metric that is read at each scrape. `samples`: returns its samples for a `T`."""

    name: str  # without the prefix, and without `_total`, which Prometheus adds to counters
    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
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
    name: str, grows: bool, words: str, value: Callable[[WorkerStats], float]
) -> ScrapedMetric[WorkerReport]:
    family = CounterMetricFamily if grows else GaugeMetricFamily
    return ScrapedMetric(
        name, family, words, ("model",), lambda report: [((report.model,), value(report.stats))]
    )


def _rank(
    name: str, grows: bool, words: str, value: Callable[[RankSteering], float]
) -> ScrapedMetric[WorkerReport]:
    return ScrapedMetric(
        f"rank_{name}",
        CounterMetricFamily if grows else GaugeMetricFamily,
        words,
        ("model", "rank"),
        lambda report: (((report.model, str(rank.rank)), value(rank)) for rank in report.ranks),
    )


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
REGISTRY.register(STORE)

GROWS = True
VARIES = False
#: Metrics of one worker, exposed by its own process.
OF_WORKER: tuple[ScrapedMetric[WorkerReport], ...] = (
    _worker("running_jobs", VARIES, "Jobs held by the worker", lambda stats: stats.jobs),
    _worker(
        "engine_running", VARIES, "Requests running in the engine", lambda stats: stats.running
    ),
    _worker(
        "engine_waiting",
        VARIES,
        "Requests that wait for the engine or for rows of the steering table",
        lambda stats: stats.waiting,
    ),
    _worker(
        "kv_cache_share",
        VARIES,
        "Share of the KV cache in use, 0 to 1",
        lambda stats: stats.kv_cache,
    ),
    _worker(
        "prompt_tokens",
        GROWS,
        "Prompt tokens of requests that have begun to generate",
        lambda stats: stats.prompt_tokens,
    ),
    _worker("generated_tokens", GROWS, "Tokens generated", lambda stats: stats.generated_tokens),
    _worker("cells", GROWS, "Sweep cells completed", lambda stats: stats.cells),
    _worker(
        "desyncs",
        GROWS,
        "Rank disagreements found by or reported to the worker",
        lambda stats: stats.desyncs,
    ),
    _worker(
        "resyncs",
        GROWS,
        "Rank disagreements that were resolved by a resync",
        lambda stats: stats.resyncs,
    ),
    _rank("rows_used", VARIES, "Rows of the steering table in use", lambda rank: rank.rows_used),
    _rank("rows", VARIES, "Rows of the steering table", lambda rank: rank.rows),
    _rank(
        "entries_used",
        VARIES,
        "Entries of the steering table in use",
        lambda rank: rank.entries_used,
    ),
    _rank("entries", VARIES, "Entries of the steering table", lambda rank: rank.entries),
    _rank(
        "outbox_depth",
        VARIES,
        "Receipts that the relay has not acknowledged",
        lambda rank: rank.outbox,
    ),
    _rank(
        "backlog_bytes", VARIES, "Captured rows waiting for the writers", lambda rank: rank.backlog
    ),
    _rank(
        "captured_rows",
        GROWS,
        "Rows captured: one hook of one layer at one position",
        lambda rank: rank.captured_rows,
    ),
    _rank(
        "captured_bytes",
        GROWS,
        "Bytes of captured rows, as stored",
        lambda rank: rank.captured_bytes,
    ),
    _rank(
        "dropped_positions",
        GROWS,
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
        """Names without values, for the registry."""
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
