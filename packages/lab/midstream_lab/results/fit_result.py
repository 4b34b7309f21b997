"""The result of a fit: what its worker stored."""

from collections.abc import Sequence

from midstream.schemas.base.records import from_msgpack
from midstream.schemas.jobs.receipts import Receipt

from ..records.fits import FitOutcome


def fit_result(stored: bytes, ticket: Sequence[Receipt]) -> FitOutcome:
    return from_msgpack(stored, FitOutcome)  # type: ignore[arg-type]
