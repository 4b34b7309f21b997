"""Which figures of the workers' steering does `/metrics` give? What they reported last, in a table."""

from collections.abc import Callable, Iterable

from prometheus_client import Gauge

from ...broker.ledger.steering import Account
from ...schemas.steering import RankSteering, WorkerSteering
from .rank_agreement import stage_agreements

OF_WORKER: dict[str, tuple[str, Callable[[WorkerSteering], float]]] = {
    "waiting": ("Requests that wait for rows of the steering table", lambda report: report.waiting),
    "desyncs": ("Disagreements of ranks found since the worker started", lambda report: report.desyncs),
    "resyncs": ("Disagreements that ended well, all ranks made equal", lambda report: report.resyncs),
    "global_version": ("Version of the global steering that all ranks have applied", lambda report: report.global_version),
}
OF_RANK: dict[str, tuple[str, Callable[[RankSteering], float]]] = {
    "rows_used": ("Rows of the steering table in use", lambda rank: rank.rows_used),
    "rows": ("Rows of the steering table", lambda rank: rank.rows),
    "entries_used": ("Entries of the steering table in use", lambda rank: rank.entries_used),
    "entries": ("Entries of the steering table", lambda rank: rank.entries),
    "vectors": ("Tensors on the rank", lambda rank: rank.vectors),
    "requests": ("Requests with an intervention or a capture on the rank", lambda rank: rank.requests),
    "actions": ("Actions in the rank's ledger", lambda rank: rank.actions),
    "outbox": ("Receipts that the relay has not taken yet", lambda rank: rank.outbox),
    "backlog_bytes": ("Captured rows that wait for the writers", lambda rank: rank.backlog),
}

_workers = {name: Gauge(f"midstream_steering_{name}", words, ["model", "worker"]) for name, (words, _) in OF_WORKER.items()}
_ranks = {name: Gauge(f"midstream_steering_{name}", words, ["model", "worker", "rank"]) for name, (words, _) in OF_RANK.items()}
STATE = Gauge("midstream_steering_state", "1 for the state that the worker is in", ["model", "worker", "state"])
CONSISTENT = Gauge("midstream_steering_consistent", "Whether the ranks of a pipeline stage agree", ["model", "worker", "stage"])


def clear() -> None:
    """Forget workers that are gone."""
    for gauge in (*_workers.values(), *_ranks.values(), STATE, CONSISTENT):
        gauge.clear()


def fill(accounts: Iterable[Account]) -> None:
    """Take over what the workers reported; who has not reported yet is not there."""
    for report in (account.report for account in accounts):
        if report is None:
            continue
        STATE.labels(report.model, report.worker, report.state).set(1)
        for name, (_, value) in OF_WORKER.items():
            _workers[name].labels(report.model, report.worker).set(value(report))
        for rank in report.ranks:
            for name, (_, of_rank) in OF_RANK.items():
                _ranks[name].labels(report.model, report.worker, rank.rank).set(of_rank(rank))
        for stage, _ in stage_agreements(report):
            CONSISTENT.labels(report.model, report.worker, stage.pp).set(stage.consistent)
