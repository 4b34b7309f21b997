"""Converts a `SweepResult` to grids (arrays), its strongest cells, and plain records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from midstream.client import frames
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.records import Plotted
from midstream.schemas.prompts.selectors import ALIASES, HOOKS, ByHook, Hook, as_ranges

from ..records.sweep_paths import PathEnd, SweepPath
from ..records.sweeps import Axis, Baseline, Metric, PairResult, SweepResult

if TYPE_CHECKING:
    import pandas
    import xarray

#: Metric → what a grid's values are, with the unit.
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
#: The most names in a column's label where its label differs between pairs.
_NAMES = 2
#: Characters of a prompt in a title.
_PROMPT = 120


class Effect(NamedTuple):
    """One cell of a grid."""

    hook: Hook
    layer: int  # its index in the model
    column: int
    label: str  # the token, or the span's name
    positions: list[int]  # in the patched prompt; for a mean over pairs, in the first pair's
    value: float  # in the metric's units
    effect: float  # value minus that of the unpatched prompt
    head: int = -1  # −1: on an axis without heads
    neurons: tuple[int, ...] = ()  # those chosen by rank, strongest first; only for one pair

    def __repr__(self) -> str:
        """Return the cell's site and numbers, without what its axis does not have."""
        parts = [
            repr(self.label),
            f"{self.hook} {self.layer}",
            "" if self.head < 0 else f"head {self.head}",
            f"neurons {', '.join(map(str, self.neurons))}" if self.neurons else "",
            f"value={self.value:.4g}",
            "" if self.effect == self.value else f"effect={self.effect:.4g}",
        ]
        return f"Effect({', '.join(filter(None, parts))})"


@dataclass(frozen=True)
class Grid(Plotted):
    """One pair's grids, or the mean over all pairs.

    Arrays: `[layers, columns]` float64, NaN where a cell has no value.
    """

    metric: Metric
    hooks: list[Hook]
    layers: list[int]
    labels: list[str]
    names: list[str]  # labels for display: tokens with their position
    positions: list[list[int]]
    values: ByHook[np.ndarray]
    effects: ByHook[np.ndarray]  # value minus that of the unpatched prompt
    base: float  # the unpatched prompt's value, in the metric's units
    noise_floor: float | None  # the largest change by a no-op patch
    noise_probes: int  # how many no-op patches were run; 0: unknown
    axis: Axis
    heads: list[int]  # of each column; empty on an axis without heads
    # neurons chosen by rank for each layer and column; empty for a mean over pairs
    neurons: ByHook[list[list[list[int]]]]
    resolution: float  # the least change that the metric's float32 log-probabilities can show

    def __repr__(self) -> str:
        return (
            f"Grid(metric={self.metric!r}, hooks={self.hooks}, layers={as_ranges(self.layers)}, "
            f"columns={len(self.labels)})"
        )

    @property
    def missing(self) -> int:
        """The number of cells without a value."""
        return sum(int(np.isnan(values).sum()) for values in self.values.values())

    @property
    def limits(self) -> tuple[float, float]:
        """The ends of one colour scale for all hooks: `base` ± the largest effect; −1 to 1 for
        `recovered`; the range of the values if `base` is unknown.
        """
        if self.metric == "recovered":
            return -1.0, 1.0
        if math.isnan(self.base):
            known = np.concatenate([value[~np.isnan(value)] for value in self.values.values()])
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
        """Yield the cells whose effect is known, ordered by hook, layer and column."""
        for hook in self.hooks:
            for row, column in np.argwhere(~np.isnan(self.effects[hook])).tolist():
                yield Effect(
                    hook=hook,
                    layer=self.layers[row],
                    column=column,
                    label=self.labels[column],
                    positions=self.positions[column],
                    value=float(self.values[hook][row, column]),
                    effect=float(self.effects[hook][row, column]),
                    head=self.heads[column] if self.heads else -1,
                    neurons=tuple(self.neurons[hook][row][column]) if hook in self.neurons else (),
                )

    def by_head(self, hook: Hook | None = None) -> np.ndarray:
        """Return the values by head: `[layers, heads]` on axis `head`, `[layers, heads, positions]`
        on axis `head_position`, NaN where a cell has none. `hook`: by default the first. Raises
        MidstreamError for other axes.
        """
        if not self.heads:
            raise invalid(
                "axis",
                f"a grid of axis {self.axis!r} has no heads",
                allowed="a sweep of axis head or head_position",
            )
        values = self.values[hook or self.hooks[0]]
        heads = len(dict.fromkeys(self.heads))
        return values if self.axis == "head" else values.reshape(len(self.layers), heads, -1)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return one line for each cell whose effect is known, with the fields of `Effect`.

        Raises MidstreamError without pandas.
        """
        return frames.pandas().DataFrame(self.cells(), columns=list(Effect._fields))

    def to_xarray(self) -> "xarray.Dataset":
        """Return `value` and `effect` `[hook, layer, column]`, NaN where a cell has none.

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

    def top(self, count: int) -> list[Effect]:
        """Return the cells with the largest effects, strongest first."""
        return sorted(self.cells(), key=lambda cell: -abs(cell.effect))[:count]


