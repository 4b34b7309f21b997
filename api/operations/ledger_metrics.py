"""Which figures of the ledger does `/metrics` give? Those of the whole service, read when they are asked for."""

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...schemas.status import Status

OF_SERVICE: dict[str, tuple[str, Callable[[Status], float]]] = {
    "jobs_live": ("Jobs that are not over", lambda status: status.live),
    "relay_up": ("Whether the relay was seen lately", lambda status: status.relay.alive),
    "callbacks_up": ("Whether the callbacks worker was", lambda status: status.callbacks.alive),
    "redis_memory_bytes": ("Memory that Redis uses", lambda status: status.redis.used_bytes),
    "redis_memory_limit_bytes": ("Its maxmemory, 0: none", lambda status: status.redis.limit_bytes),
    "redis_memory_share": ("Used / limit, 0 without a limit", lambda status: status.redis.share),
}


class LedgerMetrics(Collector):
    """Of the last `status`; nothing while the ledger does not answer."""

    def __init__(self) -> None:
        self.status: Status | None = None

    def describe(self) -> Iterator[Metric]:
        yield _jobs()
        yield _queues()
        yield from (GaugeMetricFamily(f"midstream_{name}", words) for name, (words, _) in OF_SERVICE.items())

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is None:
            return
        jobs, queues = _jobs(), _queues()
        for model, states in status.counts.items():
            for state, count in states.items():
                jobs.add_metric([model, state], count)
        for queue in status.queues:
            queues.add_metric([queue.model, queue.priority, "sent"], queue.sent)
            queues.add_metric([queue.model, queue.priority, "waiting"], sum(queue.waiting.values()))
        yield jobs
        yield queues
        for name, (words, value) in OF_SERVICE.items():
            yield GaugeMetricFamily(f"midstream_{name}", words, value=float(value(status)))


def _jobs() -> CounterMetricFamily:
    return CounterMetricFamily("midstream_jobs", "How often jobs came into a state", labels=["model", "state"])


def _queues() -> GaugeMetricFamily:
    return GaugeMetricFamily("midstream_queue_depth", "Jobs that wait", labels=["model", "priority", "place"])


FIGURES = LedgerMetrics()
REGISTRY.register(FIGURES)
