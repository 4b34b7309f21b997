"""Terminal output of a dose: effect and damage of each layer and scale."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from midstream.client.render.jobs import Cells, lines

from ..records.doses import DoseCell, DoseEffect, DoseResult

#: Column of a dose → its cell.
_CELL: Cells = {
    "layer": lambda cell: _layer(cell),
    "scale": "{scale:g}",
    "effect": "{effect:.3g}",
    "loss": "{loss:.2f}",
    "repeats": "{repetition:.0%}",
    "size": "{median:.2f}",
    "text": lambda cell: escape(" ".join(cell.text.split())[:24]),
}


#: The column of whole texts.
_WHOLE: Cells = {"text": lambda cell: escape(" ".join(cell.text.split()))}


def measure(effect: DoseEffect) -> str:
    """Return what a dose measures, with its unit."""
    if effect.words:
        return "share of texts with the words"
    if effect.target:
        return f"log P(“{effect.target.strip()}”), nats per token"
    return f"score of {effect.probe}"


def drawn(result: DoseResult, whole: bool = False) -> Iterator[RenderableType]:
    """Yield a table of all cells, and the largest safe scale of each layer and sign. `whole`: with
    the whole text of each cell, one prompt at every scale.
    """
    every = [result.unsteered, *result.cells]
    title = escape(f"Dose: effect is the {measure(result.dose.effect)}")
    rows = lines(title, {**_CELL, **_WHOLE} if whole else _CELL, every)
    for row, cell in zip(rows.rows, every, strict=True):
        row.style = None if cell.safe else "red"
    yield rows
    for cell in result.safe:
        yield Text(
            f"layer {_layer(cell)}: safe up to scale {cell.scale:g}, effect {cell.effect:.3g} "
            f"({result.unsteered.effect:.3g} unsteered)"
        )
    if stopped := sum(cell.stopped > 0 for cell in every):
        of = f"{stopped} of {len(every)} cells"
        yield Text(f"a policy ended continuations of {of}, which cannot be compared")
    if not result.safe:
        yield Text("no scale is safe")


def _layer(cell: DoseCell) -> str:
    if not cell.scale:
        return "–"
    return "all" if cell.layer is None else str(cell.layer)
