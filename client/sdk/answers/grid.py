"""Grids of a sweep: a `SweepResult` as arrays, strongest cells, and plain records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....schemas.base.errors import invalid
from ....schemas.jobs.sweeps import Axis, Baseline, Metric, PairResult, SweepResult
from ....schemas.prompts.selectors import ALIASES, HOOKS, Hook
from ....schemas.requests.sweep_paths import PathEnd, SweepPath
from ... import frames, notebook

if TYPE_CHECKING:
    import pandas
    import xarray

#: What the numbers of a grid are.
MEANING: dict[Metric, str] = {
    "logprob": "log P(answer), nats",
    "logit_diff": "log P(answer) − log P(foil), nats",
    "recovered": "share recovered",
    "kl": "KL from the clean prompt, nats",
}
#: TransformerLens' short names.
_ALIAS = {
    hook: name
    for name, hook in reversed(ALIASES.items())
    if "." not in name and not (hook in HOOKS and name.startswith("hook_"))
}
#: Of pairs whose columns are called otherwise, that many names are shown.
_NAMES = 2
#: Characters of a prompt in a title.
_PROMPT = 120


class Effect(NamedTuple):
    """One cell of a grid."""

    hook: Hook
    layer: int  # of the model
    column: int
    label: str  # the token, or the span's name
    positions: list[int]  # in the patched prompt; of a mean over pairs: in the first one
    value: float  # in the metric's units
    effect: float  # value less that of the prompt as it is
    head: int = -1  # −1: on an axis without heads
    neurons: tuple[
        int, ...
    ] = ()  # that were chosen by their rank, the strongest first; of one pair


@dataclass(frozen=True)
class Grid:
    """One pair's grids, or the mean over all pairs.

    Arrays: `[layers, columns]` float64, NaN where a cell has no value.
    """

    metric: Metric
    hooks: list[Hook]
    layers: list[int]
    labels: list[str]
    names: list[str]  # the same for people, tokens with their position
    positions: list[list[int]]
    values: dict[Hook, np.ndarray]
    effects: dict[Hook, np.ndarray]  # value less that of the patched prompt as it is
    base: float  # the patched prompt as it is, in the metric's units
    noise_floor: float | None
    noise_probes: (
        int  # patches that change nothing, of which it is the largest change; 0: not known
    )
    axis: Axis
    heads: list[int]  # of the columns; empty on an axis without
    neurons: dict[Hook, list[list[list[int]]]]  # of one pair's cells, what was chosen by rank
    resolution: float  # the least change that the metric's float32 log-probabilities can show

    @property
    def missing(self) -> int:
        """Cells without a value."""
        return sum(int(np.isnan(values).sum()) for values in self.values.values())

    @property
    def limits(self) -> tuple[float, float]:
        """The ends of a colour scale that serves all hooks, as far on both sides of `base` as any
        cell lies; −1 to 1 of shares.
        """
        if self.metric == "recovered":
            return -1.0, 1.0
        if math.isnan(self.base):
            known = np.concatenate([effect[~np.isnan(effect)] for effect in self.values.values()])
            low, high = (float(known.min()), float(known.max())) if known.size else (-1.0, 1.0)
            return (low, high) if low < high else (low - 1.0, low + 1.0)
        reach = max(
            (
                float(np.nanmax(np.abs(effect)))
                for effect in self.effects.values()
                if not np.isnan(effect).all()
            ),
            default=0.0,
        )
        return self.base - (reach or 1.0), self.base + (reach or 1.0)

    def cells(self) -> Iterator[Effect]:
        """Yield those whose effect is known, by hook, layer and column."""
        for hook in self.hooks:
            for row, column in np.argwhere(~np.isnan(self.effects[hook])).tolist():
                yield Effect(
                    hook, self.layers[row], column, self.labels[column], self.positions[column],
                    float(self.values[hook][row, column]), float(self.effects[hook][row, column]),
                    self.heads[column] if self.heads else -1,
                    tuple(self.neurons[hook][row][column]) if hook in self.neurons else (),
                )  # fmt: skip

    def by_head(self, hook: Hook | None = None) -> np.ndarray:
        """Values by head: `[layers, heads]` on axis `head`, `[layers, heads, positions]` on axis
        `head_position`, NaN where a cell has none. `hook`: the only one, unless there are several.
        Raises MidstreamError for other axes.
        """
        if not self.heads:
            raise invalid(
                "axis",
                f"a grid of axis {self.axis!r} has no heads",
                allowed="a sweep of axis head or head_position",
            )
        values, heads = self.values[hook or self.hooks[0]], len(dict.fromkeys(self.heads))
        return values if self.axis == "head" else values.reshape(len(self.layers), heads, -1)

    def to_pandas(self) -> "pandas.DataFrame":
        """A line for each cell that has a value, with the fields of `Effect`.

        Raises MidstreamError without pandas.
        """
        return frames.pandas().DataFrame(self.cells(), columns=list(Effect._fields))

    def to_xarray(self) -> "xarray.Dataset":
        """`value` and `effect` `[hook, layer, column]`, NaN where a cell has none.

        Raises MidstreamError without xarray.
        """
        axes = ("hook", "layer", "column")
        columns = {"label": ("column", self.labels), "name": ("column", self.names)} | (
            {"head": ("column", self.heads)} if self.heads else {}
        )
        return frames.xarray().Dataset(
            {
                "value": (axes, np.stack([self.values[hook] for hook in self.hooks])),
                "effect": (axes, np.stack([self.effects[hook] for hook in self.hooks])),
            },
            coords={
                "hook": self.hooks,
                "layer": self.layers,
                "column": np.arange(len(self.labels)),
                **columns,
            },
            attrs={
                "metric": self.metric,
                "unit": MEANING[self.metric],
                "base": self.base,
                "axis": self.axis,
            },
        )

    def plotly(self) -> Any:
        """An interactive heatmap: `plotly.graph_objects.Figure`.

        Raises MidstreamError without plotly.
        """
        return notebook.rendered("plotly_figure", self)

    def _repr_html_(self) -> str:
        return str(notebook.rendered("grid_html", self))

    def top(self, count: int) -> list[Effect]:
        """The cells that change most, the strongest first."""
        return sorted(self.cells(), key=lambda cell: -abs(cell.effect))[:count]


def grid_of(result: SweepResult, pair: int | None = None) -> Grid:
    """The grids of one pair, or with None those of their mean.

    Raises MidstreamError for a pair that there is not.
    """
    if pair is not None and not 0 <= pair < len(result.pairs):
        raise invalid(
            "pair", f"no pair {pair}", allowed=f"0 to {len(result.pairs) - 1}, or None for the mean"
        )
    chosen = result.pairs if pair is None else [result.pairs[pair]]
    values = {
        hook: np.array([_array(value, hook, result) for value in chosen]) for hook in result.hooks
    }
    bases = np.array([_base(result.metric, value.base) for value in chosen])
    labels = _labels(chosen)
    floors = [value.noise_floor for value in chosen if value.noise_floor is not None]
    return Grid(
        metric=result.metric,
        hooks=result.hooks,
        layers=result.layers,
        labels=labels,
        names=[_name(chosen, labels[column], column) for column in range(len(labels))],
        positions=_positions(chosen[0]),
        values={hook: _mean(value) for hook, value in values.items()},
        effects={hook: _mean(value - bases[:, None, None]) for hook, value in values.items()},
        base=float(np.mean(known))
        if (known := bases[~np.isnan(bases)]).size
        else float("nan"),  # without one there are no values
        noise_floor=max(floors, default=None),
        noise_probes=sum(value.noise_probes for value in chosen),
        axis=result.axis,
        heads=chosen[0].heads,
        neurons=chosen[0].neurons if len(chosen) == 1 else {},
        resolution=max((_resolution(result.metric, value) for value in chosen), default=0.0),
    )


def records(result: SweepResult) -> list[dict[str, Any]]:
    """One record for each cell of each pair; `value` and `effect` are None where `reason` says
    why.
    """
    reasons = {
        (skipped.pair, skipped.hook, layer, skipped.column): skipped.reason
        for skipped in result.skipped
        for layer in skipped.layers
    }
    results = []
    for number, pair in enumerate(result.pairs):
        base, positions = _base(result.metric, pair.base), _positions(pair)
        for hook in result.hooks:
            for row_number, (layer, row) in enumerate(
                zip(result.layers, pair.grids[hook], strict=True)
            ):
                for column, value in enumerate(row):
                    results.append(
                        {
                            "pair": number,
                            "hook": hook,
                            "layer": layer,
                            "column": column,
                            "label": pair.labels[column],
                            "positions": positions[column],
                            "value": value,
                            "effect": None if value is None or math.isnan(base) else value - base,
                            "reason": reasons.get((number, hook, layer, column), ""),
                            **({"head": pair.heads[column]} if pair.heads else {}),
                            **(
                                {"neurons": pair.neurons[hook][row_number][column]}
                                if hook in pair.neurons
                                else {}
                            ),
                        }
                    )
    return results


def titled(hook: Hook) -> str:
    """A hook's name with TransformerLens' name behind it."""
    return f"{hook} ({_ALIAS[hook]})" if hook in _ALIAS else hook


def written(label: str) -> str:
    """A token as a label: its spaces at the ends go, what cannot be seen is spelled out."""
    return label.strip() if label.strip().isprintable() and label.strip() else repr(label)[1:-1]


def described(result: SweepResult, pair: int | None = None) -> list[str]:
    """Return what was patched into what, what was asked, and how far values scatter: the lines of a
    title.
    """
    number = 0 if pair is None and len(result.pairs) == 1 else pair
    lines = []
    if number is None:
        lines.append(f"mean over {len(result.pairs)} pairs of prompts{_ablated(result)}")
    else:
        shown = result.pairs[number]
        patched, source = (
            _shortened("".join(tokens)) for tokens in (shown.base_tokens, shown.source_tokens)
        )
        lines.append(
            f"“{patched}”{_ablated(result)}"
            if result.ablation
            else f"“{source}” patched into “{patched}”"
        )
        if shown.answer:
            lines.append(
                f"answer “{shown.answer.strip()}”"
                + (f", foil “{shown.foil.strip()}”" if shown.foil else "")
            )
    return [*lines, " · ".join(_conditions(result, grid_of(result, pair)))]


def _shortened(prompt: str) -> str:
    """One line, without the middle of a long one: the ends say what differs and what is asked."""
    line = " ".join(prompt.split())
    return line if len(line) <= _PROMPT else f"{line[: _PROMPT // 2]} … {line[-_PROMPT // 2 :]}"


def _ablated(result: SweepResult) -> str:
    return {None: "", "zeros": ", rows set to zero", "mean": ", rows set to their mean"}[
        result.ablation
    ]


def _conditions(result: SweepResult, grid: Grid) -> Iterator[str]:
    yield MEANING[result.metric]
    if result.metric != "recovered" and not math.isnan(grid.base):
        yield f"unpatched {grid.base:.3g}"
    if result.window.layers > 1 or result.window.positions > 1:
        sizes = ((result.window.layers, "layers"), (result.window.positions, "positions"))
        yield "window of " + " × ".join(f"{size} {what}" for size, what in sizes if size > 1)
    if result.path is not None:
        yield described_path(result.path)
    if result.alpha != 1:
        yield f"alpha {result.alpha:g}"
    if grid.noise_floor is not None:
        floor = (
            f"{grid.noise_floor:.2g}"
            if grid.noise_floor > grid.resolution
            else f"< {grid.resolution:.1g}"
        )
        yield f"noise floor {floor}" + (
            f" ({grid.noise_probes} probes)" if grid.noise_probes else ""
        )


def described_path(path: SweepPath) -> str:
    """The end of a path that is not the cells', and what was held between the two."""
    held = f" ({' and '.join(path.frozen)} held)"
    if path.sender is not None:
        return f"path from {_end(path.sender)}{held}"
    receivers = path.receivers or []
    return (
        "path to "
        f"{receivers if isinstance(receivers, str) else ', '.join(map(_end, receivers))}{held}"
    )


