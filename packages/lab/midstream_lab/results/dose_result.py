"""The result of a dose: the worker's figures, with what the ranks report of sizes and scores."""

from collections.abc import Sequence

import msgspec
import numpy as np

from midstream.schemas.base.records import from_msgpack
from midstream.schemas.jobs.receipts import Receipt

from ..records.doses import DoseCell, DoseResult


def dose_result(stored: bytes, ticket: Sequence[Receipt]) -> DoseResult:
    """Return the result that the worker stored, completed with the receipts that have arrived."""
    result = from_msgpack(stored, DoseResult)
    cells = [
        _completed(
            result,
            cell,
            [item for item in ticket if number == item.request // result.dose.requests],
        )
        for number, cell in enumerate([result.unsteered, *result.cells])
    ]
    layers = dict.fromkeys(cell.layer for cell in cells[1:])
    safe = [_largest_safe(cells[1:], layer, sign) for layer in layers for sign in (-1, 1)]
    return msgspec.structs.replace(
        result,
        unsteered=cells[0],
        cells=cells[1:],
        safe=[cell for cell in safe if cell is not None],
    )


def _completed(result: DoseResult, cell: DoseCell, receipts: Sequence[Receipt]) -> DoseCell:
    dose = result.dose
    sizes = [size for receipt in receipts for size in receipt.sizes]
    scores = [
        score.score[0]
        for receipt in receipts
        if dose.continues(receipt.request)
        for score in receipt.scores
        if score.name == dose.effect.probe
    ]
    return msgspec.structs.replace(
        cell,
        effect=float(np.mean(scores)) if scores else cell.effect,
        median=float(np.median([size.median for size in sizes])) if sizes else 0.0,
        largest=max((size.largest for size in sizes), default=0.0),
    )


# From zero on: a cell behind a collapse may look safe, because text that repeats one rare token can
# have a low loss by chance.
def _largest_safe(cells: Sequence[DoseCell], layer: int | None, sign: int) -> DoseCell | None:
    """Return a layer's last cell, away from scale 0, before the first that is not safe."""
    found = None
    for cell in sorted(cells, key=lambda cell: abs(cell.scale)):
        if cell.layer == layer and cell.scale * sign > 0:
            if not cell.safe:
                return found
            found = cell
    return found
