"""Assembles a sweep's unit records into grids, for results and for the first and last event of a
stream; and chooses the cells or features of an attribution that are computed exactly: by their
estimates, at random, and for the method `adaptive` round by round.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from midstream.schemas.prompts.selectors import Hook

from ..records.attributions import NotLookedAt
from ..records.estimates import Estimate, StoredAttribution, Why
from ..records.sweep_units import Units
from ..records.sweeps import (
    HEAD_AXES,
    Baseline,
    GridValues,
    PairResult,
    Skipped,
    StoredSweep,
    SweepCell,
    SweepResult,
    SweepStart,
    SweepSummary,
    SweepTerms,
    Unit,
    UnitRecord,
)
from .sweep_metrics import noise_floor, unchanged

V = TypeVar("V")

KnownUnits = Mapping[int, UnitRecord]
_decoder = msgspec.msgpack.Decoder(UnitRecord)

#: Note on a pair whose clean prompt does not favour its answer.
_DOWN = (
    "the clean prompt favours the answer less than the corrupt one: a share of 1 is as unlikely an "
    "answer as after the clean prompt"
)


def known_units(packed: Iterable[bytes]) -> dict[int, UnitRecord]:
    """Return number of the unit → its record, from stored ones."""
    return {record.unit: record for record in map(_decoder.decode, packed)}


class PairRecords:
    """One pair of a sweep, and the records of its finished units, by number."""

    def __init__(self, sweep: StoredSweep, number: int, records: KnownUnits) -> None:
        self.sweep = sweep
        self.number = number
        self.records = records
        self.stored = sweep.pairs[number]
        self.units = Units(sweep)
        self.cells = self.units.cells_of(number)
        self.base = self.units.base(number).number
        self.source = self.units.source(number).number

    def value(self, number: int) -> float | None:
        record = self.records.get(number)
        return None if record is None else record.value

    def grid(self, value: Callable[[int], V]) -> dict[Hook, list[list[V]]]:
        """Return the pair's grids `[layers][columns]`. `value`: number of a cell → what the grid
        has.
        """
        sweep = self.sweep
        shape = len(sweep.hooks), len(sweep.layers), sweep.num_columns
        numbers = np.reshape(self.cells, shape)
        return {
            hook: [[value(number) for number in row] for row in rows]
            for hook, rows in zip(sweep.hooks, numbers.tolist(), strict=True)
        }

    @property
    def estimate(self) -> Estimate | None:
        """The estimates of the pair; None: there are none, or none yet."""
        record = self.records.get(self.units.estimate(self.number).number)
        return None if record is None else record.estimated

    @property
    def noise(self) -> list[float]:
        """The values of its noise units."""
        values = [self.value(unit.number) for unit in self.units.noise(self.number)]
        return [value for value in values if value is not None]

    @property
    def noise_floor(self) -> float | None:
        """`PairResult.noise_floor`."""
        return noise_floor(self.sweep.metric, self.noise, self.value(self.base))

    def exact_units(self) -> Iterable[Unit]:
        """Return the units with exact values: its cells, or with `sae` the chosen features."""
        attribution = self.sweep.attributed
        if attribution is None or attribution.sae is None:
            return self.units.cells(self.number)
        estimate = self.estimate
        scores = attribution.checked_features(estimate) if estimate else []
        return self.units.features(self.number, scores)

    def estimated_values(self, estimate: Estimate) -> dict[int, float | None]:
        """Return the number of each of these units → the estimate of its value."""
        attribution = self.sweep.attributed
        if attribution is None or attribution.sae is None:
            return dict(zip(self.cells, estimate.values, strict=False))
        nothing = unchanged(self.sweep.metric, estimate.base)
        scores = attribution.checked_features(estimate)
        return {
            unit.number: nothing + score.score
            for unit, score in zip(self.units.features(self.number, scores), scores, strict=True)
        }

    def effects(self, estimate: Estimate) -> dict[int, float]:
        """Return the number of each cell with an estimate → the size of its estimated effect, in
        the metric's units; strongest first.
        """
        nothing = unchanged(self.sweep.metric, estimate.base)
        sizes = {
            number: abs(value - nothing)
            for number, value in self.estimated_values(estimate).items()
            if value is not None
        }
        return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def pairs_of(sweep: StoredSweep, records: KnownUnits) -> list[PairRecords]:
    return [PairRecords(sweep, pair, records) for pair in range(len(sweep.pairs))]


def sweep_result(sweep: StoredSweep, records: KnownUnits, seconds: float | None) -> SweepResult:
    """Return the result so far. `records`: number of the unit → its record, for all finished units.

    `seconds`: duration of the sweep; None: not ended.
    """
    pairs = pairs_of(sweep, records)
    grids = [pair.grid(pair.value) for pair in pairs]
    mean: GridValues = {}
    spread: GridValues = {}
    for hook in sweep.hooks:
        cells = [
            [_over_pairs(values) for values in zip(*rows, strict=True)]
            for rows in zip(*(grid[hook] for grid in grids), strict=True)
        ]
        mean[hook] = [[average for average, _ in row] for row in cells]
        spread[hook] = [[deviation for _, deviation in row] for row in cells]
    return SweepResult(
        **_terms(sweep),
        window=sweep.window,
        alpha=sweep.alpha,
        pairs=[_pair_result(pair, grid) for pair, grid in zip(pairs, grids, strict=True)],
        mean=mean,
        spread=spread,
        skipped=_skipped(sweep, records),
        summary=sweep_summary(sweep, records, seconds),
    )


def _terms(sweep: StoredSweep) -> dict[str, Any]:
    """Return the fields that a sweep's result and its first event share."""
    terms = {name: getattr(sweep, name) for name in SweepTerms.__struct_fields__}
    return {**terms, "path": None if sweep.path is None else sweep.path.shown()}


