"""Sizes of edits relative to the rows that they edit, and their limits."""

from typing import Annotated, Literal

import msgspec

from .records import Record

#: The smallest and the largest limit: float32 holds both.
MIN_RELATIVE = 1e-6
MAX_RELATIVE = 1e6


class EditLimit(Record):
    """A limit on ‖edit‖₂ / ‖row before it‖₂ of every edited row, over all edits of a site that have
    one owner: the request, or the operator (global steering and policies).

    `then`: whether a larger edit is scaled down to the limit, or fails the request.
    """

    relative: Annotated[float, msgspec.Meta(ge=MIN_RELATIVE, le=MAX_RELATIVE)]
    then: Literal["scale", "fail"] = "scale"

    @property
    def stored(self) -> float:
        """The form of `StoredSteering.limit`."""
        return self.relative if self.then == "scale" else -self.relative


def limit_of(stored: float) -> EditLimit | None:
    """Invert `EditLimit.stored`; None for 0, no limit."""
    if not stored:
        return None
    return EditLimit(relative=abs(stored), then="scale" if stored > 0 else "fail")


def strictest(*stored: float) -> float:
    """Return the smallest of limits as they are stored; of equal ones, that which fails."""
    return min((limit for limit in stored if limit), key=lambda it: (abs(it), it), default=0.0)


class EditSizes(Record):
    """Relative sizes ‖edit‖₂ / ‖row before it‖₂ of a prompt's edits at one hook of one layer."""

    request: int  # index of the prompt
    hook: str
    layer: int
    rows: int  # edited rows that were computed for it; those that the prefix cache served are not
    median: float  # of an even number of rows the mean of the two in the middle
    largest: float
