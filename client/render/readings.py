"""Terminal output of readings: logit lens, SAE features and probe scores, by token."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.align import Align
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
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
#: The characters of the column of layers, with the one after it.
_LAYER = len("layer ")
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


class LensTable:
    """A rich renderable of the top tokens: a row per layer, last layer first, and a column for each
    of the `last` positions. Those that do not fit side by side stand below each other, each time
    with the layers.
    """

    def __init__(self, lens: Lens, last: int = 12):
        self.title: str | None = f"top next token at {lens.hook}"
        self._lens = lens
        self._places = range(max(0, len(lens.positions) - last), len(lens.positions))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = self.title
        for places in self._parts(options.max_width - _LAYER):
            yield self._part(places, title)
            title = None

    def _parts(self, room: int) -> Iterator[list[int]]:
        """Yield the positions that stand side by side in `room` characters, at least one."""
        part: list[int] = []
        left = room
        for place in self._places:
            wide = self._width(place)
            if part and wide > left:
                yield part
                part = []
                left = room
            part.append(place)
            left -= wide
        if part:
            yield part

    def _width(self, place: int) -> int:
        """Return the characters of a position's column, with the one after it."""
        lens = self._lens
        words = [lens.tokens[place], *map(lens.word, lens.top_ids[:, place, 0])]
        return max(cell_len(shown(word)) for word in words) + 1

    def _part(self, places: Sequence[int], title: str | None) -> Table:
        lens = self._lens
        drawn = bare(title, gap=1)
        drawn.add_column("layer", justify="right", style="dim", no_wrap=True)
        for place in places:
            drawn.add_column(_word(lens.tokens[place]))
        for row in reversed(range(len(lens.layers))):
            drawn.add_row(str(lens.layers[row]), *[_cell(lens, row, place) for place in places])
        return drawn


def named_table(lens: Lens, place: int = -1) -> Table:
    """Return a table of the named tokens' ranks and probabilities by layer, at the position
    `lens.positions[place]`.
    """
    drawn = bare(f"after {lens.tokens[place]!r}")
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


def tables(result: JobResult, words: Words) -> Iterator[Table | LensTable | str]:
    """Yield titles and tables of a result's lens and feature readings. `words`: token id → text."""
    many = len(result.outputs) > 1
    readings: list[tuple[int, Table | LensTable]] = [
        (item.request, LensTable(lens_of(item, result.id, words)))
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