def sweep_summary(sweep: StoredSweep, records: KnownUnits, seconds: float | None) -> SweepSummary:
    """Return the progress of the sweep; arguments as for `sweep_result`."""
    pairs = pairs_of(sweep, records)
    cells = Units(sweep).cell_numbers
    known = [record for number, record in records.items() if number in cells]
    with_value = sum(record.value is not None for record in known)
    return SweepSummary(
        cells=with_value,
        skipped=len(known) - with_value,
        total=sweep.num_cells,
        seconds=seconds,
        metric=sweep.metric,
        base=[pair.value(pair.base) for pair in pairs],
        source=[pair.value(pair.source) for pair in pairs],
        noise_floor=[pair.noise_floor for pair in pairs],
    )


def sweep_start(sweep: StoredSweep) -> SweepStart:
    """Return what is known before a sweep begins."""
    skipped = [
        Skipped(
            pair=pair,
            hook=hook,
            layers=sweep.layers,
            column=column,
            reason=stored.columns[column].reason,
        )
        for pair, stored in enumerate(sweep.pairs)
        for hook in sweep.hooks
        for column in range(sweep.num_columns)
        if not stored.columns[column].places
    ]
    return SweepStart(
        **_terms(sweep),
        labels=[[column.label for column in pair.columns] for pair in sweep.pairs],
        total=sweep.num_cells,
        skipped=skipped,
        notes=[pair.notes for pair in sweep.pairs],
    )


def sweep_cell(sweep: StoredSweep, unit: Unit, record: UnitRecord) -> SweepCell:
    """Return a cell as readers get it."""
    return SweepCell(
        **place_of(sweep, unit),
        pair=unit.pair,
        value=record.value,
        logprob=record.logprob,
        foil_logprob=record.foil_logprob,
        reason=record.reason,
        neurons=record.neurons,
    )


def place_of(sweep: StoredSweep, unit: Unit) -> dict[str, Any]:
    """Return the fields of a cell that say where it is."""
    return {
        "hook": sweep.hooks[unit.hook],
        "layer": sweep.layers[unit.layer],
        "column": unit.column,
        "label": sweep.pairs[unit.pair].columns[unit.column].label,
        "feature": unit.feature,
    }


def _neurons(pair: PairRecords) -> dict[Hook, list[list[list[int]]]]:
    """Return the neurons of each cell whose column selects them by rank; empty on other axes."""
    if all(column.ranks is None for column in pair.stored.columns):
        return {}

    def neurons(number: int) -> list[int]:
        record = pair.records.get(number)
        return record.neurons if record else []

    return pair.grid(neurons)


