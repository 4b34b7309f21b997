"""Settlement of receipts in the ledger: exactly once each, in batches.

The relay calls this with the receipts of one stream (worker, rank, epoch). A batch, the stream's
mark, the tickets and the jobs are committed in one script, so a crash cannot separate the mark from
the receipts.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import msgspec
import redis

from ....schemas.base.records import now
from ....schemas.jobs.receipts import LostRange, NumberedReceipt
from ....schemas.settings.settings import Settings
from ...telemetry import logs, metrics, traces
from ..core import scripts

log = logging.getLogger(__name__)

#: Receipts in one script call: enough to make the round trip cheap, few enough to hold Redis for a
#: few milliseconds only.
BATCH = 256
#: The same in bytes: a receipt is large only if it contains rows for the response.
BATCH_BYTES = 8 << 20
#: The least time between log lines on a worker's ranks that disagree.
DISAGREEMENT_LOG_S = 60.0


class Settled(NamedTuple):
    """Answer of `settle.lua`: the stream's mark, and what became of a batch's receipts."""

    mark: int
    applied: int  # changed a ticket
    duplicate: int  # already committed, or the rank had already reported on this request
    stale: int  # of a previous attempt, or of a job that is over: acknowledged, changes nothing
    unknown: int  # of a job that the ledger does not have (any more): acknowledged
    beyond_gap: int  # not accepted: a predecessor is missing, so the sender must replay
    disagreements: list[bytes]  # a worker and what its ranks disagree on, in turn
    partial: int  # among the applied
    errors: int  # among the applied
    succeeded: list[bytes]  # see `Settler._record`


def mark_key(worker: str, rank: int, epoch: str) -> str:
    return f"ms:mark:{worker}:{rank}:{epoch}"


class Settler:
    """Commits receipts through one synchronous Redis client; used by one thread.

    Errors of Redis (`redis.RedisError`) propagate: nothing of the failing batch counts as committed
    then, and settling it again is harmless.
    """

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._settings = settings
        self._scripts = scripts.Scripts(client)
        self._complaints = logs.Complaints(DISAGREEMENT_LOG_S)  # about workers

    def mark(self, worker: str, rank: int, epoch: str) -> int:
        """Return the sequence number of the stream up to which all receipts are committed; 0 for a
        new stream.
        """
        raw = cast(bytes | None, self._redis.get(mark_key(worker, rank, epoch)))
        return 0 if raw is None else int(raw)

    def settle(
        self, worker: str, rank: int, epoch: str, receipts: Iterable[NumberedReceipt]
    ) -> int:
        """Commit receipts, in any order; returns the stream's new mark.

        Numbers at or below the mark are dropped as duplicates; after a gap nothing is accepted, and
        the mark stays before the gap.
        """
        if not (ordered := sorted(receipts, key=lambda item: item[0])):
            return self.mark(worker, rank, epoch)
        keys = [mark_key(worker, rank, epoch)]
        for batch in _batches(ordered):
            began = now()
            settled = Settled(
                *self._scripts.settle(keys=keys, args=scripts.settle(self._settings, batch))
            )
            self._count(settled)
            self._record(batch, began, scripts.text(settled.succeeded))
            if settled.beyond_gap:
                log.warning(
                    "receipts of worker %s rank %d epoch %s: gap after %d",
                    worker,
                    rank,
                    epoch,
                    settled.mark,
                )
                break
        return settled.mark

    def lost(self, worker: str, rank: int, epoch: str, lost: LostRange) -> int:
        """Record that the sender has lost `lost.first..lost.last`: fail the jobs of these receipts
        with its message, and move the mark past the range.

        A range beyond a gap or below the mark changes nothing. Returns the stream's mark.
        """
        reply: Any = self._scripts.lost(
            keys=[mark_key(worker, rank, epoch)],
            args=scripts.pack(
                self._settings, worker=worker, rank=rank, **msgspec.structs.asdict(lost)
            ),
        )
        mark = int(reply[0])
        failed = int(reply[1])
        metrics.LOST.labels(worker).inc(failed)
        if mark == lost.last:
            log.error(
                "worker %s rank %d epoch %s lost receipts %d to %d of jobs %s; jobs failed: %d: %s",
                worker,
                rank,
                epoch,
                lost.first,
                lost.last,
                lost.jobs,
                failed,
                lost.message,
            )
        return mark

    def _count(self, settled: Settled) -> None:
        outcomes = {
            "ok": settled.applied - settled.partial - settled.errors,
            "partial": settled.partial,
            "error": settled.errors,
            "duplicate": settled.duplicate,
            "stale": settled.stale,
            "unknown": settled.unknown,
            "beyond_gap": settled.beyond_gap,
        }
        for status, count in outcomes.items():
            metrics.RECEIPTS.labels(status).inc(count)
        disagreements = scripts.text(settled.disagreements)
        for worker, detail in zip(disagreements[::2], disagreements[1::2], strict=True):
            metrics.DISAGREEMENTS.labels(worker).inc()
            # After the first, every request of the worker disagrees until its ranks are resynced.
            if self._complaints.due(worker):
                log.warning(
                    "the ranks of worker %s disagree: %s", worker, detail, extra={"worker": worker}
                )

    def _record(self, batch: list[NumberedReceipt], began: float, succeeded: list[str]) -> None:
        """Record metrics and trace spans.

        `succeeded`: id, model, created and generated of each job whose last receipt was in `batch`.
        """
        at = now()
        traced = {report.job: report.trace for _, report in batch if report.trace}
        for report in (report for _, report in batch if report.trace):
            traces.record(
                "receipt",
                report.trace,
                began,
                at,
                job=report.job,
                request=report.request,
                rank=report.rank,
                stage=report.pp,
                attempt=report.attempt,
                status=report.verdict,
                files=len(report.files),
                bytes=sum(file.bytes for file in report.files),
            )
        # every rank of a stage reports on a request that fails
        counted = [report for _, report in batch if report.tp == 0]
        for score in (score for report in counted for score in report.scores):
            metrics.PROBED.labels(score.model, score.name).inc()
            for label, value, crossed in zip(score.labels, score.score, score.crossed, strict=True):
                metrics.PROBE_SCORE.labels(score.model, score.name, label).observe(value)
                if crossed is not None:
                    metrics.CROSSED.labels(score.model, score.name, label).inc()
        for size in (size for _, report in batch for size in report.sizes):
            metrics.EDIT_SIZE.observe(size.largest)
        for job_id, model, created, generated in zip(*[iter(succeeded)] * 4, strict=True):
            metrics.DURABLE.labels(model).observe(max(0.0, at - float(generated)))
            metrics.JOB.labels(model).observe(max(0.0, at - float(created)))
            traces.record("durable", traced.get(job_id, ""), float(generated), at, job=job_id)


def _batches(receipts: Iterable[NumberedReceipt]) -> Iterator[list[NumberedReceipt]]:
    """Yield batches in order: at most `BATCH` receipts and `BATCH_BYTES` each, or one larger
    receipt.
    """
    batch: list[NumberedReceipt] = []
    size = 0
    for numbered in receipts:
        more = sum(len(result.rows) for result in numbered[1].consumed)
        if batch and (len(batch) == BATCH or size + more > BATCH_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(numbered)
        size += more
    if batch:
        yield batch
