"""The figure of a dose."""

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from midstream.client.render.drawing import BLUE, GREEN, RED, new_figure
from midstream.schemas.base.records import by_key

from ..records.doses import DoseCell, DoseResult
from .doses import measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most layers of a dose's figure.
_LAYERS = 6


def dose_figure(result: DoseResult) -> "Figure":
    """Draw effect, loss and repetition by scale, a column for each layer: the safe range is shaded,
    its ends are ringed, cells that are not safe are crossed, and bounds are dashed. Of more than
    `_LAYERS` layers, those whose safe effects are farthest from the unsteered one, up or down.
    """
    dose = result.dose
    base = result.unsteered
    cells, safe = (by_key((cell.layer, cell) for cell in of) for of in (result.cells, result.safe))
    reach = {
        layer: max(abs(cell.effect - base.effect) for cell in safe.get(layer, [base]))
        for layer in cells
    }
    farthest = sorted(cells, key=lambda layer: -reach[layer])[:_LAYERS]
    rows = (
        (measure(dose.effect), "effect", None),
        ("added loss, nats", "loss", dose.max_loss),
        ("repetition", "repetition", base.repetition + dose.max_repetition),
    )
    figure = new_figure(1.2 + 1.7 * max(len(farthest), 3), 5.0)
    axes = figure.subplots(3, len(farthest), sharex=True, sharey="row", squeeze=False)
    for column, layer in zip(axes.T, [each for each in cells if each in farthest], strict=True):
        every = [msgspec.structs.replace(base, loss=0.0), *cells[layer]]
        for axis, (_, field, bound) in zip(column, rows, strict=True):
            _draw_dose(axis, every, safe.get(layer, []), field, bound)
        column[0].set(title="all layers" if layer is None else f"layer {layer}")
        column[-1].set(xlabel="scale")
    for axis, (label, *_) in zip(axes[:, 0], rows, strict=True):
        axis.set(ylabel=label)
    some = f"{len(farthest)} of {len(cells)} layers, with the largest changes, up or down · "
    of = some if len(farthest) < len(cells) else ""
    marks = "shaded: safe · ring: largest safe scale · cross: not safe · dashed: bound"
    figure.suptitle(f"{of}{marks}")
    return figure


def _draw_dose(
    axis: Any, cells: list[DoseCell], safe: list[DoseCell], field: str, bound: float | None
) -> None:
    """Draw one field of a layer's cells by scale."""
    cells = sorted(cells, key=lambda cell: cell.scale)
    x, y = (np.array([getattr(cell, name) for cell in cells]) for name in ("scale", field))
    good = np.array([cell.safe for cell in cells])
    ends = [0.0, *(cell.scale for cell in safe)]
    axis.axvspan(min(ends), max(ends), color=GREEN, alpha=0.12, linewidth=0)
    axis.axhline(y[x == 0][0], color="0.75", linewidth=0.6)
    if bound is not None:
        axis.axhline(bound, color=RED, linewidth=0.8, linestyle="--")
    axis.plot(x, y, color=BLUE, linewidth=1.2)
    axis.plot(x[good], y[good], "o", color=BLUE, markersize=3.5)
    axis.plot(x[~good], y[~good], "x", color=RED, markersize=4)
    ringed = np.isin(x, ends[1:])
    axis.plot(x[ringed], y[ringed], "o", color=GREEN, markersize=8, fillstyle="none")
