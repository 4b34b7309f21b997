"""Draws attention patterns on a terminal: for each head a small map of tokens by tokens, as many
side by side as fit.
"""

from collections.abc import Sequence

import numpy as np
from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..captures.patterns import Attention, Behaviour
from .jobs import count, table

#: Shades of a weight, weakest first; the first marks keys with almost no attention.
_SHADES = "·░▒▓█"
#: In terminal cells: the width of a token's name, the height of a panel, the width of the legend,
#: and the gap between panels; `_PANELS` is how many panels are drawn by default.
_LABEL = 12
_LINES = 48
_LEGEND = 20
_GAP = 2
_PANELS = 12

#: A head's (layer, number).
Panel = tuple[int, int]


def panels_of(
    attention: Attention, most: int = _PANELS, behaviour: Behaviour | None = None
) -> list[Panel]:
    """Choose the heads to draw: all, if there are at most `most`; otherwise the heads with the
    highest scores for `behaviour`, or by default the strongest heads of every behaviour, ordered by
    layer and head.
    """
    if len(attention.panels) <= most:
        return attention.panels
    if behaviour is not None:
        return [(score.layer, score.head) for score in attention.scores(behaviour)[:most]]
    ranked = [
        [(score.layer, score.head) for score in attention.scores(name)]
        for name in attention.behaviours()
    ]
    by_rank = dict.fromkeys(panel for panels in zip(*ranked, strict=True) for panel in panels)
    return sorted(list(by_rank)[:most])


class Maps:
    """A rich renderable of the patterns of some heads, as wide as the terminal.

    A row is a query, a column a key, both in the order of the tokens.
    """

    def __init__(self, attention: Attention, panels: Sequence[Panel] | None = None):
        """`panels`: by default `panels_of`. Raises MidstreamError for a head not in `attention`."""
        self.attention = attention
        self.panels = panels_of(attention) if panels is None else list(panels)
        self._patterns = [attention.of(*panel) for panel in self.panels]
        self._most = (
            max((float(pattern.max(initial=0)) for pattern in self._patterns), default=0) or 1.0
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [written(token) for token in self.attention.tokens]
        label = min(_LABEL, max(map(len, names), default=1))
        room = max(options.max_width - label - 1, 1)
        merged = max(-(-len(names) // room), -(-len(names) // _LINES))  # tokens in one cell
        cells = -(-len(names) // merged)
        wide = 2 if 2 * cells <= room else 1
        per_row = max(1, (room + _GAP) // (cells * wide + _GAP))
        for first in range(0, len(self.panels), per_row):
            shown = self.panels[first : first + per_row]
            titles = [set_cell_size(_title(panel, cells * wide), cells * wide) for panel in shown]
            yield Text(" " * (label + 1) + (" " * _GAP).join(titles), style="bold", no_wrap=True)
            maps = [coarse(pattern, merged) for pattern in self._patterns[first : first + per_row]]
            for line in range(cells):
                rows = [
                    Text.assemble(*(self._cell(value, wide) for value in item[line]))
                    for item in maps
                ]
                name = set_cell_size(names[line * merged], label)
                yield Text.assemble((name, "dim"), " ", Text(" " * _GAP).join(rows), no_wrap=True)
            yield Text("")
        scale = [self._cell(value, 1) for value in np.linspace(0, self._most, _LEGEND)]
        yield Text.assemble("0 ", *scale, f" {self._most:.3g} share of the query's attention")
        if merged > 1:
            yield Text(
                f"a cell is {merged} × {merged} tokens and shows the largest weight", style="dim"
            )
        if len(self.panels) < len(self.attention.panels):
            yield Text(
                f"{len(self.panels)} of {count(len(self.attention.panels), 'head')}", style="dim"
            )

    def _cell(self, value: float, width: int) -> Text:
        if np.isnan(value):
            return Text(" " * width)
        share = min(value / self._most, 1.0)
        return Text(_SHADES[min(int(share * len(_SHADES)), len(_SHADES) - 1)] * width)


def _title(panel: Panel, width: int) -> str:
    long = "layer {} head {}".format(*panel)
    return long if len(long) <= width else "{}.{}".format(*panel)


def coarse(pattern: np.ndarray, merged: int) -> np.ndarray:
    """Return the largest weight in every block of `merged` × `merged` tokens: `[cells, cells]`; NaN
    above the diagonal, where keys are later than the query.
    """
    starts = np.arange(0, len(pattern), merged)
    result: np.ndarray = np.maximum.reduceat(
        np.maximum.reduceat(pattern, starts, axis=0), starts, axis=1
    )
    result[np.triu_indices(len(result), 1)] = np.nan
    return result


def strongest(attention: Attention, most: int = 3) -> Table:
    """Return a table of the heads with the highest scores for each behaviour."""
    best = {name: attention.scores(name)[:most] for name in attention.behaviours()}
    rows = [
        (
            behaviour,
            ", ".join(f"{score.layer}.{score.head}" for score in scores),
            ", ".join(f"{score.score:.2f}" for score in scores),
        )
        for behaviour, scores in best.items()
    ]
    return table("What heads attend to", "keys", "heads", "share", rows=rows)


def report(attention: Attention, panels: Sequence[Panel] | None = None) -> RenderableType:
    """Return the maps, the strongest heads, and the layers without a pattern."""
    absent = [
        Text(f"layer {layer} has no pattern: {why}", style="yellow")
        for layer, why in attention.absent.items()
    ]
    return Group(Maps(attention, panels), Text(""), strongest(attention), *absent)


def written(token: str) -> str:
    """Return the token on one line. If it begins with white space, symbols replace its line breaks,
    its tabs and its first space.
    """
    return (
        token.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "⏎").replace(" ", "␣", 1)
        if token[:1] in " \n\t\r"
        else token
    )
