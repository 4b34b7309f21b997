"""Terminal output of a dose: effect and damage of each layer and scale."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from ...schemas.jobs.doses import DoseCell, DoseResult
from .jobs import table


def drawn(result: DoseResult) -> Iterator[RenderableType]:
    """Yield a table of all cells, and the largest safe scale of each layer and sign."""
    rows = table("Dose", "layer", "scale", "effect", "loss", "repeats", "size", "text")
    every = [result.unsteered, *result.cells]
    for cell in every:
        figures = [f"{cell.scale:g}", f"{cell.effect:.3g}", f"{cell.loss:.2f}"]
        figures += [
            f"{cell.repetition:.0%}",
            f"{cell.median:.2f}",
            " ".join(cell.text.split())[:24],
        ]
        unsafe = "" if cell.safe else "red"
        rows.add_row(_layer(cell), *(Text(figure, style=unsafe) for figure in figures))
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
