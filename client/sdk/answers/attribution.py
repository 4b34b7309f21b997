"""Reads an attribution's result: estimates beside exact values, where they disagree, and edges."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.records import Plotted
from ....schemas.jobs.attributions import Agreement, AttributionResult, CheckedCell, PairAttribution
from ....schemas.jobs.jobs import JobResult
from ....schemas.jobs.sweeps import Baseline, SweepResult
from ....schemas.requests.attributions import Edge, EdgeEnd, FeatureScore
from ... import frames, notebook
from .grid import Grid, grid_of, records

if TYPE_CHECKING:
    import pandas


class Score(NamedTuple):
    """The estimated effect of an edge or of a feature, in the metric's units."""

    pair: int
    name: str  # `head 3.5 → q 7.2`, or `feature 12, layer 3` with its column's label
    score: float
    item: Edge | FeatureScore


def estimated(result: AttributionResult) -> SweepResult:
    """Return the estimates as a sweep's result, which everything that reads or draws sweeps takes.

    Its grids have the estimates; `mean` and `spread` are empty.
    """
    pairs = [
        msgspec.structs.replace(
            pair,
            grids=estimates.estimates,
            base=_baseline(estimates.base),
            source=_baseline(estimates.source),
        )
        for pair, estimates in zip(result.pairs, result.estimated, strict=True)
    ]
    fields = {name: getattr(result, name) for name in SweepResult.__struct_fields__}
    return SweepResult(**fields | {"pairs": pairs, "mean": {}, "spread": {}})


def _baseline(value: float | None) -> Baseline | None:
    return None if value is None else Baseline(value=value, logprob=None, foil_logprob=None)


def place_name(names: Sequence[str], column: int, feature: int | None) -> str:
    """Return the name of a column (of `names`), or of a feature in it; −1 is the error."""
    if feature is None:
        return names[column]
    return f"{'error' if feature < 0 else f'feature {feature}'} at {names[column]}"


def end_name(end: EdgeEnd) -> str:
    """Return the name of an edge's end: `embed`, `head 3.5`, `mlp 3`, `q 7.2` or `logits`."""
    if end.kind in ("embed", "logits"):
        return end.kind
    return f"{end.kind} {end.layer}" + ("" if end.head < 0 else f".{end.head}")


