"""Progress of an attempt, from claim to stored outputs: metrics, a trace, and ids on log lines.

All of it happens in coroutines that are there anyway; a token costs an addition.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...broker.ledger.jobs.ledger import Claim
from ...broker.ops import logs, metrics, traces
from ...schemas.base.records import now
from ...schemas.jobs.jobs import State

logger = logging.getLogger(__name__)


@dataclass
class Totals:
    """Totals of this worker since it started; tokens of sweeps included."""

    prompt_tokens: int = 0  # of prompts whose generation has begun
    generated_tokens: int = 0
    cells: int = 0


class Prompt:
    """One prompt in the engine."""

    def __init__(self, attempt: "AttemptProgress", tokens: int, span: traces.Span) -> None:
        self._attempt, self._tokens, self._span = attempt, tokens, span
        self._begun = False

    def heard(self, tokens: int) -> None:
        """The engine has generated that many tokens more."""
        totals = self._attempt.totals
        if tokens and not self._begun:
            self._begun = True
            totals.prompt_tokens += self._tokens
            metrics.FIRST_TOKEN.labels(self._attempt.model).observe(
                max(0.0, now() - self._attempt.claimed)
            )
            self._span.event("first token")
        totals.generated_tokens += tokens


class AttemptProgress:
    """One attempt at one job.

    `span.traceparent` goes to the ranks, and comes back with their receipts.
    """

    def __init__(self, claim: Claim, worker: str, totals: Totals) -> None:
        job = self._job = claim.job
        self.model, self.totals, self.claimed = job.model, totals, now()
        self._attempt = claim.attempt
        self._outcome = "failed"
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
    def prompt(self, request: int, tokens: int) -> Iterator[Prompt]:
        """While prompt `request`, which has that many tokens, is in the engine."""
        span = traces.begin(
            "prompt", self.span.traceparent, job=self._job.id, request=request, prompt_tokens=tokens
        )
        with logs.bound(request=request):
            prompt = Prompt(self, tokens, span)
            try:
                yield prompt
            except BaseException as error:
                span.fail(f"{type(error).__name__}: {error}")
                raise
            finally:
                span.end()

    def stored(self, state: State | None, receipts: bool, began: float) -> None:
        """The outputs are in the ledger, where the job is in `state` now (None: they were not
        taken). `receipts`: it waits for any; `began`: when they were handed over.
        """
        if state is None:
            return
        at = now()
        metrics.GENERATION.labels(self.model).observe(max(0.0, at - self.claimed))
        if state is not State.SUCCEEDED:
            return  # the relay sees its end
        metrics.JOB.labels(self.model).observe(max(0.0, at - self._job.created))
        if receipts:
            metrics.DURABLE.labels(self.model).observe(0.0)
            traces.record("durable", self.span.traceparent, began, at, job=self._job.id)

    def over(self, outcome: str) -> None:
        self._outcome = outcome

    def close(self) -> None:
        """However it ended."""
        if self._outcome == "failed":
            self.span.fail("the job failed")
        self.span.note(outcome=self._outcome)
        self.span.end()
        logger.info("attempt over: %s after %.3f s", self._outcome, now() - self.claimed)
        metrics.ATTEMPTS.labels(self.model, self._outcome).inc()