def _end(end: PathEnd) -> str:
    return f"{end.hook} {end.layer}" + ("" if end.head is None else f".{end.head}")


def _array(pair: PairResult, hook: Hook, result: SweepResult) -> np.ndarray:
    return np.array(pair.grids[hook], dtype=np.float64).reshape(
        len(result.layers), len(pair.labels)
    )


def _base(metric: Metric, base: Baseline | None) -> float:
    """In the metric's units, NaN if unknown.

    Nothing of the difference is recovered where nothing is patched.
    """
    if metric == "recovered":
        return 0.0
    return float("nan") if base is None else base.value


def _resolution(metric: Metric, pair: PairResult) -> float:
    """The step from one float32 to the next at the largest log-probability that the metric is made
    of, in the metric's units.
    """
    known = [item for item in (pair.base, pair.source) if item is not None]
    logprobs = [
        abs(part)
        for item in known
        for part in (item.logprob, item.foil_logprob)
        if part is not None
    ]
    step = float(np.spacing(np.float32(max(logprobs, default=1.0))))
    span = abs(known[1].value - known[0].value) if metric == "recovered" and len(known) > 1 else 1.0
    return step / (span or 1.0)


def _mean(stack: np.ndarray) -> np.ndarray:
    """Over the pairs that have a value: `[pairs, layers, columns]` → `[layers, columns]`."""
    present = ~np.isnan(stack)
    sums = np.where(present, stack, 0.0).sum(axis=0)
    return np.where(present.any(axis=0), sums / np.maximum(present.sum(axis=0), 1), np.nan)


def _positions(pair: PairResult) -> list[list[int]]:
    return pair.positions or [[] for _ in pair.labels]


def _name(pairs: list[PairResult], label: str, column: int) -> str:
    """With its position if it is a token, at the same one in all pairs."""
    places = {tuple(_positions(pair)[column]) for pair in pairs}
    (first, *rest) = places
    alone = len(first) == 1 and not rest
    is_token = alone and all(pair.labels[column] == pair.base_tokens[first[0]] for pair in pairs)
    return f"{written(label)} {first[0]}" if is_token else written(label)


def _labels(pairs: list[PairResult]) -> list[str]:
    """Return the labels of the columns; the first pair's, where pairs differ."""
    labels = []
    for names in zip(*(pair.labels for pair in pairs), strict=True):
        different = list(dict.fromkeys(map(written, names)))
        more = "/…" if len(different) > _NAMES else ""
        labels.append(names[0] if len(different) == 1 else "/".join(different[:_NAMES]) + more)
    return labels
