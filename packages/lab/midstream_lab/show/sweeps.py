"""Terminal output of a sweep's result."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from midstream.client.render.jobs import count, table

from ..client.grid import MEANING, Grid, described, grid_of, titled, written
from ..records.sweeps import SweepResult

#: Characters from the middle up, and from the middle down, with their colours where there are any.
_ABOVE = ("▁▂▃▄▅▆▇█", "red")
_BELOW = ("░▒▓", "blue")
#: Values below the middle by less than this share of half the scale are drawn like the middle.
_LEAST = 0.05
#: A cell without a value.
_NONE = "·"
#: The most characters of a row's name, the most rows, the legend's width in characters, and the
#: most reasons for missing cells.
_LABEL = 18
_ROWS = 48
_LEGEND = 24
_REASONS = 5


class Heatmap:
    """A rich renderable of one pair, or the mean over all pairs, as wide as the terminal: a row for
    each token or span, a column for each layer.
    """

    def __init__(self, result: SweepResult, pair: int | None = None):
        self.result = result
        self.pair = pair
        self.grid = grid_of(result, pair)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, *rest = described(self.result, self.pair)
        yield Text(head, style="bold")
        yield from (Text(line) for line in rest)
        yield Text("")
        yield from _panels(self.grid, options.max_width)


def _cell(value: float, scale: tuple[float, float], width: int) -> Text:
    """Return a value as a block character, `width` times."""
    if np.isnan(value):
        return Text(_NONE.ljust(width), style="dim")
    low, high = scale
    # −1 to 1: the share of the way from the middle to an end of the scale
    share = float(np.clip(2 * (value - low) / (high - low) - 1, -1.0, 1.0))
    signs, colour = _BELOW if share < -_LEAST else _ABOVE
    sign = signs[min(int(abs(share) * len(signs)), len(signs) - 1)]
    return Text(sign * width, style=colour)


def _panels(grid: Grid, width: int) -> Iterator[RenderableType]:
    """Yield the lines of all hooks' panels, the legend, and notes on what was left out to fit."""
    names = grid.names
    scale = grid.limits
    shown = _strongest_columns(grid)
    label = min(_LABEL, max(cell_len(names[column]) for column in shown))
    room = max(width - label - 1, 1)
    merged = -(-len(grid.layers) // room)  # layers in one column of characters
    columns = -(-len(grid.layers) // merged)
    wide = max(1, min(3, room // columns))
    for hook in grid.hooks:
        values = _merge(grid.values[hook], grid.effects[hook], merged)
        yield Text(f"{' ' * (label + 1)}{titled(hook)}", style="bold")
        for column in shown:
            yield Text.assemble(
                (set_cell_size(names[column], label), "dim"),
                " ",
                *(_cell(value, scale, wide) for value in values[:, column]),
                no_wrap=True,
            )
        yield Text(
            " " * (label + 1) + _layer_numbers(grid.layers[::merged], wide),
            style="dim",
            no_wrap=True,
        )
    yield Text.assemble(
        f"{' ' * (label + 1)}{scale[0]:.3g} ",
        *(_cell(value, scale, 1) for value in np.linspace(*scale, _LEGEND)),
        f" {scale[1]:.3g}  ",
        MEANING[grid.metric] if width >= 80 else grid.metric,
    )
    if merged > 1:
        yield Text(
            f"a column is {merged} layers and shows the layer with the strongest effect",
            style="dim",
        )
    if len(shown) < len(names):
        yield Text(f"the {len(shown)} of {len(names)} rows with the strongest effects", style="dim")


def _strongest_columns(grid: Grid) -> list[int]:
    """Return all columns, or the `_ROWS` columns with the strongest effects, in order."""
    if len(grid.labels) <= _ROWS:
        return list(range(len(grid.labels)))
    reach = np.max(
        [np.nan_to_num(np.abs(effect)).max(axis=0) for effect in grid.effects.values()], axis=0
    )
    return sorted(np.argsort(-reach, kind="stable")[:_ROWS].tolist())


def _merge(values: np.ndarray, effects: np.ndarray, merged: int) -> np.ndarray:
    """Keep the layer with the strongest effect of every `merged` layers: `[layers, columns]` →
    `[layers / merged, columns]`.
    """
    if merged == 1:
        return values
    strength = np.where(np.isnan(values), -1.0, np.nan_to_num(np.abs(effects)))
    picked = []
    for first in range(0, len(values), merged):
        best = first + strength[first : first + merged].argmax(axis=0)
        picked.append(values[best, np.arange(values.shape[1])])
    return np.array(picked)


def _layer_numbers(layers: list[int], wide: int) -> str:
    """Return a line with as many layer numbers as fit, each under the start of its column."""
    line = ""
    for place, layer in enumerate(layers):
        if place * wide >= len(line) + (2 if line else 0) and (place % 5 == 0 or wide >= 3):
            line = line.ljust(place * wide) + str(layer)
    return line


def strongest_of(grid: Grid, count: int = 5) -> Table:
    """Return a table of the cells of a grid with the strongest effects."""
    numbers = ("layer", "value", "effect")
    rows = [
        (
            escape(grid.names[cell.column]),
            titled(cell.hook),
            str(cell.layer),
            f"{cell.value:.3f}",
            f"{cell.effect:+.3f}",
        )
        for cell in grid.top(count)
    ]
    return table("Strongest cells", "at", "hook", *numbers, rows=rows, right=numbers)


def report(result: SweepResult, pair: int | None = None, count: int = 5) -> RenderableType:
    """Return the heatmap and the findings."""
    return Group(Heatmap(result, pair), Text(""), findings(result, pair, count))


def findings(result: SweepResult, pair: int | None = None, count: int = 5) -> RenderableType:
    """Return the strongest cells, baselines, notes, and why cells have no value."""
    return Group(strongest_of(grid_of(result, pair), count), *remarks(result))


def remarks(result: SweepResult) -> list[RenderableType]:
    """Return lines with baselines, notes, and why cells have no value."""
    parts: list[RenderableType] = [Text(line, style="dim") for line in _baselines(result)]
    parts += [
        Text(f"note{_of(result, number)}: {note}", style="yellow")
        for number, item in enumerate(result.pairs)
        for note in item.notes
    ]
    return [*parts, *(Text(line, style="yellow") for line in without_value(result))]


def _of(result: SweepResult, pair: int) -> str:
    return f" of pair {pair}" if len(result.pairs) > 1 else ""


def _baselines(result: SweepResult) -> Iterator[str]:
    """Yield lines with the unpatched prompts' log-probabilities."""
    for number, pair in enumerate(result.pairs):
        for name, baseline in (("patched prompt", pair.base), ("source prompt", pair.source)):
            if baseline is None:
                continue
            logprobs = [
                f"log P({text.strip()}) = {logprob:.2f}"
                for text, logprob in (
                    (pair.answer, baseline.logprob),
                    (pair.foil, baseline.foil_logprob),
                )
                if logprob is not None
            ]
            yield (
                f"{name}{_of(result, number)}, without a patch: "
                f"{', '.join(logprobs) or f'{result.metric} {baseline.value:.3g}'}"
            )


def without_value(result: SweepResult) -> list[str]:
    """Return how many cells were skipped or failed, by reason, with an example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for item in result.skipped:
        counts[item.reason] += len(item.layers)
        label = written(result.pairs[item.pair].labels[item.column])
        examples.setdefault(item.reason, f"{item.hook} at “{label}”{_of(result, item.pair)}")
    shown = counts.most_common(_REASONS)
    lines = [
        f"{count(cells, 'cell')} without a value: {reason} (such as {examples[reason]})"
        for reason, cells in shown
    ]
    if len(counts) > _REASONS:
        lines.append(
            f"… and {sum(counts.values()) - sum(cells for _, cells in shown)} for other reasons"
        )
    return lines
