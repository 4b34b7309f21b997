"""Changes global steering on all workers of a model, or on none, in two phases.

First, every live worker prepares the change on all its ranks and reports so; only then does the
change become the desired state, to which the workers reconcile. A worker that is late or
disconnected starts no jobs until it has the change, so no job begins under the previous steering.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from ...broker.ledger.named.steering import Account, Steering
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import now
from ...schemas.base.settings import Settings
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.steering import (
    GlobalSteering,
    Proposal,
    SteeringTemplate,
    WorkerSteering,
    content_digest,
)

log = logging.getLogger("midstream.api")

#: Seconds between reads of the workers' reports.
LOOK_S = 0.05


async def change(
    steering: Steering,
    settings: Settings,
    model: ModelInfo,
    entries: Sequence[SteeringTemplate],
    blobs: Mapping[str, bytes],
) -> GlobalSteering:
    """Steer every new request of `model` by `entries` (empty: no global steering); repeating the
    same change has no effect.

    Waits up to `steering_wait_s` for each phase. Raises MidstreamError, and then nothing has
    changed: `conflict` if a rank rejects the change or other changes keep interfering,
    `unavailable` if a live worker does not answer.
    """
    _, desired = await steering.standing(model.name, [])
    if content_digest(list(entries)) != desired.digest:
        desired = await _two_phases(steering, settings, model, entries, blobs)
    await _wait_until_applied(desired, steering, model.name, settings.steering_wait_s)
    return desired


async def _wait_until_applied(
    desired: GlobalSteering, steering: Steering, model: str, seconds: float
) -> None:
    """Wait until every worker has `desired`, until another change replaces it, or for `seconds`."""

    async def has_passed(accounts: list[Account]) -> bool:
        return (
            is_applied(accounts, desired)
            or (await steering.standing(model, []))[1].version != desired.version
        )

    await _until(has_passed, steering, model, seconds)


def is_applied(accounts: Sequence[Account], desired: GlobalSteering) -> bool:
    """Return whether every worker has `desired` on every rank."""
    return all(
        account.report is not None
        and {desired.version}
        == {account.report.global_version, *(rank.global_version for rank in account.report.ranks)}
        for account in accounts
    )


async def _two_phases(
    steering: Steering,
    settings: Settings,
    model: ModelInfo,
    entries: Sequence[SteeringTemplate],
    blobs: Mapping[str, bytes],
) -> GlobalSteering:
    proposal = await _propose(steering, settings, model.name, entries, blobs)

    async def are_decided(accounts: list[Account]) -> bool:
        return all(map(_answered(proposal), accounts)) or any(map(_refused(proposal), accounts))

    try:
        accounts = await _until(are_decided, steering, model.name, proposal.deadline - now())
        _check_prepared(accounts, proposal, settings.steering_wait_s)
        return await steering.commit(model.name, proposal.id)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await _abort(steering, model.name, proposal)
        raise


async def _abort(steering: Steering, model: str, proposal: Proposal) -> None:
    try:
        await steering.abort(model, proposal.id)
    except MidstreamError as error:  # it expires automatically
        log.warning(
            "cannot withdraw proposal %s for %s, which stays open until its deadline: %s",
            proposal.id,
            model,
            error,
        )


async def _propose(
    steering: Steering,
    settings: Settings,
    model: str,
    entries: Sequence[SteeringTemplate],
    blobs: Mapping[str, bytes],
) -> Proposal:
    """Propose the change; wait while another change is in progress."""
    deadline = time.monotonic() + settings.steering_wait_s
    while True:
        try:
            return await steering.propose(model, entries, blobs)
        except MidstreamError as error:
            if error.kind != "conflict" or time.monotonic() > deadline:
                raise
        await asyncio.sleep(LOOK_S)


async def _until(
    done: Callable[[list[Account]], Awaitable[bool]], steering: Steering, model: str, seconds: float
) -> list[Account]:
    """Return the live workers' accounts once `done` holds for them, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        accounts = await steering.accounts(model)
        if await done(accounts) or time.monotonic() > deadline:
            return accounts
        await asyncio.sleep(LOOK_S)


def _answered(proposal: Proposal) -> Callable[[Account], bool]:
    return lambda account: (
        account.report is not None
        and account.report.proposal == proposal.id
        and account.report.prepared
    )


def _refused(proposal: Proposal) -> Callable[[Account], bool]:
    return lambda account: (
        account.report is not None
        and account.report.proposal == proposal.id
        and bool(account.report.refusal)
    )


def _check_prepared(accounts: Sequence[Account], proposal: Proposal, seconds: float) -> None:
    for account in filter(_refused(proposal), accounts):
        assert account.report is not None
        raise MidstreamError(
            "conflict",
            (
                f"worker {account.info.worker} rejected it; nothing was changed: "
                f"{_reasons(account.report)}"
            ),
        )
    silent = [account.info.worker for account in accounts if not _answered(proposal)(account)]
    if silent:
        raise MidstreamError(
            "unavailable",
            (
                f"not all workers prepared the change within {seconds:g} s (missing: "
                f"{', '.join(silent)}); nothing was changed"
            ),
        )


def _reasons(report: WorkerSteering) -> str:
    """Return the messages of the ranks that failed, or else the worker's reason."""
    ranks = [f"rank {rank.rank}: {rank.message}" for rank in report.applied if not rank.ok]
    return "; ".join(ranks) or report.refusal
