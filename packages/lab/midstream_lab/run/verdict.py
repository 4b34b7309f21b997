"""Verdict on a sweep unit: reported numbers become a value only if every rank confirms the unit."""

from collections.abc import Sequence

from midstream.schemas.base.records import by_key
from midstream.schemas.jobs.receipts import Receipt


def unverified(report: Sequence[Sequence[Receipt]], world: int) -> str:
    """Return why a unit has no value; empty when every rank confirms each of its requests.

    `report`: for each request, the receipts of all ranks.
    """
    return next(filter(None, (_doubt(receipts, world) for receipts in report)), "")


def refusal(receipts: Sequence[Receipt]) -> str:
    """Return why the first rank whose receipt is not `ok` did not do all that was requested; empty
    when all receipts are `ok`.
    """
    reasons = (
        f"rank {receipt.rank} (stage {receipt.pp}): {receipt.message or _short(receipt)}"
        for receipt in receipts
        if receipt.verdict != "ok"
    )
    return next(reasons, "")


def _short(receipt: Receipt) -> str:
    dropped = sum(len(file.dropped) for file in receipt.files)
    return (
        f"positions were dropped under overload (count: {dropped})"
        if dropped
        else "no reason given"
    )


def _doubt(receipts: Sequence[Receipt], world: int) -> str:
    if sorted(receipt.rank for receipt in receipts) != list(range(world)):
        return f"{len(receipts)} of {world} ranks reported"
    if why := refusal(receipts):
        return why
    stages = by_key((receipt.pp, receipt.account) for receipt in receipts)
    if differing := sorted(stage for stage, accounts in stages.items() if len(set(accounts)) > 1):
        return f"the ranks of stage {differing[0]} do not report the same values"
    return ""


def graded(receipts: Sequence[Receipt]) -> list[float]:
    """Return what the first rank of the last stage has graded."""
    last = max(receipt.pp for receipt in receipts)
    return next(receipt.graded for receipt in receipts if receipt.pp == last and receipt.tp == 0)
