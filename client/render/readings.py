"""Terminal output of readings: logit lens, SAE features and probe scores, by token."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.align import Align
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...schemas.jobs.results import JobResult
from ...schemas.prompts.selectors import as_ranges
from ..sdk.readings import Features, Lens, Words, known_tokens, lens_of
from .jobs import bare, table

#: The most prompts whose readings are shown.
PROMPTS = 4
#: The most ranges of steered tokens in a cell.
_RUNS = 6
#: The most characters of a token in a cell.
_CELL = 9
#: The name of the column of layers.
_LAYER = "layer"
#: Terminal colours, most probable first: (smallest probability, style).
_STEPS = (
    (0.8, "black on #fde725"),
    (0.5, "black on #5ec962"),
    (0.2, "#ffffff on #177873"),
    (0.05, "#ffffff on #3b528b"),
    (0.0, "#ffffff on #440154"),
)
#: What the colours of a lens mean.
KEY = Text.assemble("probability from", *((f" {least:.0%} ", style) for least, style in _STEPS))


def shown(word: str) -> str:
    """Return a token for one cell: white space as symbols, long text cut."""
    text = word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


class _Column(NamedTuple):
    head: Text
    cells: Sequence[RenderableType]  # of each layer
    width: int  # characters


class LayerTable:
    """A rich renderable with a row for each layer, the last one first. Columns that do not fit side
    by side stand below each other, each time with the layers.
    """

    def __init__(
        self, title: str, layers: Sequence[int], columns: Sequence[_Column], *, gap: int = 1
    ):
        """`gap`: the characters between two columns."""
        self.title: str | None = title
        self.layers = layers
        self._columns = columns
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = self.title
        for columns in self._parts(options.max_width - len(_LAYER) - self._gap):
            yield self._part(columns, title)
            title = None

    def _parts(self, room: int) -> Iterator[list[_Column]]:
        """Yield the columns that stand side by side in `room` characters, at least one."""
        part: list[_Column] = []
        left = room
        for column in self._columns:
            if part and column.width > left:
                yield part
                part = []
                left = room
            part.append(column)
            left -= column.width + self._gap
        if part:
            yield part

    def _part(self, columns: Sequence[_Column], title: str | None) -> Table:
        drawn = bare(title, gap=self._gap)
        drawn.add_column(_LAYER, justify="right", style="dim", no_wrap=True)
        for column in columns:
            drawn.add_column(column.head)
        for row in reversed(range(len(self.layers))):
            drawn.add_row(str(self.layers[row]), *[column.cells[row] for column in columns])
        return drawn


def lens_table(lens: Lens, last: int = 12) -> LayerTable:
    """Return a table of top tokens, with a column for each of the `last` positions."""
    rows = range(len(lens.layers))
    columns = []
    for place in range(max(0, len(lens.positions) - last), len(lens.positions)):
        words = [lens.tokens[place], *map(lens.word, lens.top_ids[:, place, 0])]
        width = max(cell_len(shown(word)) for word in words)
        cells = [_cell(lens, row, place) for row in rows]
        columns.append(_Column(_word(lens.tokens[place]), cells, width))
    return LayerTable(f"top next token at {lens.hook}", lens.layers, columns)


def named_table(lens: Lens, place: int = -1) -> LayerTable:
    """Return a table of the named tokens' ranks and probabilities by layer, at the position
    `lens.positions[place]`.
    """
    columns = []
    for number, token in enumerate(lens.named):
        head = repr(lens.word(token))
        shares = np.exp(lens.named_logprobs[:, place, number])
        ranks = lens.ranks[:, place, number]
        cells = [f"rank {rank}, {share:.2%}" for rank, share in zip(ranks, shares, strict=True)]
        width = max(map(cell_len, (head, *cells)))
        texts = [Text(cell.rjust(width)) for cell in (head, *cells)]
        columns.append(_Column(texts[0], texts[1:], width))
    return LayerTable(f"after {lens.tokens[place]!r}", lens.layers, columns, gap=2)


def _word(word: str) -> Text:
    """Return a token that stays on its line: a column that is too narrow cuts it."""
    return Text(shown(word), no_wrap=True, overflow="ellipsis")


def _cell(lens: Lens, row: int, place: int) -> Align:
    probability = float(np.exp(lens.logprobs[row, place, 0]))
    style = next(style for least, style in _STEPS if probability >= least)
    return Align.left(_word(lens.word(lens.top_ids[row, place, 0])), style=style)


def features_table(features: Features, most: int = 5) -> Table:
    """Return a table with one line per token: the number of active features, the reconstruction
    error, and the `most` most active features.
    """
    reading = features.reading
    drawn = bare(f"features of {reading.sae} at {reading.hook} of layer {reading.layer}")
    for name in ("position", "token", "active", "error", "feature: activation"):
        drawn.add_column(
            name, justify="left" if name in ("token", "feature: activation") else "right"
        )
    for place, position in enumerate(reading.positions):
        top = "  ".join(
            f"{feature}: {value:.2f}" for feature, value in list(features.of(place).items())[:most]
        )
        drawn.add_row(
            str(position),
            Text(shown(features.tokens[place])),
            str(reading.active[place]),
            f"{reading.errors[place]:.2f}",
            Text(top),
        )
    return drawn


def tokens(result: JobResult) -> list[int]:
    """Return the tokens whose texts the tables need, ascending."""
    lens_tokens = set(known_tokens(result.lens or []))
    return sorted(lens_tokens.union(*(reading.token_ids for reading in result.features or [])))


def tables(result: JobResult, words: Words) -> Iterator[Table | LayerTable | str]:
    """Yield titles and tables of a result's lens and feature readings. `words`: token id → text."""
    many = len(result.outputs) > 1
    readings: list[tuple[int, Table | LayerTable]] = [
        (item.request, lens_table(lens_of(item, result.id, words)))
        for item in result.lens or []
        if item.request < PROMPTS
    ]
    readings += [
        (item.request, features_table(Features(result.id, item, words)))
        for item in result.features or []
        if item.request < PROMPTS
    ]
    for request, drawn in sorted(readings, key=lambda reading: reading[0]):
        yield f"{drawn.title}, prompt {request}" if many else str(drawn.title)
        drawn.title = None  # rich would fold the title to the width of the table
        yield drawn
    if readings and len(result.outputs) > PROMPTS:
        yield (
            f"… and {len(result.outputs) - PROMPTS} more prompts: midstream export job {result.id}"
        )


