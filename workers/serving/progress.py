"""Progress of an attempt, from claim to stored outputs: metrics, a trace, and ids on log lines.

It runs in the attempt's own coroutines; a token costs one addition.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...broker.ledger.jobs.ledger import Claim
from ...broker.telemetry import logs, metrics, traces
from ...schemas.base.recent import Recent
from ...schemas.base.records import now
from ...schemas.jobs.jobs import State

logger = logging.getLogger(__name__)

#: Tenants whose tokens a worker counts.
MOST_TENANTS = 100


@dataclass
class Totals:
    """Totals of this worker since it started, including tokens of sweeps."""

    prompt_tokens: int = 0  # of prompts with a first token, and of submitted sweep requests
    generated_tokens: int = 0
    cells: int = 0
    # tenant → tokens of its prompts and of what they generated, of those that came last
    tenants: Recent[str, int] = field(default_factory=lambda: Recent(MOST_TENANTS))

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens of a tenant."""
        self.tenants[tenant] = self.tenants.get(tenant, 0) + tokens


@dataclass(eq=False)
class PromptProgress:
    """One prompt in the engine."""

    _attempt: "AttemptProgress"
    _tokens: int
    _span: traces.TraceSpan
    first: float | None = None  # time of the first token

    def add_generated(self, tokens: int) -> None:
        """Count `tokens` more generated tokens."""
        totals = self._attempt.totals
        if tokens and self.first is None:
            self.first = now()
            totals.prompt_tokens += self._tokens
            totals.charge(self._attempt.tenant, self._tokens)
            metrics.FIRST_TOKEN.labels(self._attempt.model).observe(
                max(0.0, self.first - self._attempt.claimed)
            )
            self._span.event("first token")
        totals.generated_tokens += tokens
        totals.charge(self._attempt.tenant, tokens)


class AttemptProgress:
    """Metrics and trace of one attempt at one job.

    `span.traceparent` goes to the ranks, which return it with their receipts.
    """

    def __init__(self, claim: Claim, worker: str, totals: Totals) -> None:
        job = self._job = claim.job
        self.model = job.model
        self.tenant = job.tenant
        self.totals = totals
        self.claimed = now()
        self._attempt = claim.attempt
        self.outcome = "failed"  # unless another is set
        metrics.QUEUE_WAIT.labels(job.model).observe(max(0.0, self.claimed - claim.queued))
        traces.record(
            "queue",
            job.trace,
            claim.queued,
            self.claimed,
            job=job.id,
            model=job.model,
            priority=job.priority,
        )
        self.span = traces.begin(
            "attempt",
            job.trace,
            at=self.claimed,
            kind="consumer",
            job=job.id,
            model=job.model,
            attempt=claim.attempt,
            worker=worker,
        )
        logs.bind(job=job.id, attempt=claim.attempt, trace_id=traces.trace_id(job.trace))

    @contextmanager
    def prompt(self, request: int, tokens: int) -> Iterator[PromptProgress]:
        """Enclose the time in the engine of prompt `request`, which has `tokens` tokens."""
        span = traces.begin(
            "prompt", self.span.traceparent, job=self._job.id, request=request, prompt_tokens=tokens
        )
        with logs.bound(request=request):
            prompt = PromptProgress(self, tokens, span)
            try:
                yield prompt
            except BaseException as error:
                span.fail(f"{type(error).__name__}: {error}")
                raise
            finally:
                span.end()

    def stored(self, state: State | None, receipts: bool, began: float) -> None:
        """Record that the outputs, submitted at `began`, left the job in `state` (None: the ledger
        rejected them). `receipts`: whether the job needs receipts.
        """
        if state is None:
            return
        at = now()
        metrics.GENERATION.labels(self.model).observe(max(0.0, at - self.claimed))
        if state is not State.SUCCEEDED:
            return  # the relay records the job's end
        metrics.JOB.labels(self.model).observe(max(0.0, at - self._job.created))
        if receipts:
            metrics.DURABLE.labels(self.model).observe(0.0)
            traces.record("durable", self.span.traceparent, began, at, job=self._job.id)

    def close(self) -> None:
        """End the span and log and count the outcome, which is `failed` unless another was set."""
        if self.outcome == "failed":
            self.span.fail("the job failed")
        self.span.note(outcome=self.outcome)
        self.span.end()
        logger.info("attempt over: %s after %.3f s", self.outcome, now() - self.claimed)
        metrics.ATTEMPTS.labels(self.model, self.outcome).inc()
