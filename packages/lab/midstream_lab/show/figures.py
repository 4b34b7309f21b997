"""Figures of sweeps and attributions, drawn with matplotlib."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from midstream.client.render.drawing import BLUE, RED, new_figure

from ..client.attribution import Attribution, Score, estimated, marks, place_name
from ..client.grid import MEANING, Grid, described, grid_of, titled
from ..records.attributions import CheckedCell
from ..records.sweeps import SweepResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colour map with white for no change, red above, blue below; readable with colour blindness.
DIVERGING = "RdBu_r"
#: Sizes in a heatmap, in inches: width and height of a cell, the margin around the panels, the
#: smallest and largest width and height of a panel, and the colour bar's width.
_COLUMN = 0.1
_ROW = 0.18
_AROUND = 1.5
_WIDTH = (2.2, 7.0)
_HEIGHT = (1.3, 11.0)
_BAR = 0.09
#: The most edges or features in a figure; width and least height of a scatter, in inches.
_BARS = 20
_SCATTER = (4.6, 3.8)
#: The approximate number of layers with a tick label.
_TICKS = 8
#: Characters per inch of the title.
_PER_INCH = 14
#: The most cells with their names in a scatter, and the distance of two names as a share of it.
_NAMED = 8
_LINE = 0.06


def heatmap(result: SweepResult, pair: int | None = None) -> "Figure":
    """Draw one pair, or the mean of all: tokens by layers, one panel per hook, one colour scale."""
    return _draw_grid(grid_of(result, pair), described(result, pair))


def grid_figure(grid: Grid) -> "Figure":
    """Draw a grid without its sweep result, and so without prompts in the title."""
    return _draw_grid(grid, [MEANING[grid.metric]])


class _Panel(NamedTuple):
    title: str
    values: np.ndarray  # [layers, columns]
    marks: Sequence[tuple[int, int]] = ()  # (index of the layer, column)


def _draw_grid(grid: Grid, title: list[str]) -> "Figure":
    """Draw a grid, one panel per hook."""
    rows = [[_Panel(titled(hook), grid.values[hook]) for hook in grid.hooks]]
    width, height = _size(grid, rows)
    lines = _wrapped(title, width)
    drawn = new_figure(width, height + 0.75 + 0.16 * len(lines))
    middle = "" if math.isnan(grid.base) else f"; white: unpatched ({grid.base:.3g})"
    _draw_panels(drawn, grid, rows, grid.limits, f"{MEANING[grid.metric]}{middle}")
    if grid.missing:
        cells = sum(values.size for values in grid.values.values())
        lines[-1] += f" · hatched: no value ({grid.missing} of {cells} cells)"
    drawn.suptitle("\n".join(lines))
    return drawn


def _wrapped(title: list[str], width: float) -> list[str]:
    """Return the lines of a title over `width` inches."""
    return [line for part in title for line in textwrap.wrap(part, int(width * _PER_INCH)) or [""]]


def _size(grid: Grid, rows: Sequence[Sequence[_Panel]]) -> tuple[float, float]:
    """Return width and height of the panels, in inches, with the margin around."""
    width = float(np.clip(_COLUMN * len(grid.layers), *_WIDTH))
    height = float(np.clip(_ROW * len(grid.labels), *_HEIGHT))
    return max(len(rows[0]) * width + _AROUND, 5.0), len(rows) * height


def _draw_panels(
    drawn: Any,
    grid: Grid,
    rows: Sequence[Sequence[_Panel]],
    limits: tuple[float, float],
    label: str,
) -> None:
    """Draw panels of a grid's shape on a figure, with one colour scale, which `label` names."""
    names = len(grid.labels)
    height = _size(grid, rows)[1]
    axes = drawn.subplots(len(rows), len(rows[0]), sharex=True, sharey=True, squeeze=False)
    low, high = limits
    scale = {"vmin": low, "vmax": high, "cmap": DIVERGING}
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row), strict=True):
        # the background, visible in cells without a value
        axis.patch.set(facecolor="0.97", edgecolor="0.85", hatch="///", linewidth=0)
        mesh = axis.pcolormesh(panel.values.T, edgecolors="face", linewidth=0.1, **scale)
        if panel.marks:
            layers, columns = np.array(panel.marks).T + 0.5
            axis.scatter(layers, columns, marker="x", s=14, linewidths=0.9, color="black")
        step = max(1, -(-len(grid.layers) // _TICKS))
        ticks = np.arange(0, len(grid.layers), step) + 0.5
        axis.set(title=panel.title, xticks=ticks, xticklabels=grid.layers[::step])
    for axis in axes[-1]:
        axis.set(xlabel="layer")
    size = float(np.clip(0.75 * 72 * height / len(rows) / max(names, 1), 3.0, 8.0))
    for axis in axes[:, 0]:
        axis.set_yticks(np.arange(names) + 0.5, grid.names, fontsize=size)
    axes[0, 0].invert_yaxis()
    values = np.concatenate([panel.values.ravel() for row in rows for panel in row])
    look = {"extend": _beyond(values, low, high), "aspect": height / _BAR, "pad": 0.02}
    drawn.colorbar(mesh, ax=list(axes.flat), label=label, **look)


def attribution_figure(attribution: Attribution) -> "Figure":
    """Draw estimated against exact effects, if any were computed, and beside them both as maps,
    with a cross on each cell where they disagree; of edges and features, the strongest.
    """
    strongest = (attribution.edges or attribution.features)[:_BARS]
    points = [cell for cell in attribution.cells if cell.difference is not None]
    both = [(attribution.estimates, "estimate")]
    if points:
        both.append((attribution.exact, "exact"))
    crosses = marks(attribution)
    unit = MEANING[attribution.result.metric]
    rows = [
        [
            _Panel(f"{titled(hook)}: {name}", grid.effects[hook], crosses.get(hook, ()))
            for grid, name in both
        ]
        for hook in attribution.estimates.hooks
    ]
    title = described(estimated(attribution.result), attribution.pair)
    if attribution.off:
        title[-1] += " · crosses: estimate and exact value disagree"
    width, height = (_SCATTER[0], 4.0) if strongest else _size(attribution.estimates, rows)
    beside = _SCATTER[0] if points else 0.0
    lines = _wrapped(title, width + beside)
    drawn = new_figure(width + beside, max(height + 0.75, _SCATTER[1]) + 0.16 * len(lines))
    drawn.suptitle("\n".join(lines))
    right: Any = drawn
    if points:
        left, right = drawn.subfigures(1, 2, width_ratios=(beside, width), squeeze=False)[0]
        _draw_scatter(left.subplots(), attribution, points)
    if strongest:
        _draw_bars(right.subplots(), strongest, unit)
    else:
        reach = max(np.nanmax(np.abs(panel.values), initial=0) for row in rows for panel in row)
        limits = -(reach or 1.0), reach or 1.0
        _draw_panels(right, attribution.estimates, rows, limits, f"effect on {unit}")
    return drawn


def _beyond(values: np.ndarray, low: float, high: float) -> str:
    """Return the ends of the colour bar beyond which values lie, as matplotlib's `extend`."""
    return {
        (False, False): "neither",
        (True, False): "min",
        (False, True): "max",
        (True, True): "both",
    }[(bool((values < low).any()), bool((values > high).any()))]


def _draw_bars(axis: Any, scores: Sequence[Score], unit: str) -> None:
    """Draw the strongest edges or features."""
    axis.barh([item.name for item in scores], [item.score for item in scores], color=BLUE)
    axis.tick_params(axis="y", labelsize=6)
    axis.invert_yaxis()
    axis.set(xlabel=unit, title="strongest estimated effects")


def _draw_scatter(axis: Any, attribution: Attribution, cells: Sequence[CheckedCell]) -> None:
    """Draw estimated against exact effects of cells, with the names of those that disagree most."""
    exact, estimate = (
        np.array([getattr(cell, name) for cell in cells], dtype=float)
        for name in ("exact_effect", "estimate_effect")
    )
    off = np.array([cell.off for cell in cells])
    ends = float(min(exact.min(), estimate.min())), float(max(exact.max(), estimate.max()))
    axis.plot(ends, ends, color="0.6", linewidth=0.8)
    for chosen, colour, name in ((~off, BLUE, "agree"), (off, RED, "off")):
        axis.plot(
            exact[chosen],
            estimate[chosen],
            "o",
            markersize=3.5,
            color=colour,
            label=f"{name} ({chosen.sum()})",
        )
    worst = sorted(np.flatnonzero(off), key=lambda n: -abs(exact[n] - estimate[n]))[:_NAMED]
    middle = (np.mean(estimate[worst or [0]]) - ends[0]) / ((ends[1] - ends[0]) or 1.0)
    height = _LINE * max(len(worst) - 1, 0)
    lowest = float(np.clip(middle - height / 2, 0, 1 - height))
    for place, n in enumerate(sorted(worst, key=lambda n: estimate[n])):
        where = place_name(attribution.estimates.names, cells[n].column, cells[n].feature)
        axis.annotate(
            f"{where}, {cells[n].hook} {cells[n].layer}",
            (exact[n], estimate[n]),
            (1.03, lowest + place * _LINE),
            textcoords="axes fraction",
            fontsize=6,
            va="center",
            # from the name's edge: a line from its middle would cross it out
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "relpos": (0, 0.5)},
        )
    known = (
        (attribution.spearman, "rank correlation {:.2f}"),
        (attribution.recall, "recall {:.0%}"),
    )
    said = [text.format(value) for value, text in known if value is not None]
    axis.set(xlabel="exact effect", ylabel="estimated effect", box_aspect=1, anchor="N")
    axis.set(title=" · ".join(said) or "estimate against exact")
    axis.legend(loc="upper left")
