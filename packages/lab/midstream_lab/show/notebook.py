"""Notebook output of sweeps, attributions, grids, doses and items of datasets."""

from rich.text import Text

from midstream.client.render.notebook import html, image_of, plot, png_of, record_html

from ..client.attribution import Attribution
from ..client.grid import Grid
from ..client.mapping.map import Mapped
from ..records.doses import DoseResult
from ..records.sweeps import SweepResult
from . import attributions, doses, sweeps


def sweep_png(result: SweepResult) -> bytes | None:
    """Return the heatmap as PNG; None without matplotlib."""
    return png_of(lambda: plot(result, None))


def sweep_html(result: SweepResult) -> str:
    """Return the heatmap (without matplotlib, as the terminal draws it) and the strongest cells."""
    drawn = sweep_png(result)
    if drawn is None:
        return html(sweeps.report(result))
    return image_of("heatmap", drawn) + html(sweeps.findings(result))


def attribution_html(attribution: Attribution) -> str:
    """Return the figure (without matplotlib, what the terminal prints), the cells that were
    computed exactly, and how well both agree.
    """
    drawn = png_of(lambda: plot(attribution, None))
    if drawn is None:
        return html(attributions.report(attribution))
    return image_of("attribution", drawn) + html(attributions.findings(attribution))


def dose_html(result: DoseResult) -> str:
    """Return the figure, if matplotlib is installed, and the text of each layer and scale."""
    return _figure("dose", result) + html(*doses.drawn(result, whole=True))


def grid_html(grid: Grid) -> str:
    """Return the heatmap, if matplotlib is installed, and the strongest cells."""
    return _figure("heatmap", grid) + html(sweeps.strongest_of(grid))


def _figure(name: str, result: DoseResult | Grid) -> str:
    drawn = png_of(lambda: plot(result, None))
    return image_of(name, drawn) if drawn else ""


def mapped_html(item: Mapped) -> str:
    """Return the prompt, and the result as that of a job with this prompt only."""
    return html(
        Text(f"{item.index}: {item.prompt!r}" + (" (from the cache)" if item.cached else ""))
    ) + str(record_html(item.result))
