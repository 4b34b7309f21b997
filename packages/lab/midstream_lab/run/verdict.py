"""Verdict on a sweep unit: reported numbers become a value only if every rank confirms the unit."""

from collections.abc import Sequence

from midstream.schemas.base.errors import Translated
from midstream.schemas.base.records import by_key
from midstream.schemas.jobs.receipts import Receipt

from ..records.sweep_units import Node
from ..records.sweeps import StoredPair
from ..results.sweep_metrics import Grades, grades


class UnverifiedUnit(Exception):
    """The unit has no value; the text gives the reason."""


def verdict(
    pair: StoredPair,
    nodes: Sequence[Node],
    report: Sequence[Sequence[Receipt]],
    world: int,
    compared: bool,
) -> Grades:
    """Returns the grades of a unit's requests.

    `report`: for the request of each node, the receipts of all ranks. `compared`: the first request
    was compared with the clean prompt. Raises UnverifiedUnit.
    """
    verified(report, world)
    with Translated(ValueError, lambda error: UnverifiedUnit(str(error))):
        return grades(pair, nodes, [_graded(receipts) for receipts in report], compared)


def verified(report: Sequence[Sequence[Receipt]], world: int) -> None:
    """Raises UnverifiedUnit unless every rank confirms each of the requests."""
    for receipts in report:
        _check(receipts, world)


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


def _check(receipts: Sequence[Receipt], world: int) -> None:
    if sorted(receipt.rank for receipt in receipts) != list(range(world)):
        raise UnverifiedUnit(f"{len(receipts)} of {world} ranks reported")
    if why := refusal(receipts):
        raise UnverifiedUnit(why)
    stages = by_key((receipt.pp, receipt.account) for receipt in receipts)
    if differing := sorted(stage for stage, accounts in stages.items() if len(set(accounts)) > 1):
        raise UnverifiedUnit(f"the ranks of stage {differing[0]} do not report the same values")


def _graded(receipts: Sequence[Receipt]) -> list[float]:
    """Returns what the first rank of the last stage has graded."""
    last = max(receipt.pp for receipt in receipts)
    return next(receipt.graded for receipt in receipts if receipt.pp == last and receipt.tp == 0)
