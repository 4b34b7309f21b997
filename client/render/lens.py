"""The logit lens for people: the top token of each layer and position, coloured by its probability,
on the terminal and as a figure.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...schemas.prompts.selectors import as_ranges
from ...schemas.requests.lens import TunedLens
from ..sdk.readings import Lens
from . import figures
from .jobs import facts, size
from .jobs import table as columns
from .steering import digest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters of a token that a cell shows.
_CELL = 9
#: Colours of the terminal from improbable to certain: (from this probability on, style).
_STEPS = (
    (0.8, "black on #fde725"),
    (0.5, "black on #5ec962"),
    (0.2, "white on #21918c"),
    (0.05, "white on #3b528b"),
    (0.0, "white on #440154"),
)
#: Inches: of a cell, and around the cells. Of white text on dark, and of dark text on light cells.
_COLUMN, _ROW, _AROUND = 0.62, 0.2, 1.4
_LIGHT = 0.6


def shown(word: str) -> str:
    """A token in one cell: blanks seen, and cut."""
    text = word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def table(lens: Lens, last: int = 12) -> Table:
    """The top token by layer (the last layer first) and position, the `last` positions of it."""
    places = range(max(0, len(lens.positions) - last), len(lens.positions))
    drawn = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"top next token at {lens.hook}",
        title_justify="left",
    )
    drawn.add_column("layer", justify="right", style="dim")
    for place in places:
        drawn.add_column(Text(shown(lens.word(lens.token_ids[place]))), no_wrap=True)
    for row in reversed(range(len(lens.layers))):
        cells = [_cell(lens, row, place) for place in places]
        drawn.add_row(str(lens.layers[row]), *cells)
    return drawn


def named_table(lens: Lens, place: int = -1) -> Table:
    """Rank and probability of the named tokens by layer, at the position of this place in
    `positions`.
    """
    drawn = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=f"after {lens.word(lens.token_ids[place])!r}",
        title_justify="left",
    )
    drawn.add_column("layer", justify="right", style="dim")
    for token in lens.named:
        drawn.add_column(Text(repr(lens.word(token))), justify="right")
    for row in reversed(range(len(lens.layers))):
        pairs = zip(lens.ranks[row, place], lens.named_logprobs[row, place], strict=True)
        drawn.add_row(
            str(lens.layers[row]),
            *(f"rank {rank}, {np.exp(logprob):.2%}" for rank, logprob in pairs),
        )
    return drawn


def listed(lenses: Sequence[TunedLens]) -> Table:
    """One line per tuned lens."""
    drawn = columns("Tuned lenses", "name", "reads", "layers", "bytes", "path")
    for lense in lenses:
        drawn.add_row(
            *map(
                escape,
                (lense.name, lense.hook, as_ranges(lense.layers), size(lense.bytes), lense.path),
            )
        )
    return drawn


def one(tuned: TunedLens) -> Table:
    """All about one tuned lens."""
    return facts(
        ("tuned lens", escape(tuned.name)),
        ("model", escape(tuned.model)),
        ("digest", digest(tuned)),
        ("path", escape(tuned.path)),
        ("reads", f"{tuned.hook} of layers {as_ranges(tuned.layers)}"),
        ("gives", "h + W h + b" if tuned.residual else "W h + b"),
        ("file", size(tuned.bytes)),
        ("description", escape(tuned.description)),
    )


def _cell(lens: Lens, row: int, place: int) -> Text:
    probability = float(np.exp(lens.logprobs[row, place, 0]))
    style = next(style for least, style in _STEPS if probability >= least)
    return Text(f"{shown(lens.word(lens.tokens[row, place, 0])):<{_CELL}}", style=style)


def figure(
    lens: Lens, path: Path | str | None = None, places: Sequence[int] | None = None
) -> "Figure":
    """The same as a figure.

    `path`: saved there, in the format that its ending names. `places`: of positions; by default
    all.

    Raises MidstreamError when matplotlib is missing or cannot write that format, OSError.
    """
    if path is not None:
        figures.check(path, "png")
    with figures.styled():
        drawn = _draw(lens, range(len(lens.positions)) if places is None else places)
        if path is not None:
            drawn.savefig(path, dpi=figures.DPI)
    return drawn


def _draw(lens: Lens, places: Sequence[int]) -> "Figure":
    columns, rows = len(places), len(lens.layers)
    drawn = figures.figure_class()(
        figsize=(columns * _COLUMN + _AROUND, rows * _ROW + 1.0), layout="constrained"
    )
    axis = drawn.subplots()
    values = np.exp(lens.logprobs[:, places, 0])
    mesh = axis.pcolormesh(
        values, vmin=0, vmax=1, cmap="viridis", edgecolors="white", linewidth=0.3
    )
    for row in range(rows):
        for column, place in enumerate(places):
            colour = "black" if values[row, column] > _LIGHT else "white"
            word = shown(lens.word(lens.tokens[row, place, 0]))
            axis.text(
                column + 0.5, row + 0.5, word, ha="center", va="center", fontsize=5.5, color=colour
            )
    axis.set_xticks(
        np.arange(columns) + 0.5,
        [shown(lens.word(lens.token_ids[place])) for place in places],
        rotation=45,
        ha="right",
        fontsize=6,
    )
    axis.set_yticks(np.arange(rows) + 0.5, [str(layer) for layer in lens.layers], fontsize=6)
    axis.set_ylabel("layer")
    axis.tick_params(length=2, width=0.6)
    axis.set_title(f"most likely next token, read at {lens.hook}", fontsize=8)
    bar = drawn.colorbar(mesh, ax=axis, pad=0.01)
    bar.set_label("its probability", fontsize=7)
    bar.outline.set_linewidth(0.6)
    return drawn  # type: ignore[no-any-return]
