"""The result of a fit: what its worker stored."""

from collections.abc import Sequence

from ....schemas.base.records import from_msgpack
from ....schemas.jobs.fits import FitOutcome
from ....schemas.jobs.receipts import Receipt


def fit_result(stored: bytes, ticket: Sequence[Receipt]) -> FitOutcome:
    return from_msgpack(stored, FitOutcome)  # type: ignore[arg-type]