def _over_pairs(values: tuple[float | None, ...]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation of the values that exist."""
    if not (present := [value for value in values if value is not None]):
        return None, None
    mean = math.fsum(present) / len(present)
    if len(present) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in present) / (len(present) - 1))


def _pair_result(pair: PairRecords, grids: GridValues) -> PairResult:
    sweep = pair.sweep
    stored = pair.stored
    base = _baseline(pair.records.get(pair.base))
    source = _baseline(pair.records.get(pair.source))
    notes = stored.notes
    clean, corrupt = (base, source) if sweep.patches_clean else (source, base)
    if sweep.metric == "recovered" and clean and corrupt and clean.value < corrupt.value:
        notes = [*notes, _DOWN]
    return PairResult(
        labels=[column.label for column in stored.columns],
        positions=[[position for position, _ in column.places] for column in stored.columns],
        sources=[
            [source for _, source in column.places if sweep.ablation is None]
            for column in stored.columns
        ],
        base_tokens=stored.base_tokens,
        source_tokens=stored.source_tokens,
        answer=stored.answer_text,
        foil=stored.foil_text,
        base=base,
        source=source,
        noise_floor=pair.noise_floor,
        noise_probes=len(pair.noise),
        grids=grids,
        notes=notes,
        heads=[column.head for column in stored.columns] if sweep.axis in HEAD_AXES else [],
        neurons=_neurons(pair),
    )


def _baseline(record: UnitRecord | None) -> Baseline | None:
    if record is None or record.value is None:
        return None
    return Baseline(value=record.value, logprob=record.logprob, foil_logprob=record.foil_logprob)


def _skipped(sweep: StoredSweep, records: KnownUnits) -> list[Skipped]:
    """Return the cells known to have no value, grouped by pair, hook, column and reason."""
    units = Units(sweep)
    result: defaultdict[tuple[int, int, int, str], list[int]] = defaultdict(list)
    for number in sorted(
        number
        for number, record in records.items()
        if number in units.cell_numbers and record.value is None
    ):
        cell = units.cell(number)
        result[cell.pair, cell.hook, cell.column, records[number].reason].append(
            sweep.layers[cell.layer]
        )
    return [
        Skipped(pair=pair, hook=sweep.hooks[hook], layers=layers, column=column, reason=reason)
        for (pair, hook, column, reason), layers in sorted(result.items())
    ]


#: Cells that it computes at a time, at the least: forward passes are batched.
LEAST_ROUND = 8
#: Random cells of each part of the grid, at the least, on which `adaptive` tests what it assumes of
#: the others.
SAMPLE = 2
#: Effects below this share of the last of the top cells do not say by what factor an estimate is
#: too small: rounding and noise are most of them.
FAINT = 0.1


def chosen_cells(pair: PairRecords, estimate: Estimate) -> dict[Why, list[int]]:
    """Return the numbers of the pair's cells to be computed exactly; none for `adaptive`, which
    chooses later. A cell may be chosen for several reasons.

    The random cells are drawn from all cells that can be patched, the top ones among them, so that
    what is found in them holds for the grid. Random features are drawn where they are estimated.
    """
    attribution = pair.sweep.attributed
    if attribution is None or attribution.verify is None or pair.sweep.adaptive:
        return {}
    verify = attribution.verify
    if attribution.sae is not None:
        features = pair.units.features(pair.number, attribution.checked_features(estimate))
        number_of = {(unit.column, unit.feature): unit.number for unit in features}
        top, drawn = (
            [number_of[score.column, score.feature] for score in scores]
            for scores in (estimate.features[: verify.top], estimate.drawn)
        )
        return {"top": top, "random": sorted(drawn)}
    sizes = pair.effects(estimate)
    columns = pair.stored.columns
    cells = pair.units.cells(pair.number)
    possible = [unit.number for unit in cells if columns[unit.column].places]
    top = list(sizes)[: verify.top]
    doubtful = [pair.cells[place] for place in estimate.doubtful if pair.cells[place] in sizes]
    draw = random.Random(f"{attribution.seed}/{pair.number}")
    return {
        "top": top,
        "random": sorted(draw.sample(possible, min(verify.random, len(possible)))),
        "doubtful": [number for number in doubtful if number not in top][: verify.doubtful],
    }


def cells_to_compute(pair: PairRecords) -> set[int] | None:
    """Return the numbers of the pair's cells to compute now; None: all of them.

    For `adaptive` the next round, from what the records say; empty once it is over.
    """
    if pair.sweep.attributed is None:
        return None
    estimate = pair.estimate
    if estimate is None:
        return set()
    if pair.sweep.adaptive:
        return set(adaptive_round(pair, estimate).cells)
    return {number for numbers in estimate.chosen.values() for number in numbers}


class Round(NamedTuple):
    cells: list[int]  # numbers of the cells to compute next; empty: it is over
    left: NotLookedAt  # as it is before this round


def adaptive_round(pair: PairRecords, estimate: Estimate) -> Round:
    """Return the next round of the method `adaptive`. It depends on the records alone, so that an
    attempt after a killed worker continues.

    Coarse: the grid is divided into parts, and the strongest estimate of each is computed, with the
    top estimates. Fine: estimates of other cells are raised by the worst that was found: by the
    worst underestimate in the part, or by the worst factor in the grid. Those that reach the exact
    effect of the last of the top cells are computed, largest first. Once none does, the same is
    asked of a random sample of the cells that nothing singled out, from each part. It is over when
    that changes nothing, or the budget is used up.
    """
    attribution = pair.sweep.attributed
    records = pair.records
    assert attribution is not None
    assert attribution.verify is not None
    top = attribution.verify.top
    budget = attribution.budget
    sizes = pair.effects(estimate)
    part_of = _parts(pair.sweep, top)
    looked = [number for number in pair.cells if number in records]
    nothing = unchanged(pair.sweep.metric, pair.value(pair.base) or 0.0)
    exact = {
        number: abs(value - nothing)
        for number in looked
        if (value := records[number].value) is not None
    }
    last = sorted(exact.values(), reverse=True)[top - 1] if len(exact) >= top else None
    under: defaultdict[int, float] = defaultdict(float)
    for number, effect in exact.items():
        part = part_of(number)
        under[part] = max(under[part], effect - sizes.get(number, 0.0))
    # The cells looked at have large estimates, so they do not show how far others are too small. A
    # sum alone does not either: a weak cell is never too small by much, but a strong one with the
    # same relative error is.
    factors = (
        effect / sizes[number] if sizes.get(number) else math.inf
        for number, effect in exact.items()
        if effect > FAINT * (last or 0.0)
    )
    factor = max(factors, default=1.0)
    unseen = [number for number in sizes if number not in records]
    raised = {
        number: max(
            sizes[number] + under[part_of(number)], sizes[number] and sizes[number] * factor
        )
        for number in unseen
    }
    reaching = [number for number in unseen if last is None or raised[number] >= last]
    picked, sample = _begun(sizes, part_of, attribution, top, pair.number)
    left = NotLookedAt(
        cells=len(unseen),
        largest=max((sizes[number] for number in unseen), default=None),
        bound=max(raised.values(), default=None),
        last=last,
        sampled=len(exact.keys() & {*sample}),
        # A part whose cells were all underestimated more than those looked at can still hide a top
        # cell.
        settled=not reaching and exact.keys() >= {*sample},
    )
    room = max(budget - len(looked), 0)
    if not looked:
        return Round(picked[:room], left)
    reaching.sort(key=lambda number: (-raised[number], number))
    following = reaching or [number for number in sample if number not in records]
    return Round(following[: min(room, max(top, LEAST_ROUND))], left)


def _begun(
    sizes: Mapping[int, float],
    part_of: Callable[[int], int],
    attribution: StoredAttribution,
    top: int,
    pair: int,
) -> tuple[list[int], list[int]]:
    """Return the cells to begin with, and the random sample of the others: a quarter of the budget,
    and at least `SAMPLE` of each part.

    `sizes`: strongest first.
    """
    # stable: the strongest of each part comes first
    parts = [[*numbers] for _, numbers in groupby(sorted(sizes, key=part_of), part_of)]
    picked = dict.fromkeys([*[*sizes][:top], *(numbers[0] for numbers in parts)])
    rest = [[number for number in numbers if number not in picked] for numbers in parts]
    draw = random.Random(f"{attribution.seed}/{pair}")
    most = max(SAMPLE, attribution.budget // (4 * max(len(parts), 1)))
    return [*picked], [
        number for numbers in rest for number in draw.sample(numbers, min(most, len(numbers)))
    ]


def _parts(sweep: StoredSweep, parts: int) -> Callable[[int], int]:
    """Return the function from a cell's number to its part: each hook's layers and columns are cut
    so that there are about `parts` in all, at least one for each hook.
    """
    layers = len(sweep.layers)
    columns = sweep.num_columns
    share = max(1, round(parts / len(sweep.hooks)))  # parts of a hook
    down = min(layers, max(1, round(math.sqrt(share * layers / columns))))
    across = min(columns, max(1, round(share / down)))
    units = Units(sweep)

    def part(number: int) -> int:
        cell = units.cell(number)
        row = cell.layer * down // layers
        column = cell.column * across // columns
        return (cell.hook * down + row) * across + column

    return part
