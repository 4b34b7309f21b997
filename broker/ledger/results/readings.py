"""Joins what ranks computed of captured rows (`schemas.readings`) into results, prompt by
prompt.
"""

from collections.abc import Sequence
from typing import Any

from ....schemas.base.records import by_key
from ....schemas.jobs.receipts import Receipt
from ....schemas.readings.readings import READINGS, part_decoder
from ....schemas.readings.stored import READER

_FIELDS = {kind.part: field for field, kind in READINGS.items()}


def readings(ticket: Sequence[Receipt]) -> dict[str, list[Any]]:
    """Return field of a result → its complete readings, whose parts have all arrived, by prompt."""
    parts = (
        (receipt.request, part_decoder.decode(made.rows))
        for receipt in ticket
        for made in receipt.consumed
        if made.name == READER and made.ok
    )
    of_one: dict[tuple[int, int, Any], list[Any]] = by_key(
        ((request, part.capture, type(part)), part) for request, part in parts
    )
    result: dict[str, list[Any]] = {}
    for request, capture, kind in sorted(of_one, key=lambda key: key[:2]):
        if (joined := kind.joined(request, of_one[request, capture, kind])) is not None:
            result.setdefault(_FIELDS[kind], []).append(joined)
    return result
