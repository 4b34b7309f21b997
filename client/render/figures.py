"""Draws results with matplotlib (extra `plots`), in one style, for files and notebooks."""

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...schemas.artifacts.probes import ProbeResult
from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.jobs.jobs import JobResult
from ...schemas.jobs.sweeps import SweepResult
from ...storage.harvests import Harvest
from ..captures.patterns import Attention
from ..captures.reader import CaptureReader
from ..probes import Fit
from ..sdk.answers.attribution import Attribution, attribution_of, estimated, marks
from ..sdk.answers.grid import MEANING, Grid, described, grid_of, titled
from ..sdk.readings import Features, Lens, lens_of
from .attention import Panel, panels_of, written
from .readings import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Vector files contain text as text, and a `$` in a token is drawn literally.
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "font.size": 8,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.4,
}
#: Fonts for scripts that matplotlib's own font lacks; used if installed.
_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Noto Sans",
    "Arial Unicode MS",
)
#: Dots per inch of a saved figure, and of a figure in a notebook.
DPI, _DPI_SHOWN = 200, 110


#: Colour map with white for no change, red above, blue below; readable with colour blindness.
DIVERGING = "RdBu_r"
#: Sizes in a heatmap, in inches: width and height of a cell, the margin around the panels, the
#: smallest and largest width and height of a panel, and the colour bar's width.
_COLUMN, _ROW, _AROUND, _WIDTH, _HEIGHT, _BAR = 0.1, 0.18, 1.5, (2.2, 7.0), (1.3, 11.0), 0.09
#: The most edges or features in a figure.
_BARS = 20
#: The approximate number of layers with a tick label.
_TICKS = 8
#: Characters per inch of the title.
_PER_INCH = 14
#: The most panels in an attention figure, and in one row of it.
MOST, _PANELS = 64, 4
#: Sizes in an attention figure, in inches: side of a panel per token, the smallest and largest
#: side, and the horizontal and vertical margins.
_TOKEN, _SIDE, _MARGIN = 0.11, (1.5, 4.5), (1.3, 0.9)
#: The most tokens with which the axes carry tokens as labels.
_NAMED = 64
#: The most characters of a token's label.
_NAME = 14
#: Sizes in a lens figure, in inches: width and height of a cell, and the margin around the cells.
_LENS_COLUMN, _LENS_ROW, _LENS_AROUND = 0.62, 0.2, 1.4
#: Cells with a probability above this are light, and get black text.
_LIGHT = 0.6


def matplotlib() -> Any:
    """Import matplotlib. Raises MidstreamError if the extra `plots` is not installed."""
    with Translated(
        ImportError,
        lambda error: MidstreamError(
            "unavailable", ("drawing needs matplotlib: pip install 'midstream[plots]'")
        ),
    ):
        import matplotlib
        import matplotlib.figure
        import matplotlib.font_manager
    return matplotlib


@contextmanager
def styled() -> Iterator[Any]:
    """Yield matplotlib, with our style and fonts within the context. Raises MidstreamError if
    matplotlib is missing.
    """
    module = matplotlib()
    fonts = module.font_manager.fontManager.get_font_names()
    family = {"font.family": ["DejaVu Sans", *(font for font in _FONTS if font in fonts)]}
    with module.rc_context(_STYLE | family):
        yield module


def png(drawn: "Figure") -> bytes:
    """Return the figure as a PNG at a notebook's resolution."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI_SHOWN)
    return buffer.getvalue()


@cache
def figure_class() -> Any:
    """Return a subclass of matplotlib's `Figure` that notebooks display."""
    from matplotlib.figure import Figure

    return type("Figure", (Figure,), {"_repr_png_": png, "__module__": __name__})


def check(path: Path | str, field: str) -> None:
    """Check that a figure can be written to `path`, so that an error comes before long work.

    Raises MidstreamError that names `field`.
    """
    formats = matplotlib().figure.Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in formats:
        raise invalid(
            field,
            f"{path}: the extension is not a figure format",
            allowed=", ".join(f".{name}" for name in sorted(formats)),
        )
    if not Path(path).absolute().parent.is_dir():
        raise invalid(field, f"{path}: no such folder")


