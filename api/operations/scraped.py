"""The state of the service and of its workers' steering as of the last scrape of `/metrics`."""

from collections.abc import Iterable

from prometheus_client import REGISTRY

from ...broker.ledger.named.steering import Account
from ...broker.ops.metrics import LEDGER, OF_SERVICE, OF_STEERING, Readings, SteeringReport
from ...schemas.service.status import Status
from .rank_agreement import stage_agreements

_status: list[Status] = []
_steering: list[SteeringReport] = []
REGISTRY.register(Readings(OF_SERVICE, lambda: _status))
REGISTRY.register(Readings(OF_STEERING, lambda: _steering))


def replace(status: Status | None, accounts: Iterable[Account]) -> None:
    """Keep what was read for this scrape.

    `status`: None while the ledger does not answer. Workers without a report are left out.
    """
    LEDGER.set(status is not None)
    _status[:] = [] if status is None else [status]
    _steering[:] = [
        SteeringReport(
            account.report,
            {stage.pp: stage.consistent for stage, _ in stage_agreements(account.report)},
        )
        for account in accounts
        if account.report is not None
    ]
