"""Agreement of the ranks in each pipeline stage, from the workers' reports."""

from collections.abc import Iterable, Iterator, Mapping

from ...broker.ledger.named.steering import Account
from ...schemas.requests.steering import RankAgreement, RankSteering, StageAgreement, WorkerSteering


def agreement(accounts: Iterable[Account], asks: Mapping[str, str]) -> RankAgreement:
    """Return whether the ranks agree, over all workers and by stage.

    `asks`: model → the question that the reports of its workers must answer.

    A worker that did not answer, a rank that did not report, and a rank without a checksum count as
    disagreeing.
    """
    stages = []
    wrong = []
    for account in accounts:
        worker = account.info.worker
        report = account.report
        if not account.answers(asks[account.info.model]):
            wrong.append(f"worker {worker} did not answer")
        if report is None:
            continue
        if report.state != "serving":
            wrong.append(f"worker {worker} is {report.state}: {report.detail}")
        expected = account.info.tp * account.info.pp
        if len(report.ranks) != expected:
            wrong.append(f"worker {worker} reported {len(report.ranks)} of its {expected} ranks")
        for stage, differing in stage_agreements(report):
            stages.append(stage)
            wrong += [f"worker {worker}, stage {stage.pp}: {words}" for words in differing]
    return RankAgreement(consistent=not wrong, stages=stages, detail="; ".join(wrong))


def stage_agreements(report: WorkerSteering) -> Iterator[tuple[StageAgreement, list[str]]]:
    """Yield each stage of a worker, with descriptions of how its ranks differ."""
    for pp in sorted({rank.pp for rank in report.ranks}):
        ranks = [rank for rank in report.ranks if rank.pp == pp]
        differing = _differences(ranks)
        stage = StageAgreement(
            worker=report.worker,
            pp=pp,
            consistent=not differing,
            actions={rank.rank: rank.actions for rank in ranks},
            checksums={rank.rank: rank.checksum for rank in ranks},
        )
        yield stage, differing


#: Fields that must be equal on all ranks of a stage → their names in the detail.
SHARED = {
    "checksum": "checksum",
    "actions": "number of actions",
    "epoch": "epoch",
}


def _differences(ranks: list[RankSteering]) -> list[str]:
    """Describe how the ranks of one stage differ; empty when they agree."""
    differences = [f"rank {rank.rank} has no checksum" for rank in ranks if not rank.checksum]
    for name, words in SHARED.items():
        values = {rank.rank: getattr(rank, name) for rank in ranks}
        if any(value != values[ranks[0].rank] for value in values.values()):
            listing = ", ".join(
                f"rank {rank} {str(value) or 'none'}" for rank, value in values.items()
            )
            differences.append(f"the ranks differ in {words}: {listing}")
    return differences