def _saved(path: Path | str | None, field: str, draw: Callable[[], "Figure"]) -> "Figure":
    """Draw a figure in our style. If `path` is given, save it there, in the format of its
    extension. Raises OSError, and what `check` raises.
    """
    if path is not None:
        check(path, field)
    with styled():
        drawn = draw()
        if path is not None:
            drawn.savefig(path, dpi=DPI)
    return drawn


def _bar(bar: Any, label: str) -> None:
    """Label a colour bar."""
    bar.set_label(label, fontsize=7)
    bar.outline.set_linewidth(0.6)


# --- Sweeps


def heatmap(
    result: SweepResult, path: Path | str | None = None, pair: int | None = None
) -> "Figure":
    """Draw one pair, or the mean over all: tokens by layers, one panel per hook, one colour scale.

    `path`: save the figure there, in the format of the extension (`.png`, `.pdf`, `.svg`, …).

    Raises MidstreamError if matplotlib is missing or cannot write that format, OSError.
    """
    return _saved(
        path, "heatmap", lambda: _draw_grid(grid_of(result, pair), described(result, pair))
    )


def grid_figure(grid: Grid, path: Path | str | None = None) -> "Figure":
    """Draw a grid without its sweep result, and so without prompts in the title."""
    return _saved(path, "path", lambda: _draw_grid(grid, [MEANING[grid.metric]]))


class _Panel(NamedTuple):
    title: str
    values: np.ndarray  # [layers, columns]
    marks: Sequence[tuple[int, int]] = ()  # (index of the layer, column)


