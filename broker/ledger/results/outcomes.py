"""Reads the outcome of a job's work, as the fields of its result that its kind has."""

from collections.abc import Sequence
from typing import Any

from ....schemas.base.records import from_msgpack
from ....schemas.jobs.jobs import Output
from ....schemas.jobs.kinds import installed
from ....schemas.jobs.receipts import Receipt
from ....schemas.jobs.works import Work


def outcome(kind: str, stored: bytes | None, ticket: Sequence[Receipt]) -> dict[str, Any]:
    """Return fields of a result. `stored`: None if there is none yet, or the kind has a grid.

    Raises MidstreamError("not_installed").
    """
    row = installed(kind)
    if not stored:
        return {"outputs": []}
    if row.outcome:
        return {"outputs": [], kind: row.load("outcome")(stored, ticket)}
    return {"outputs": from_msgpack(stored, list[Output])}


def grid(
    kind: str, work: Work, units: Sequence[bytes], seconds: float | None
) -> tuple[dict[str, Any], list[Receipt]]:
    """Return the field with the grid so far, and the receipts of its units, from their records.
    `seconds`: that it took, if it is over.
    """
    found, receipts = installed(kind).load("outcome")(work, units, seconds)
    return {kind: found}, receipts