def grid_of(result: SweepResult, pair: int | None = None) -> Grid:
    """Return the grids of one pair, or with None the mean over all pairs.

    Raises MidstreamError if there is no such pair.
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
    known = bases[~np.isnan(bases)]
    labels = _labels(chosen)
    floors = [value.noise_floor for value in chosen if value.noise_floor is not None]
    return Grid(
        metric=result.metric,
        hooks=result.hooks,
        layers=result.layers,
        labels=labels,
        names=[_name(chosen, labels[column], column) for column in range(len(labels))],
        positions=_positions(chosen[0]),
        values=ByHook((hook, _mean(value)) for hook, value in values.items()),
        effects=ByHook(
            (hook, _mean(value - bases[:, None, None])) for hook, value in values.items()
        ),
        base=float(np.mean(known)) if known.size else float("nan"),
        noise_floor=max(floors, default=None),
        noise_probes=sum(value.noise_probes for value in chosen),
        axis=result.axis,
        heads=chosen[0].heads,
        neurons=ByHook(chosen[0].neurons if len(chosen) == 1 else {}),
        resolution=max((_resolution(result.metric, value) for value in chosen), default=0.0),
    )


def records(result: SweepResult) -> list[dict[str, Any]]:
    """Return one record for each cell of each pair; for a cell without a value, `value` and
    `effect` are None, and `reason` says why.
    """
    reasons = {
        (skipped.pair, skipped.hook, layer, skipped.column): skipped.reason
        for skipped in result.skipped
        for layer in skipped.layers
    }
    results = []
    for number, pair in enumerate(result.pairs):
        base = _base(result.metric, pair.base)
        positions = _positions(pair)
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
    """Return a hook's name, followed by TransformerLens' name in parentheses."""
    return f"{hook} ({_ALIAS[hook]})" if hook in _ALIAS else hook


def written(label: str) -> str:
    """Return a token as a label: outer spaces removed, unprintable characters escaped."""
    return label.strip() if label.strip().isprintable() and label.strip() else repr(label)[1:-1]


def described(result: SweepResult, pair: int | None = None) -> list[str]:
    """Return the lines of a title: the prompts, the answer and foil, and the conditions, such as
    the metric and the noise floor.
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
    """Return the prompt on one line, without its middle if it is long: the ends show what differs
    and what is asked.
    """
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
    """Return a path's fixed end (the other end is the cells), and the components held between."""
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
    """Return the unpatched prompt's value in the metric's units, NaN if unknown; `recovered` is 0
    where nothing is patched.
    """
    if metric == "recovered":
        return 0.0
    return float("nan") if base is None else base.value


def _resolution(metric: Metric, pair: PairResult) -> float:
    """Return the spacing of float32 at the largest log-probability that the metric uses, in the
    metric's units.
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
    """Average over the pairs with a value: `[pairs, layers, columns]` → `[layers, columns]`."""
    present = ~np.isnan(stack)
    sums = np.where(present, stack, 0.0).sum(axis=0)
    return np.where(present.any(axis=0), sums / np.maximum(present.sum(axis=0), 1), np.nan)


def _positions(pair: PairResult) -> list[list[int]]:
    return pair.positions or [[] for _ in pair.labels]


def _name(pairs: list[PairResult], label: str, column: int) -> str:
    """Return the label, with its position if it is a token at the same position in all pairs."""
    (first, *rest) = {tuple(_positions(pair)[column]) for pair in pairs}
    alone = len(first) == 1 and not rest
    is_token = alone and all(pair.labels[column] == pair.base_tokens[first[0]] for pair in pairs)
    return f"{written(label)} {first[0]}" if is_token else written(label)


def _labels(pairs: list[PairResult]) -> list[str]:
    """Return each column's label; where pairs differ, their first `_NAMES` labels."""
    labels = []
    for names in zip(*(pair.labels for pair in pairs), strict=True):
        different = list(dict.fromkeys(map(written, names)))
        more = "/…" if len(different) > _NAMES else ""
        labels.append(names[0] if len(different) == 1 else "/".join(different[:_NAMES]) + more)
    return labels