def _draw_grid(
    grid: Grid,
    title: list[str],
    rows: Sequence[Sequence[_Panel]] = (),
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Draw a grid, by default one panel per hook. `rows`: panels of its shape instead, in rows."""
    rows = rows or [[_Panel(titled(hook), grid.values[hook]) for hook in grid.hooks]]
    panels, names = len(rows[0]), len(grid.labels)
    width = float(np.clip(_COLUMN * len(grid.layers), *_WIDTH))
    height = float(np.clip(_ROW * names, *_HEIGHT))
    figure_width = max(panels * width + _AROUND, 5.0)
    lines = [
        line
        for part in title
        for line in textwrap.wrap(part, int(figure_width * _PER_INCH)) or [""]
    ]
    drawn = figure_class()(
        figsize=(figure_width, len(rows) * height + 0.75 + 0.16 * len(lines)), layout="constrained"
    )
    axes = drawn.subplots(len(rows), panels, sharex=True, sharey=True, squeeze=False)
    low, high = limits or grid.limits
    scale = {"vmin": low, "vmax": high, "cmap": DIVERGING}
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row), strict=True):
        # the background, visible in cells without a value
        axis.patch.set(facecolor="0.93", edgecolor="0.6", hatch="/////", linewidth=0)
        mesh = axis.pcolormesh(panel.values.T, edgecolors="face", linewidth=0.1, **scale)
        if panel.marks:
            layers, columns = np.array(panel.marks).T + 0.5
            axis.scatter(layers, columns, marker="x", s=14, linewidths=0.9, color="black")
        axis.set_title(panel.title, fontsize=8)
        step = max(1, -(-len(grid.layers) // _TICKS))
        axis.set_xticks(
            np.arange(0, len(grid.layers), step) + 0.5,
            [str(layer) for layer in grid.layers[::step]],
        )
        axis.tick_params(length=2, width=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    size = float(np.clip(0.75 * 72 * height / max(names, 1), 3.0, 8.0))
    for axis in axes[:, 0]:
        axis.set_yticks(np.arange(names) + 0.5, grid.names, fontsize=size)
    axes[0, 0].invert_yaxis()
    values = np.concatenate([panel.values.ravel() for row in rows for panel in row])
    bar = drawn.colorbar(
        mesh, ax=list(axes.flat), extend=_beyond(values, low, high), aspect=height / _BAR, pad=0.02
    )
    middle = "" if math.isnan(grid.base) else f"; white: unpatched ({grid.base:.3g})"
    _bar(bar, f"{MEANING[grid.metric]}{middle}")
    if missing := int(np.isnan(values).sum()):
        lines[-1] += f" · hatched: no value ({missing} of {values.size} cells)"
    drawn.suptitle("\n".join(lines), fontsize=8)
    return drawn  # type: ignore[no-any-return]


def attribution_figure(attribution: Attribution, path: Path | str | None = None) -> "Figure":
    """Draw the estimates, beside them the exact values if there are any, with a cross on each cell
    where they disagree; of edges and features, the strongest.
    """
    if scores := (attribution.edges or attribution.features)[:_BARS]:

        def bars(axis: Any) -> None:
            axis.barh([item.name for item in scores], [item.score for item in scores])
            axis.tick_params(axis="y", labelsize=6)
            axis.invert_yaxis()
            axis.set(xlabel=MEANING[attribution.result.metric], title="strongest estimated effects")

        return _chart(path, bars)
    estimate, exact, crosses = attribution.estimates, attribution.exact, marks(attribution)
    both = [(estimate, "estimate")] + [(exact, "exact")] * any(exact.cells())
    rows = [
        [
            _Panel(f"{titled(hook)}: {name}", grid.values[hook], crosses.get(hook, ()))
            for grid, name in both
        ]
        for hook in estimate.hooks
    ]
    ends = [grid.limits for grid, _ in both]
    limits = min(low for low, _ in ends), max(high for _, high in ends)
    title = described(estimated(attribution.result), attribution.pair)
    if attribution.off:
        title[-1] += " · crosses: estimate and exact value disagree"
    return _saved(path, "png", lambda: _draw_grid(estimate, title, rows, limits))


def _beyond(values: np.ndarray, low: float, high: float) -> str:
    """Return the ends of the colour bar beyond which values lie, as matplotlib's `extend`."""
    return {
        (False, False): "neither",
        (True, False): "min",
        (False, True): "max",
        (True, True): "both",
    }[(bool((values < low).any()), bool((values > high).any()))]


# --- Attention patterns


def attention_figure(
    attention: Attention, path: Path | str | None = None, panels: Sequence[Panel] | None = None
) -> "Figure":
    """Draw the patterns of `panels`, tokens by tokens.

    `panels`: (layer, head) each; by default `panels_of`. `path`: save the figure there, in the
    format of the extension. Raises MidstreamError for a head not in `attention`, too many panels, a
    missing matplotlib, or a format that matplotlib cannot write; OSError.
    """
    chosen = panels_of(attention) if panels is None else list(panels)
    return _saved(path, "figure", lambda: _draw_attention(attention, chosen))


def _draw_attention(attention: Attention, panels: Sequence[Panel]) -> "Figure":
    if not 1 <= len(panels) <= MOST:
        raise invalid("panels", f"{len(panels)} panels cannot be drawn", allowed=f"1 to {MOST}")
    names = [written(token)[:_NAME] for token in attention.tokens]
    side = float(np.clip(_TOKEN * len(names), *_SIDE))
    columns = min(len(panels), _PANELS)
    rows = math.ceil(len(panels) / columns)
    size = (columns * (side + 0.15) + _MARGIN[0], rows * (side + 0.3) + _MARGIN[1])
    drawn: Figure = figure_class()(figsize=size, layout="constrained")
    axes = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    patterns = [attention.of(*panel) for panel in panels]
    most = max(float(pattern.max(initial=0)) for pattern in patterns) or 1.0
    later = np.triu(np.ones((len(names), len(names)), dtype=bool), 1)
    for axis, (layer, head), pattern in zip(axes, panels, patterns, strict=False):
        causal = np.where(later, np.nan, pattern)
        image = axis.imshow(
            causal, cmap="Blues", vmin=0, vmax=most, interpolation="nearest", aspect="equal"
        )
        axis.set_title(f"layer {layer}, head {head}", fontsize=8)
        axis.tick_params(length=2, width=0.6)
        if len(names) <= _NAMED:
            font = float(np.clip(0.7 * 72 * side / len(names), 2.5, 7.0))
            axis.set_xticks(range(len(names)), names, fontsize=font, rotation=90)
            axis.set_yticks(range(len(names)), names, fontsize=font)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    bar = drawn.colorbar(image, ax=list(axes), aspect=rows * side / 0.09, pad=0.02)
    _bar(bar, "share of the query's attention")
    drawn.supxlabel("key", fontsize=8)
    drawn.supylabel("query", fontsize=8)
    return drawn


# --- Logit lenses


def lens_figure(
    lens: Lens, path: Path | str | None = None, places: Sequence[int] | None = None
) -> "Figure":
    """Draw the top token at each layer and position, coloured by its probability.

    `path`: save the figure there, in the format of the extension. `places`: indices into
    `lens.positions`; by default all.

    Raises MidstreamError if matplotlib is missing or cannot write that format, OSError.
    """
    chosen = range(len(lens.positions)) if places is None else places
    return _saved(path, "png", lambda: _draw_lens(lens, chosen))


def _draw_lens(lens: Lens, places: Sequence[int]) -> "Figure":
    values = np.exp(lens.logprobs[:, places, 0])

    def write(axis: Any) -> None:
        for (row, column), value in np.ndenumerate(values):
            colour = "black" if value > _LIGHT else "white"
            word = shown(lens.word(lens.tokens[row, places[column], 0]))
            axis.text(
                column + 0.5, row + 0.5, word, ha="center", va="center", fontsize=5.5, color=colour
            )
        axis.set_ylabel("layer")
        axis.tick_params(length=2, width=0.6)

    return _draw_heat(
        values,
        [str(layer) for layer in lens.layers],
        [lens.word(lens.token_ids[place]) for place in places],
        f"most likely next token, read at {lens.hook}",
        "its probability",
        _LENS_COLUMN,
        write,
        vmin=0,
        vmax=1,
        edgecolors="white",
        linewidth=0.3,
    )


# --- Features, captured rows, harvests


def features_figure(
    features: Features, path: Path | str | None = None, count: int = 20
) -> "Figure":
    """Draw the activations of the `count` largest features at each token."""
    top = [feature for feature, _ in features.top(count)]
    values = np.array([features.activations(feature) for feature in top])
    words = [features.word(place) for place in range(len(features.reading.positions))]
    reading = features.reading
    title = f"features of {reading.sae} at {reading.hook} {reading.layer}"
    return _saved(
        path, "path", lambda: _draw_heat(values, list(map(str, top)), words, title, "activation")
    )


def capture_figure(
    reader: CaptureReader,
    path: Path | str | None = None,
    hook: str | None = None,
    request: int = 0,
) -> "Figure":
    """Draw the norms of the rows of one hook, layers by tokens, on a logarithmic scale: the first
    token's norms are often a hundred times larger.
    """
    layers = reader.layers(request, hook)
    norms = [np.linalg.norm(reader.array(layer, hook, request), axis=-1) for layer in layers]
    values = np.log10(np.maximum(np.stack(norms), np.finfo(np.float32).tiny))
    names = [str(layer) for layer in layers]
    title = f"captured rows of {reader.job}"
    words = reader.words(request)
    return _saved(
        path, "path", lambda: _draw_heat(values, names, words, title, "log10 of the norm")
    )


def _draw_heat(
    values: np.ndarray,
    rows: list[str],
    columns: list[str],
    title: str,
    unit: str,
    wide: float = _LENS_COLUMN / 2,
    write: Callable[[Any], None] = lambda axis: None,
    **look: Any,
) -> "Figure":
    """Draw `values` `[rows, columns]`, with tokens as columns. `wide`: inches of a column; `write`:
    draws on the axes; `look`: of the cells.
    """
    size = (len(columns) * wide + _LENS_AROUND, len(rows) * _LENS_ROW + 1.0)
    drawn = figure_class()(figsize=size, layout="constrained")
    axis = drawn.subplots()
    mesh = axis.pcolormesh(values, cmap="viridis", **look)
    names = [shown(word) for word in columns]
    axis.set_xticks(np.arange(len(columns)) + 0.5, names, rotation=45, ha="right", fontsize=6)
    axis.set_yticks(np.arange(len(rows)) + 0.5, rows, fontsize=6)
    axis.set_title(title, fontsize=8)
    write(axis)
    _bar(drawn.colorbar(mesh, ax=axis, pad=0.01), unit)
    return drawn  # type: ignore[no-any-return]


def harvest_figure(
    harvest: Harvest, path: Path | str | None = None, count: int = 10_000
) -> "Figure":
    """Draw the distribution of the norms of the first `count` rows, for each site."""
    first = slice(0, min(count, len(harvest)))
    norms = {
        f"{hook} {layer}": np.linalg.norm(harvest.rows(first, layer, hook), axis=-1)
        for hook, layer in harvest.sites
    }

    def draw(axis: Any) -> None:
        for name, values in norms.items():
            axis.hist(values, bins=60, histtype="step", label=name)
        axis.set(xlabel="norm", ylabel="rows", title=f"first {first.stop:,} rows")

    return _chart(path, draw)


# --- Probes


def probe_figure(result: ProbeResult, path: Path | str | None = None) -> "Figure":
    """Draw the score of each label at each position, or only their aggregates if the request did
    not ask for `tokens`.
    """
    labels = list(result.scores)

    def draw(axis: Any) -> None:
        if result.tokens is None:
            axis.bar(labels, result.scores.values())
        else:
            for label, scores in zip(labels, zip(*result.tokens, strict=True), strict=True):
                axis.plot(scores, label=label, marker=".")
            axis.set_xlabel("position")
        axis.set(ylabel="score", title=result.probe)

    return _chart(path, draw)


def fit_figure(fit: Fit, path: Path | str | None = None) -> "Figure":
    """Draw accuracy and AUROC on the held-out rows beside those on shuffled labels."""
    metrics = fit.metrics

    def draw(axis: Any) -> None:
        places = np.arange(2)
        axis.bar(places - 0.2, [metrics.accuracy, metrics.auroc], 0.4, label="probe")
        shuffled = [metrics.baseline_accuracy, metrics.baseline_auroc]
        axis.bar(places + 0.2, shuffled, 0.4, label="shuffled labels")
        axis.set_xticks(places, ["accuracy", "AUROC"])
        axis.set(ylim=(0, 1), title=f"held-out rows, labels {', '.join(fit.labels)}")

    return _chart(path, draw)


def _chart(path: Path | str | None, draw: Callable[[Any], None]) -> "Figure":
    """Draw one pair of axes with a legend."""

    def drawn() -> "Figure":
        figure = figure_class()(figsize=(5.0, 3.0), layout="constrained")
        axis = figure.subplots()
        draw(axis)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=7)
        return figure  # type: ignore[no-any-return]

    return _saved(path, "path", drawn)


