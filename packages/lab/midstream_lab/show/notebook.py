"""Notebook output of sweeps, grids and doses."""

from midstream.client.render.notebook import html, image_of, plot, png_of

from ..client.grid import Grid
from ..records.doses import DoseResult
from ..records.sweeps import SweepResult
from . import doses, sweeps


def sweep_png(result: SweepResult, pair: int | None = None) -> bytes | None:
    """Return the heatmap as PNG; None without matplotlib."""
    return png_of(lambda: plot(result, None, pair=pair))


def sweep_html(result: SweepResult, pair: int | None = None) -> str:
    """Return the heatmap (without matplotlib, as the terminal draws it) and the strongest cells."""
    drawn = sweep_png(result, pair)
    if drawn is None:
        return html(sweeps.report(result, pair))
    return image_of("heatmap", drawn) + html(sweeps.findings(result, pair))


def dose_html(result: DoseResult) -> str:
    """Return the figure, if matplotlib is installed, and the text of each layer and scale."""
    drawn = png_of(lambda: plot(result, None))
    return (image_of("dose", drawn) if drawn else "") + html(*doses.drawn(result, whole=True))


def grid_html(grid: Grid) -> str:
    """Return the heatmap, if matplotlib is installed, and the strongest cells."""
    drawn = png_of(lambda: plot(grid, None))
    return (image_of("heatmap", drawn) if drawn else "") + html(sweeps.strongest_of(grid))
