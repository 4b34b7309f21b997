"""What became of a job's work, as the field of its result that its kind has."""

from collections.abc import Callable, Sequence
from typing import Any

from ....schemas.base import from_msgpack
from ....schemas.jobs.doses import DoseResult
from ....schemas.jobs.fits import FitOutcome
from ....schemas.jobs.jobs import Output
from ....schemas.jobs.receipts import Receipt
from .attribution_result import attribution_result
from .dose_result import with_receipts
from .sweep_result import sweep_result

#: Kind of a job → what returns the field `kind` of its result, from the outcome that its worker
#: stored and the receipts. Other kinds have outputs.
OUTCOMES: dict[str, Callable[[bytes, Sequence[Receipt]], Any]] = {
    "dose": lambda stored, ticket: with_receipts(from_msgpack(stored, DoseResult), ticket),
    "fit": lambda stored, _: from_msgpack(stored, FitOutcome),  # type: ignore[arg-type]
}
#: Kind with a grid → what returns the field `kind` of its result, from the sweep, the records of
#: its units, and the seconds that it took, if it is over.
GRIDS: dict[str, Callable[..., Any]] = {
    "sweep": sweep_result,
    "attribution": attribution_result,
}


def outcome(kind: str, stored: bytes | None, ticket: Sequence[Receipt]) -> dict[str, Any]:
    """Return fields of a result. `stored`: None if there is none yet, or the kind has a grid."""
    if stored and kind in OUTCOMES:
        return {"outputs": [], kind: OUTCOMES[kind](stored, ticket)}
    return {"outputs": from_msgpack(stored, list[Output]) if stored else []}