def job_figure(
    result: JobResult, path: Path | str | None = None, request: int = 0, **options: Any
) -> "Figure":
    """Draw what a job computed: its sweep, or one prompt's lens, features or probe scores.

    Raises MidstreamError for a job without any.
    """
    if result.sweep is not None:
        return heatmap(result.sweep, path, **options)
    if result.attribution:
        return attribution_figure(attribution_of(result), path, **options)
    computed: list[Any] = [lens_of(each) for each in result.lens or () if each.request == request]
    computed += [
        Features(result.id, each) for each in result.features or () if each.request == request
    ]
    computed += [each for each in result.probes if each.request == request]
    if not computed:
        raise MidstreamError(
            "not_found",
            f"job {result.id} computed nothing to draw for prompt {request}",
            hint="ask for lens, features or probes, or draw its rows: client.capture(job).plot()",
        )
    return plot(computed[0], path, **options)


#: Class → the function that draws it, with its path and options.
PLOTS: dict[type, Callable[..., "Figure"]] = {
    Attention: attention_figure,
    Attribution: attribution_figure,
    CaptureReader: capture_figure,
    Features: features_figure,
    Fit: fit_figure,
    Grid: grid_figure,
    Harvest: harvest_figure,
    JobResult: job_figure,
    Lens: lens_figure,
    ProbeResult: probe_figure,
    SweepResult: heatmap,
}


def plot(value: Any, path: Path | str | None = None, **options: Any) -> "Figure":
    """Draw a result of any class in `PLOTS`."""
    return PLOTS[type(value)](value, path, **options)
