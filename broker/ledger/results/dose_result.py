"""The result of a dose: the worker's figures of each cell, with the ranks' sizes and scores."""

from collections.abc import Sequence

import numpy as np

from ....schemas.jobs.doses import DoseCell, DoseMeasured, DoseResult
from ....schemas.jobs.receipts import Receipt


def dose_result(measured: DoseMeasured, ticket: Sequence[Receipt]) -> DoseResult:
    """Return the result. `ticket`: the receipts that have arrived."""
    dose, cells = measured.dose, list[DoseCell]()
    for number, (layer, scale) in enumerate(dose.cells):
        loss = measured.loss[number] - measured.loss[0]
        repetition = measured.repetition[number]
        own = [receipt for receipt in ticket if receipt.request // dose.requests == number]
        sizes = [size for receipt in own for size in receipt.sizes]
        cell = DoseCell(
            layer=layer,
            scale=scale,
            effect=_probe_effect(measured, own) if dose.effect.probe else measured.effect[number],
            loss=loss,
            repetition=repetition,
            safe=loss <= dose.max_loss
            and repetition - measured.repetition[0] <= dose.max_repetition,
            median=float(np.median([size.median for size in sizes])) if sizes else 0.0,
            largest=max((size.largest for size in sizes), default=0.0),
            text=measured.texts[number][0],
        )
        cells.append(cell)
    unsteered, *steered = cells
    effect = dose.effect
    return DoseResult(
        effect=f"mean score of {effect.probe}"
        if effect.probe
        else "log-probability of the target, nats per token"
        if effect.target
        else "share of texts with the words",
        unsteered=unsteered,
        cells=steered,
        safe=[
            cell
            for layer in dose.layers
            for sign in (-1, 1)
            if (cell := _largest_safe(steered, layer, sign)) is not None
        ],
        max_loss=dose.max_loss,
        max_repetition=dose.max_repetition,
    )


def _probe_effect(measured: DoseMeasured, receipts: Sequence[Receipt]) -> float:
    """Return the mean score over the continued prompts; 0 while no receipt has arrived."""
    effect = measured.dose.effect
    scores = [
        score.score[0 if effect.label is None else score.labels.index(effect.label)]
        for receipt in receipts
        if measured.dose.continues(receipt.request)
        for score in receipt.scores
        if score.name == effect.probe and not score.watching
    ]
    return float(np.mean(scores)) if scores else 0.0


def _largest_safe(cells: Sequence[DoseCell], layer: int | None, sign: int) -> DoseCell | None:
    """Return a layer's last cell, away from scale 0, before the first that is not safe."""
    found = None
    for cell in sorted(cells, key=lambda cell: abs(cell.scale)):
        if cell.layer == layer and cell.scale * sign > 0:
            if not cell.safe:
                return found
            found = cell
    return found
