"""Draws results as heatmaps with matplotlib, and any result by the table of figures, `PLOTS`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...schemas.artifacts.probes import ProbeResult
from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.jobs.results import JobResult
from ..captures.patterns import Attention
from ..captures.reader import CaptureReader
from ..sdk.readings import Features, Lens, Words
from . import curves
from .attention import Panel, panels_of, written
from .drawing import check as check, new_figure, png as png, saved, shades
from .forms import form_of, formless
from .lines import computed
from .readings import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The most panels in an attention figure, and in one row of it.
MOST = 64
_PANELS = 4
#: Sizes in an attention figure, in inches: side of a panel per token, the smallest and largest
#: side, and the horizontal and vertical margins.
_TOKEN = 0.11
_SIDE = (1.5, 4.5)
_MARGIN = (1.3, 0.9)
#: The most tokens with which the axes carry tokens as labels.
_NAMED = 64
#: The most characters of a token's label.
_NAME = 14
#: Sizes in a lens figure, in inches: width and height of a cell, and the margin around the cells.
_LENS_COLUMN = 0.62
_LENS_ROW = 0.2
_LENS_AROUND = 1.4
#: The least width of a figure in inches: room for a title with a job's id.
_TITLED = 3.4
#: Cells with a probability above this are dark, and get white text: at least 4.5 to 1.
_DARK = 0.74


# --- Attention patterns


def attention_figure(attention: Attention, panels: Sequence[Panel] | None = None) -> "Figure":
    """Draw the patterns of `panels`, tokens by tokens.

    `panels`: (layer, head) each; by default `panels_of`. Raises MidstreamError for a head not in
    `attention`, and too many panels.
    """
    panels = panels_of(attention) if panels is None else panels
    if not 1 <= len(panels) <= MOST:
        raise invalid("panels", f"{len(panels)} panels cannot be drawn", allowed=f"1 to {MOST}")
    names = [written(token)[:_NAME] for token in attention.tokens]
    side = float(np.clip(_TOKEN * len(names), *_SIDE))
    columns = min(len(panels), _PANELS)
    rows = math.ceil(len(panels) / columns)
    size = (columns * (side + 0.15) + _MARGIN[0], rows * (side + 0.3) + _MARGIN[1])
    drawn: Figure = new_figure(*size)
    axes = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    patterns = [attention.of(*panel) for panel in panels]
    most = max(float(pattern.max(initial=0)) for pattern in patterns) or 1.0
    later = np.triu(np.ones((len(names), len(names)), dtype=bool), 1)
    for axis, (layer, head), pattern in zip(axes, panels, patterns, strict=False):
        causal = np.where(later, np.nan, pattern)
        image = axis.imshow(
            causal, cmap=shades(), vmin=0, vmax=most, interpolation="nearest", aspect="equal"
        )
        axis.set(title=f"layer {layer}, head {head}")
        if len(names) <= _NAMED:
            font = float(np.clip(0.7 * 72 * side / len(names), 2.5, 7.0))
            axis.set_xticks(range(len(names)), names, fontsize=font, rotation=90)
            axis.set_yticks(range(len(names)), names, fontsize=font)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    look: dict[str, Any] = {"aspect": rows * side / 0.09, "pad": 0.02}
    drawn.colorbar(image, ax=list(axes), label="share of the query's attention", **look)
    drawn.supxlabel("key")
    drawn.supylabel("query")
    return drawn


# --- Logit lenses


def lens_figure(lens: Lens, places: Sequence[int] | None = None) -> "Figure":
    """Draw the top token at each layer and position, coloured by its probability.

    `places`: indices into `lens.positions`; by default all.
    """
    places = range(len(lens.positions)) if places is None else places
    values = np.exp(lens.logprobs[:, places, 0])

    drawn = _draw_heat(
        values,
        [str(layer) for layer in lens.layers],
        [lens.tokens[place] for place in places],
        f"most likely next token, read at {lens.hook}",
        "its probability",
        _LENS_COLUMN,
        vmin=0,
        vmax=1,
        edgecolors="white",
        linewidth=0.3,
    )
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > _DARK else "black"
        word = shown(lens.word(lens.top_ids[row, places[column], 0]))
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 5.5, "color": colour}
        drawn.axes[0].text(column + 0.5, row + 0.5, word, **look)
    return drawn


# --- Features, captured rows


def features_figure(features: Features, count: int = 20) -> "Figure":
    """Draw the activations of the `count` largest features at each token. The prompt's first token
    chooses none, and sets no scale: its row is an outlier in most models.
    """
    reading = features.reading
    start = _after_outlier(reading.positions)
    top = [feature for feature, _ in features.top(count, start) or features.top(count)]
    values = np.array([features.activations(feature) for feature in top])
    return _draw_heat(
        values,
        list(map(str, top)),
        features.tokens,
        f"features of {reading.sae} at {reading.hook} {reading.layer}",
        "activation",
        row="feature",
        start=start,
    )


def capture_figure(reader: CaptureReader, hook: str | None = None, request: int = 0) -> "Figure":
    """Draw the norms of the rows of one hook, layers by tokens, on a logarithmic scale, which the
    prompt's first token does not set: its norms are often a hundred times larger.
    """
    layers = reader.layers(request, hook)
    norms = [np.linalg.norm(reader.array(layer, hook, request), axis=-1) for layer in layers]
    values = np.log10(np.maximum(np.stack(norms), np.finfo(np.float32).tiny))
    names = [str(layer) for layer in layers]
    return _draw_heat(
        values,
        names,
        reader.tokens_of(request),
        f"captured rows\n{reader.job}",
        "log10 of the norm",
        start=_after_outlier(reader.positions(request)),
    )


def _after_outlier(positions: Sequence[int]) -> int:
    """Return the index of the first position that may set a scale: not the prompt's first token,
    unless it is alone.
    """
    return 1 if len(positions) > 1 and positions[0] == 0 else 0


def _draw_heat(
    values: np.ndarray,
    rows: list[str],
    columns: list[str],
    title: str,
    unit: str,
    wide: float = _LENS_COLUMN / 2,
    row: str = "layer",
    start: int = 0,
    **look: Any,
) -> "Figure":
    """Draw `values` `[rows, columns]`, with tokens as columns. `wide`: inches of a column; `row`:
    what a row is; `start`: the first column that sets the scale; `look`: of the cells.
    """
    tokens = "token"
    if start:
        others = values[:, start:]
        look |= {"vmin": others.min(), "vmax": others.max()}
        tokens = "token; the first sets no scale"
    width = max(len(columns) * wide + _LENS_AROUND, _TITLED)
    drawn = new_figure(width, len(rows) * _LENS_ROW + 1.0)
    axis = drawn.subplots()
    mesh = axis.pcolormesh(values, cmap=shades(), **look)
    axis.set_xticks(
        np.arange(len(columns)) + 0.5,
        [shown(word) for word in columns],
        rotation=45,
        ha="right",
        fontsize=6,
    )
    axis.set_yticks(np.arange(len(rows)) + 0.5, rows, fontsize=6)
    axis.set(title=title, xlabel=tokens, ylabel=row)
    drawn.colorbar(mesh, ax=axis, pad=0.01, label=unit)
    return drawn


def job_figure(
    result: JobResult, request: int = 0, words: Words | None = None, **options: Any
) -> "Figure":
    """Draw what a job computed: what its kind has, or one prompt's lens, features or probe scores.
    `words`: token id → text. Raises MidstreamError for a job without any.
    """
    for value in computed(result, request, words):
        if draw := _drawing(type(value)):
            return draw(value, **options)
    raise MidstreamError(
        "not_found",
        f"job {result.id} computed nothing to draw for prompt {request}",
        hint="ask for lens, features or probes, or draw its rows: client.capture(job).plot()",
    )


#: Class → the function that draws it, with its options.
PLOTS: dict[type, Callable[..., "Figure"]] = {
    Attention: attention_figure,
    CaptureReader: capture_figure,
    Features: features_figure,
    JobResult: job_figure,
    Lens: lens_figure,
    ProbeResult: curves.probe_figure,
}


def _drawing(kind: type) -> Callable[..., "Figure"] | None:
    """Return the function that draws results of a class."""
    return PLOTS.get(kind) or form_of(kind).plot


def plot(value: Any, path: Path | str | None = None, **options: Any) -> "Figure":
    """Draw a result of any class in `PLOTS`, or with a form; if `path` is given, save it there, in
    the format of the extension (`.png`, `.pdf`, `.svg`, …).

    Raises MidstreamError if matplotlib or the form's package is missing, or matplotlib cannot write
    that format; OSError.
    """
    draw = _drawing(type(value))
    if draw is None:
        raise formless(value)
    return saved(path, lambda: draw(value, **options))