def scores(result: JobResult) -> Table:
    """Return a table of probe scores, with one line per prompt, probe and label."""
    steered = any(probe.gate is not None for probe in result.probes)
    shown = table(
        "Scores",
        "prompt",
        "probe",
        "label",
        "score",
        "tokens",
        "crossed at",
        *(["steered at"] if steered else []),
    )
    for probe in result.probes:
        gated = (place for first, last in probe.gate or [] for place in range(first, last + 1))
        where = [as_ranges(gated, _RUNS)] if steered else []
        for label, score in probe.scores.items():
            crossed = str(probe.crossed.get(label, "")) + (
                " (stopped)" if probe.stopped and label in probe.crossed else ""
            )
            shown.add_row(
                *map(
                    escape,
                    (
                        str(probe.request),
                        probe.probe,
                        label,
                        f"{score:.4f}",
                        str(probe.positions),
                        crossed,
                        *where,
                    ),
                )
            )
    return shown


def decisions(result: JobResult) -> Table:
    """Return a table of what policies decided, with a line for each decision."""
    shown = table("Decisions", "prompt", "policy", "token", "event", "score", "actions")
    for each, policy in ((each, each.policy) for each in result.probes if each.policy):
        taken = ", ".join(policy.actions) if policy.acts else "only recorded"
        rows: list[tuple[str, str, str, str]] = []
        for item in each.decisions:
            actions = taken if item.event == "trigger" else ""
            rows.append((str(item.position), item.event, f"{item.score:.4f}", actions))
        if not rows and policy.inherited:
            rows.append(("", f"latched by {policy.inherited}", "", taken))
        for row in rows:
            shown.add_row(
                str(each.request), escape(f"{policy.name} v{policy.version}"), *map(escape, row)
            )
    return shown
