"""Assembles the estimates of an attribution and compares them with the exact values."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from msgspec.structs import asdict

from midstream.schemas.base.records import by_key
from midstream.schemas.jobs.receipts import Receipt

from ..records.attributions import (
    AttributionResult,
    CheckedCell,
    EstimateAgreement,
    EstimatedPair,
    PairAttribution,
    Recall,
)
from ..records.estimates import Estimate
from ..records.sweep_units import SweepWork
from ..records.sweeps import StoredSweep, SweepResult, Unit, UnitRecord
from .sweep_metrics import unchanged
from .sweep_result import (
    KnownUnits,
    PairRecords,
    adaptive_round,
    known_units,
    pairs_of,
    place_of,
    sweep_result,
)

#: A rank correlation of fewer cells says nothing.
LEAST_CELLS = 3


def result_so_far(
    work: SweepWork, units: Iterable[bytes], seconds: float | None
) -> tuple[SweepResult, list[Receipt]]:
    """Return the result of a sweep or an attribution so far, and the receipts of its units."""
    records = known_units(units)
    receipts = [receipt for record in records.values() for receipt in record.receipts]
    result_of = sweep_result if work.sweep.attributed is None else attribution_result
    return result_of(work.sweep, records, seconds), receipts


def attribution_result(
    sweep: StoredSweep, records: KnownUnits, seconds: float | None
) -> AttributionResult:
    """Return the result so far; arguments as for `sweep_result`."""
    attribution = sweep.attributed
    exact = sweep_result(sweep, records, seconds)
    assert attribution is not None
    return AttributionResult(
        **asdict(exact),
        method=attribution.method,
        steps=attribution.steps,
        seed=attribution.seed,
        verify=attribution.verify,
        estimated=[pair_attribution(pair) for pair in pairs_of(sweep, records)],
    )


def estimated_pair(sweep: StoredSweep, pair: int, record: UnitRecord) -> EstimatedPair:
    """Return a pair's estimates as readers get them before any cell is computed."""
    known = PairRecords(sweep, pair, {record.unit: record})
    return EstimatedPair(pair=pair, attribution=pair_attribution(known))


def pair_attribution(pair: PairRecords) -> PairAttribution:
    """Return the estimates of a pair, and how they agree with its exact cells."""
    record = pair.records.get(pair.units.estimate(pair.number).number)
    estimate = pair.estimate
    reason = (record.reason if record else "") or _withheld(pair)
    values = [] if estimate is None or reason else estimate.values
    value_of = dict(zip(pair.cells, values, strict=False))
    estimates = pair.grid(value_of.get)
    if estimate is None or reason:
        return PairAttribution(estimates=estimates, base=None, source=None, reason=reason)
    comparison = _Comparison(pair, estimate)
    left = adaptive_round(pair, estimate).left if pair.sweep.adaptive else None
    return PairAttribution(
        estimates=estimates,
        base=estimate.base,
        source=estimate.source,
        checked=comparison.checked(),
        all=comparison.agreement(comparison.whys),
        random=comparison.agreement(estimate.chosen.get("random", ())),
        recall=comparison.recall(),
        not_looked_at=left,
        edges=estimate.edges,
        features=estimate.features,
        forwards=estimate.forwards,
    )


def _withheld(pair: PairRecords) -> str:
    """Return why a pair's estimates are not shown, because a sweep gives no values either: a prompt
    failed, or policies have not read it yet. Empty: they are shown.
    """
    attribution = pair.sweep.attributed
    if attribution is None or not attribution.watched:
        return ""
    controls = {"patched": pair.base}
    if pair.sweep.ablation is None:
        controls["source"] = pair.source
    for prompt, number in controls.items():
        record = pair.records.get(number)
        if record is None or record.value is None:
            why = "policies have not read it yet" if record is None else f"failed: {record.reason}"
            return f"the {prompt} prompt: {why}"
    return ""


class _Comparison:
    """The chosen cells of a pair: estimates and exact values."""

    def __init__(self, pair: PairRecords, estimate: Estimate) -> None:
        sweep = pair.sweep
        self._pair = pair
        self._records = pair.records
        self._estimates = pair.estimated_values(estimate)
        self._sizes = pair.effects(estimate)
        #: number of the cell → why it was chosen
        self.whys = by_key(
            (number, why) for why, chosen in estimate.chosen.items() for number in chosen
        )
        self._verify = None if sweep.attributed is None else sweep.attributed.verify
        if sweep.adaptive:
            looked = (number for number in pair.cells if number in self._records)
            self.whys = {number: ["adaptive"] for number in looked}
        self._noise = pair.noise_floor or 0.0
        base = pair.value(pair.base)
        # an effect is a difference to the base of the same worker
        self._estimated_nothing = unchanged(sweep.metric, estimate.base)
        self._nothing = self._estimated_nothing if base is None else unchanged(sweep.metric, base)

    def checked(self) -> list[CheckedCell]:
        if self._verify is None:
            return []
        limit = self._noise + self._verify.tolerance
        units = self._pair.exact_units()
        return [self._cell(unit, limit) for unit in units if unit.number in self.whys]

    def _cell(self, unit: Unit, limit: float) -> CheckedCell:
        number = unit.number
        record = self._records.get(unit.number)
        estimate = self._estimates.get(number)
        exact = self._pair.value(number)
        estimated = None if estimate is None else estimate - self._estimated_nothing
        effect = None if exact is None else exact - self._nothing
        difference = None if estimated is None or effect is None else estimated - effect
        return CheckedCell(
            **place_of(self._pair.sweep, unit),
            why=self.whys[number],
            estimate=estimate,
            exact=exact,
            estimate_effect=estimated,
            exact_effect=effect,
            difference=difference,
            off=difference is not None and abs(difference) > limit,
            reason="" if record is None else record.reason,
        )

    def _known(self, numbers: Iterable[int]) -> dict[int, float]:
        """Return the cells that have both values → the size of their exact effect."""
        return {
            number: abs(value - self._nothing)
            for number in numbers
            if number in self._sizes and (value := self._pair.value(number)) is not None
        }

    def agreement(self, numbers: Iterable[int]) -> EstimateAgreement | None:
        if not (known := self._known(numbers)):
            return None
        values = [self._estimates[number] or 0.0 for number in known]
        exact = [self._records[number].value or 0.0 for number in known]
        return EstimateAgreement(
            cells=len(known),
            spearman=spearman(values, exact),
            unchanged=sum(
                max(effect, self._sizes[number]) <= self._noise for number, effect in known.items()
            ),
        )

    def recall(self) -> Recall | None:
        verify = self._verify
        known = self._known(self.whys)
        if verify is None or not 0 < verify.top < len(known):
            return None
        exact = sorted(known, key=lambda number: (-known[number], number))[: verify.top]
        estimated = [number for number in self._sizes if number in known][: verify.top]
        found = len({*exact} & {*estimated})
        return Recall(top=verify.top, known=len(known), found=found, recall=found / verify.top)


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; equal values get the mean of their ranks, because ranks
    in the order of the cells would agree where nothing does. None for fewer than `LEAST_CELLS`
    values, or if one side is constant.
    """
    if len(first) < LEAST_CELLS:
        return None
    try:
        return statistics.correlation(_ranks(first), _ranks(second))
    except statistics.StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, each) + bisect_right(ordered, each) - 1) / 2 for each in values]
