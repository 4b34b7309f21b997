"""A worker counts the tokens of each tenant, in its heartbeat and for Prometheus."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.broker.ledger.jobs.ledger import Claim
from midstream.broker.telemetry.scraped_metrics import OF_WORKER, ScrapedMetrics, WorkerReport
from midstream.schemas.jobs.jobs import Job, Sampling
from midstream.workers.serving import metrics
from midstream.workers.serving.progress import MOST_TENANTS, AttemptProgress, Totals


def compute(totals: Totals, tenant: str, prompt: int, *generated: int) -> None:
    """Run a job of one prompt."""
    job = Job(
        id="j",
        model="m",
        created=0.0,
        kind="completion",
        prompts=[],
        sampling=Sampling(),
        tenant=tenant,
    )
    progress = AttemptProgress(Claim(job, 1, 0.0), "w", totals)
    with progress.prompt(0, prompt) as report:
        for tokens in generated:
            report.add_generated(tokens)


def test_tokens_are_counted_for_the_tenant_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = Totals()
    compute(totals, "first", 10, 1, 2)
    compute(totals, "second", 100)  # has not begun to generate
    compute(totals, "second", 30, 1)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(metrics, "time", clock)
    attempts: Any = SimpleNamespace(totals=totals, held={})
    watch: Any = SimpleNamespace(
        ranks=[], desyncs=0, resyncs=0, last_desync="", last_desync_at=None
    )
    worker = metrics.WorkerMetrics("m", attempts, watch, lambda: 0)
    assert worker.stats().tenant_tokens == {"first": 13, "second": 31}
    clock.monotonic = lambda: 10.0
    assert worker.stats().tenant_tokens_s == {"first": 1.3, "second": 3.1}
    compute(totals, "first", 10, 1)
    clock.monotonic = lambda: 20.0
    stats = worker.stats()
    assert stats.tenant_tokens_s == {"first": 1.1}, "only who got some since then"
    (family,) = (
        each
        for each in ScrapedMetrics(OF_WORKER, lambda: [WorkerReport("m", stats, [])]).collect()
        if each.name == "midstream_tenant_tokens"
    )
    found = {sample.labels["tenant"]: sample.value for sample in family.samples}
    assert found == {"first": 24, "second": 31}


def test_the_tenants_that_came_last_are_counted() -> None:
    totals = Totals()
    for number in range(MOST_TENANTS + 5):
        compute(totals, f"t{number}", 1, 1)
        compute(totals, "often", 1, 1)
    assert len(totals.tenants) == MOST_TENANTS
    assert totals.tenants["often"] == 2 * (MOST_TENANTS + 5)
    assert "t0" not in totals.tenants