@dataclass(frozen=True, repr=False)
class Attribution(Plotted):
    """The estimates of an attribution, and the exact values of the cells or features that were
    verified.

    `pair`: the pair that it shows; None: all. Grids are then means over pairs, and lists have the
    items of every pair.
    """

    job: str
    result: AttributionResult
    pair: int | None = None

    def __repr__(self) -> str:
        grid = self.estimates
        facts: dict[str, Any] = {
            "job": self.job,
            "method": self.result.method,
            "pairs": len(self._pairs),
            "cells": sum(values.size for values in grid.values.values()) - grid.missing,
            "edges": len(self.edges),
            "features": len(self.features),
            "checked": len(self.cells),
            "off": len(self.off),
            "spearman": self.spearman and round(self.spearman, 3),
            "recall": self.recall and round(self.recall, 3),
        }
        shown = (f"{name}={value!r}" for name, value in facts.items() if value not in (None, 0))
        return f"Attribution({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return str(notebook.rendered("attribution_html", self))

    def of(self, pair: int) -> "Attribution":
        """Return the part of one pair. Raises MidstreamError if there is no such pair."""
        if not 0 <= pair < len(self.result.pairs):
            allowed = f"0 to {len(self.result.pairs) - 1}"
            raise invalid("pair", f"no pair {pair}", allowed=allowed)
        return replace(self, pair=pair)

    @property
    def _pairs(self) -> list[tuple[int, PairAttribution]]:
        numbered = enumerate(self.result.estimated)
        return [(number, item) for number, item in numbered if self.pair in (None, number)]

    @property
    def estimates(self) -> Grid:
        """The estimates, `[layers, columns]` for each hook; NaN: none."""
        return grid_of(estimated(self.result), self.pair)

    @property
    def exact(self) -> Grid:
        """The exact values; NaN: not computed."""
        return grid_of(self.result, self.pair)

    @property
    def cells(self) -> list[CheckedCell]:
        """The cells chosen to be computed exactly, with the strongest effect first; with `sae`,
        features in columns.
        """
        checked: list[tuple[float, CheckedCell]] = []
        for number, item in self._pairs:
            base = grid_of(self.result, number).base
            for cell in item.checked:
                checked.append((-1.0 if cell.exact is None else abs(cell.exact - base), cell))
        return [cell for _, cell in sorted(checked, key=lambda entry: -entry[0])]

    @property
    def off(self) -> list[CheckedCell]:
        """The cells whose estimate differs from the exact value by more than the noise floor and
        the tolerance, strongest first.
        """
        return [cell for cell in self.cells if cell.off]

    @property
    def edges(self) -> list[Score]:
        """The edges of the method `edges`, strongest first."""
        return _strongest(
            Score(number, f"{end_name(edge.sender)} → {end_name(edge.receiver)}", edge.score, edge)
            for number, item in self._pairs
            for edge in item.edges
        )

    @property
    def features(self) -> list[Score]:
        """The features of a sparse autoencoder and its error, strongest first."""
        return _strongest(
            Score(
                number, place_name(names, feature.column, feature.feature), feature.score, feature
            )
            for number, item in self._pairs
            for names in [grid_of(self.result, number).names]
            for feature in item.features
        )

    @property
    def spearman(self) -> float | None:
        """Spearman's rank correlation of estimates and exact values over the random cells, which
        stand for the grid; of several pairs, the mean. None: unknown.
        """
        return self._correlation(lambda item: item.random)

    @property
    def spearman_checked(self) -> float | None:
        """The same over all cells with an exact value, most of which were chosen for their large
        estimates: it is higher.
        """
        return self._correlation(lambda item: item.all)

    def _correlation(self, of: Callable[[PairAttribution], Agreement | None]) -> float | None:
        known = [
            found.spearman
            for _, item in self._pairs
            if (found := of(item)) is not None and found.spearman is not None
        ]
        return math.fsum(known) / len(known) if known else None

    @property
    def recall(self) -> float | None:
        """The share of the strongest computed cells that are also among the strongest estimates.
        None: nothing beyond the largest estimates was computed.
        """
        known = [item.recall for _, item in self._pairs if item.recall is not None]
        return (
            sum(item.found for item in known) / sum(item.top for item in known) if known else None
        )

    def records(self) -> list[dict[str, Any]]:
        """Return one record for each cell: its estimate, its exact value and their effects (None:
        unknown), why it was verified, and whether they disagree.

        For edges and features: one for each, with its `score`, and of features also the exact
        effect, why it was verified, and whether they disagree.
        """
        if edges := self.edges:
            return [{"pair": item.pair, "name": item.name, "score": item.score} for item in edges]
        if self.features:
            return self._feature_records()
        checked = {
            (number, cell.hook, cell.layer, cell.column): cell
            for number, item in self._pairs
            for cell in item.checked
        }
        both = zip(records(estimated(self.result)), records(self.result), strict=True)
        return [
            {
                **{name: part for name, part in estimate.items() if name not in _VALUES},
                "estimate": estimate["value"],
                "estimated_effect": estimate["effect"],
                "exact": exact["value"],
                "exact_effect": exact["effect"],
                "why": [] if cell is None else list(cell.why),
                "off": None if cell is None or cell.exact is None else cell.off,
                "reason": exact["reason"],
            }
            for estimate, exact in both
            if self.pair in (None, estimate["pair"])
            for cell in [
                checked.get(tuple(exact[name] for name in ("pair", "hook", "layer", "column")))
            ]
        ]

    def _feature_records(self) -> list[dict[str, Any]]:
        unknown: dict[str, Any] = {"exact_effect": None, "why": [], "off": None}
        found: dict[tuple[Any, ...], dict[str, Any]] = {
            (item.pair, item.item.column, item.item.feature): {
                "pair": item.pair, "name": item.name, "score": item.score, **unknown
            }
            for item in self.features
            if isinstance(item.item, FeatureScore)
        }  # fmt: skip
        for number, item in self._pairs:
            grid, base = grid_of(self.result, number), grid_of(estimated(self.result), number).base
            for cell in item.checked:
                name = place_name(grid.names, cell.column, cell.feature)
                score = None if cell.estimate is None else cell.estimate - base
                record = {"pair": number, "name": name, "score": score, **unknown, "why": cell.why}
                if cell.exact is not None:
                    record |= {"exact_effect": cell.exact - grid.base, "off": cell.off}
                found[number, cell.column, cell.feature] = record
        return list(found.values())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return `records` as a table. Raises MidstreamError without pandas."""
        return frames.pandas().DataFrame(self.records())


def attribution_of(result: JobResult) -> Attribution:
    """Return a job's attribution. Raises `not_found` for a job that is none."""
    if not result.attribution:
        raise MidstreamError("not_found", f"job {result.id} is not an attribution")
    return Attribution(result.id, result.attribution)


#: The fields of a sweep's record that an attribution's has twice, or of its exact value.
_VALUES = ("value", "effect", "reason")


def _strongest(scores: Iterator[Score]) -> list[Score]:
    return sorted(scores, key=lambda item: -abs(item.score))


def difference(cell: CheckedCell) -> float | None:
    """Return the estimate minus the exact value; None if either is unknown."""
    return None if cell.estimate is None or cell.exact is None else cell.estimate - cell.exact


def marks(attribution: Attribution) -> dict[str, Sequence[tuple[int, int]]]:
    """Return hook → (index of the layer, column) of the cells that disagree, in any pair."""
    layers = attribution.result.layers
    places: dict[str, list[tuple[int, int]]] = {}
    for cell in attribution.off:
        places.setdefault(cell.hook, []).append((layers.index(cell.layer), cell.column))
    return dict(places)
