"""Reads an attribution's result: estimates beside exact values, where they disagree, and edges."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from midstream.client import frames
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.records import Plotted, by_key
from midstream.schemas.jobs.results import JobResult

from ..records.attributions import (
    AttributionResult,
    CheckedCell,
    EstimateAgreement,
    PairAttribution,
)
from ..records.estimates import Edge, EdgeEnd, FeatureScore
from ..records.sweeps import Baseline, SweepResult
from .grid import Grid, grid_of, records

if TYPE_CHECKING:
    import pandas


class Score(NamedTuple):
    """The estimated effect of an edge or of a feature, in the metric's units."""

    pair: int
    name: str  # `head 3.5 → q 7.2`, or `feature 12, layer 3` with its column's label
    score: float
    item: Edge | FeatureScore

    def __repr__(self) -> str:
        return f"Score({self.name!r}, {self.score:.4g}, pair={self.pair})"


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
    return msgspec.structs.replace(result, pairs=pairs, mean={}, spread={})


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
        grids = self.estimates.values.values()
        listed = {"estimates": sum(int(np.isfinite(grid).sum()) for grid in grids)}
        listed |= {name: len(getattr(self, name)) for name in ("cells", "off", "edges", "features")}
        shown = [f"{name}={count}" for name, count in listed.items() if count]
        return f"Attribution({', '.join([self.job, self.result.method, *shown])})"

    def of(self, pair: int) -> "Attribution":
        """Return the part of one pair. Raises MidstreamError if there is no such pair."""
        if not 0 <= pair < len(self.result.pairs):
            raise invalid("pair", f"no pair {pair}", allowed=f"0 to {len(self.result.pairs) - 1}")
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
        checked = (cell for _, item in self._pairs for cell in item.checked)
        return sorted(
            checked, key=lambda cell: 1.0 if cell.exact_effect is None else -abs(cell.exact_effect)
        )

    @property
    def off(self) -> list[CheckedCell]:
        """The cells whose estimated effect differs from the exact one by more than the noise floor
        and the tolerance, strongest first.
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
        found = []
        for number, item in self._pairs:
            names = grid_of(self.result, number).names
            for feature in item.features:
                name = place_name(names, feature.column, feature.feature)
                found.append(Score(number, name, feature.score, feature))
        return _strongest(found)

    @property
    def spearman(self) -> float | None:
        """Spearman's rank correlation of estimates and exact values over the random cells, which
        stand for the grid; of several pairs, the mean. None: unknown.
        """
        return _mean(item.random for _, item in self._pairs)

    @property
    def spearman_checked(self) -> float | None:
        """The same over all cells with an exact value, most of which were chosen for their large
        estimates: it is higher.
        """
        return _mean(item.all for _, item in self._pairs)

    @property
    def recall(self) -> float | None:
        """The share of the strongest computed cells that are also among the strongest estimates.
        None: nothing beyond the largest estimates was computed.
        """
        known = [item.recall for _, item in self._pairs if item.recall is not None]
        top = sum(item.top for item in known)
        return sum(item.found for item in known) / top if top else None

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a line for each cell of a sweep, with its `estimate` and `exact` value, their
        effects `estimate_effect` and `exact_effect`, why it was computed (`why`), and whether both
        effects disagree (`off`; None: not computed). Of edges and features: one for each, of
        features with both effects.

        Raises MidstreamError without pandas.
        """
        if edges := self.edges:
            return frames.pandas().DataFrame(edges, columns=list(Score._fields))
        if self.features:
            return frames.pandas().DataFrame(self._feature_lines())
        checked = {
            (number, cell.hook, cell.layer, cell.column): cell
            for number, item in self._pairs
            for cell in item.checked
        }
        lines = []
        estimates = records(estimated(self.result))
        for line, estimate in zip(records(self.result), estimates, strict=True):
            if self.pair in (None, line["pair"]):
                cell = checked.get((line["pair"], line["hook"], line["layer"], line["column"]))
                line["exact"] = line.pop("value")
                line["exact_effect"] = line.pop("effect")
                line["estimate"] = estimate["value"]
                line["estimate_effect"] = estimate["effect"]
                line["why"] = cell.why if cell else []
                line["off"] = cell.off if cell and cell.exact is not None else None
                lines.append(line)
        return frames.pandas().DataFrame(lines)

    def _feature_lines(self) -> list[dict[str, Any]]:
        unknown: dict[str, Any] = {"exact_effect": None, "why": [], "off": None}
        found: dict[tuple[Any, ...], dict[str, Any]] = {
            (item.pair, item.item.column, item.item.feature): {
                "pair": item.pair, "name": item.name, "estimate_effect": item.score, **unknown
            }
            for item in self.features
            if isinstance(item.item, FeatureScore)
        }  # fmt: skip
        for number, item in self._pairs:
            names = grid_of(self.result, number).names
            for cell in item.checked:
                found[number, cell.column, cell.feature] = {
                    "pair": number,
                    "name": place_name(names, cell.column, cell.feature),
                    "estimate_effect": cell.estimate_effect,
                    "exact_effect": cell.exact_effect,
                    "why": cell.why,
                    "off": None if cell.exact is None else cell.off,
                }
        return list(found.values())


def attribution_of(result: JobResult) -> Attribution:
    """Return a job's attribution. Raises `not_found` for a job that is none."""
    if not result.attribution:
        raise MidstreamError("not_found", f"job {result.id} is not an attribution")
    return Attribution(result.id, result.attribution)


def _mean(agreements: Iterable[EstimateAgreement | None]) -> float | None:
    known = [item.spearman for item in agreements if item and item.spearman is not None]
    return math.fsum(known) / len(known) if known else None


def _strongest(scores: Iterable[Score]) -> list[Score]:
    return sorted(scores, key=lambda item: -abs(item.score))


def marks(attribution: Attribution) -> dict[str, list[tuple[int, int]]]:
    """Return hook → (index of the layer, column) of the cells that disagree, in any pair."""
    layers = attribution.result.layers
    return by_key((cell.hook, (layers.index(cell.layer), cell.column)) for cell in attribution.off)
