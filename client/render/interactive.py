"""Draws grids, captured rows and logit lenses with plotly (extra `notebook`), with values under the
pointer.
"""

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ..frames import plotly
from ..sdk.answers.grid import MEANING, Grid, titled

if TYPE_CHECKING:
    from ..captures.reader import CaptureReader
    from ..sdk.readings import Lens

#: Pixels: the height of a heatmap's row, and the margin around the panels.
_ROW, _AROUND = 18, 160
_WIDTH = 420  # of a panel


def grid_figure(grid: Grid) -> Any:
    """Draw tokens by layers, one panel for each hook; one diverging scale with the unpatched value
    in its middle; effects under the pointer.
    """
    module = plotly()
    drawn = module.subplots.make_subplots(
        1, len(grid.hooks), shared_yaxes=True, subplot_titles=[titled(hook) for hook in grid.hooks]
    )
    low, high = grid.limits
    # numbered, because plotly merges rows of the same name
    names = [_text(f"{number} {name}") for number, name in enumerate(grid.names)]
    for place, hook in enumerate(grid.hooks):
        panel = module.graph_objects.Heatmap(
            z=grid.values[hook].T,
            x=grid.layers,
            y=names,
            customdata=grid.effects[hook].T,
            zmin=low,
            zmax=high,
            colorscale="RdBu_r",
            showscale=place == 0,
            colorbar={"title": MEANING[grid.metric]},
            name=hook,
            hovertemplate=(
                "%{y}<br>layer %{x}<br>value %{z:.4g}<br>effect "
                "%{customdata:.4g}<extra>%{fullData.name}</extra>"
            ),
        )
        drawn.add_trace(panel, row=1, col=place + 1)
    drawn.update_xaxes(title="layer")
    drawn.update_yaxes(autorange="reversed")
    return _sized(drawn, len(names), len(grid.hooks))


def capture_figure(reader: "CaptureReader", hook: str | None, request: int) -> Any:
    """Draw the norms of captured rows: tokens by layers.

    Colours are logarithmic, because the first token's norms are often a hundred times larger.
    """
    module = plotly()
    layers = reader.layers(request, hook)
    # [layers, positions]
    norms = np.stack(
        [np.linalg.norm(reader.array(layer, hook, request), axis=-1) for layer in layers]
    )
    names = _tokens(reader.positions(request), reader.tokens_of(request))
    panel = module.graph_objects.Heatmap(
        z=np.log10(np.maximum(norms, np.finfo(np.float32).tiny)).T,
        x=layers,
        y=names,
        customdata=norms.T,
        colorscale="Viridis",
        colorbar={"title": "log10 of the norm"},
        hovertemplate="%{y}<br>layer %{x}<br>norm %{customdata:.4g}<extra></extra>",
    )
    drawn = module.graph_objects.Figure(panel)
    drawn.update_xaxes(title="layer")
    drawn.update_yaxes(autorange="reversed")
    return _sized(drawn, len(names), 1)


def lens_figure(lens: "Lens") -> Any:
    """Draw the probability of the most likely next token: layers by positions; all top tokens under
    the pointer.
    """
    module = plotly()
    texts = [
        [
            "<br>".join(
                f"{_text(repr(lens.word(token)))} {np.exp(logprob):.1%}"
                for token, logprob in zip(*cell, strict=True)
            )
            for cell in zip(tokens, logprobs, strict=True)
        ]
        for tokens, logprobs in zip(lens.top_ids, lens.logprobs, strict=True)
    ]
    panel = module.graph_objects.Heatmap(
        z=np.exp(lens.logprobs[:, :, 0]),
        x=_tokens(lens.positions, lens.tokens),
        y=lens.layers,
        text=texts,
        zmin=0,
        zmax=1,
        colorscale="Viridis",
        colorbar={"title": "probability"},
        hovertemplate="layer %{y} at %{x}<br>%{text}<extra></extra>",
    )
    drawn = module.graph_objects.Figure(panel)
    drawn.update_yaxes(title="layer")
    return _sized(drawn, len(lens.layers), 2)


def _sized(drawn: Any, rows: int, panels: int) -> Any:
    drawn.update_layout(
        height=_ROW * rows + _AROUND, width=_WIDTH * panels + _AROUND, template="plotly_white"
    )
    return drawn


def _tokens(positions: Sequence[int], words: Sequence[str]) -> list[str]:
    return [_text(f"{position} {word}") for position, word in zip(positions, words, strict=True)]


def _text(text: str) -> str:
    """Escape text, because plotly interprets HTML tags in labels."""
    return escape(repr(text)[1:-1])


#: Name of a type → the function that draws it.
FIGURES: dict[str, Callable[..., Any]] = {
    "Grid": grid_figure,
    "CaptureReader": capture_figure,
    "Lens": lens_figure,
}
