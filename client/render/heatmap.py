"""Heatmap of a sweep: tokens by layers, one panel per hook, one colour scale (matplotlib, extra
`plots`).
"""

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...schemas.jobs.sweeps import SweepResult
from ..sdk.answers.grid import MEANING, Grid, described, grid_of, titled
from . import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: White where nothing changes, red above and blue below: also for people who are blind to some
#: colours.
DIVERGING = "RdBu_r"
#: Inches: of a cell, of what stands around the panels, the least and the most that a panel may
#: take, and the colour bar's width.
_COLUMN, _ROW, _AROUND, _WIDTH, _HEIGHT, _BAR = 0.1, 0.18, 1.5, (2.2, 7.0), (1.3, 11.0), 0.09
#: This many layers are numbered, about.
_TICKS = 8
#: Characters of the title in an inch.
_PER_INCH = 14


def figure(
    result: SweepResult, path: Path | str | None = None, pair: int | None = None
) -> "Figure":
    """Draw one pair, or the mean over all.

    `path`: saved there, in the format that its ending names (`.png`, `.pdf`, `.svg`, …).

    Raises MidstreamError when matplotlib is missing or cannot write that format, OSError.
    """
    if path is not None:
        check(path)
    with figures.styled():
        drawn = _draw(grid_of(result, pair), described(result, pair))
        if path is not None:
            drawn.savefig(path, dpi=figures.DPI)
    return drawn


def grid_figure(grid: Grid) -> "Figure":
    """Draw a grid that is known without its sweep.

    Raises MidstreamError when matplotlib is missing.
    """
    with figures.styled():
        return _draw(grid, [MEANING[grid.metric]])


def check(path: Path | str) -> None:
    """Check like `figures.check`, for the option `--heatmap`."""
    figures.check(path, "heatmap")


def _draw(grid: Grid, title: list[str]) -> "Figure":
    panels, rows = len(grid.hooks), len(grid.labels)
    width = float(np.clip(_COLUMN * len(grid.layers), *_WIDTH))
    height = float(np.clip(_ROW * rows, *_HEIGHT))
    wide = max(panels * width + _AROUND, 5.0)
    lines = [line for part in title for line in textwrap.wrap(part, int(wide * _PER_INCH)) or [""]]
    drawn = figures.figure_class()(
        figsize=(wide, height + 0.75 + 0.16 * len(lines)), layout="constrained"
    )
    axes = drawn.subplots(1, panels, sharex=True, sharey=True, squeeze=False)[0]
    low, high = grid.limits
    scale = {"vmin": low, "vmax": high, "cmap": DIVERGING}
    for axis, hook in zip(axes, grid.hooks, strict=True):
        # seen where there is no value
        axis.patch.set(facecolor="0.93", edgecolor="0.6", hatch="/////", linewidth=0)
        mesh = axis.pcolormesh(grid.values[hook].T, edgecolors="face", linewidth=0.1, **scale)
        axis.set_title(titled(hook), fontsize=8)
        axis.set_xlabel("layer")
        step = max(1, -(-len(grid.layers) // _TICKS))
        axis.set_xticks(
            np.arange(0, len(grid.layers), step) + 0.5,
            [str(layer) for layer in grid.layers[::step]],
        )
        axis.tick_params(length=2, width=0.6)
    size = float(np.clip(0.75 * 72 * height / max(rows, 1), 3.0, 8.0))
    axes[0].set_yticks(np.arange(rows) + 0.5, grid.names, fontsize=size)
    axes[0].invert_yaxis()
    values = np.concatenate([value.ravel() for value in grid.values.values()])
    bar = drawn.colorbar(
        mesh, ax=list(axes), extend=_beyond(values, low, high), aspect=height / _BAR, pad=0.02
    )
    middle = "" if math.isnan(grid.base) else f"; white: unpatched ({grid.base:.3g})"
    bar.set_label(f"{MEANING[grid.metric]}{middle}", fontsize=7)
    bar.outline.set_linewidth(0.6)
    if grid.missing:
        lines[-1] += f" · hatched: no value ({grid.missing} of {values.size} cells)"
    drawn.suptitle("\n".join(lines), fontsize=8)
    return drawn  # type: ignore[no-any-return]


def _beyond(values: np.ndarray, low: float, high: float) -> str:
    """Return which ends of the colour bar get an arrow, because there are values beyond."""
    ends = (bool((values < low).any()), bool((values > high).any()))
    return {
        (False, False): "neither",
        (True, False): "min",
        (False, True): "max",
        (True, True): "both",
    }[ends]
