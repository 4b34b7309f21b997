"""Assembles a sweep's unit records into grids, for results and for the first and last event of a
stream.
"""

import math
from collections import defaultdict
from collections.abc import Mapping

from ....schemas.jobs.sweep_units import Units
from ....schemas.jobs.sweeps import (
    HEAD_AXES,
    Baseline,
    PairResult,
    Skipped,
    StoredPair,
    StoredSweep,
    SweepCell,
    SweepResult,
    SweepStart,
    SweepSummary,
    Unit,
    UnitRecord,
)
from ....schemas.prompts.selectors import Hook
from .attribution_cells import KnownUnits
from .sweep_metrics import noise_floor

CellValues = list[list[float | None]]  # [layers][columns]


def sweep_result(sweep: StoredSweep, records: KnownUnits, seconds: float | None) -> SweepResult:
    """Return the result so far. `records`: number of the unit → its record, for all finished units.

    `seconds`: duration of the sweep; None: not ended.
    """
    grids = [_grids(sweep, records, pair) for pair in range(len(sweep.pairs))]
    mean: dict[Hook, CellValues] = {}
    spread: dict[Hook, CellValues] = {}
    for hook in sweep.hooks:
        cells = [
            [_over_pairs(values) for values in zip(*rows, strict=True)]
            for rows in zip(*(grid[hook] for grid in grids), strict=True)
        ]
        mean[hook] = [[average for average, _ in row] for row in cells]
        spread[hook] = [[deviation for _, deviation in row] for row in cells]
    return SweepResult(
        metric=sweep.metric,
        direction=sweep.direction,
        ablation=sweep.ablation,
        hooks=sweep.hooks,
        layers=sweep.layers,
        window=sweep.window,
        alpha=sweep.alpha,
        pairs=[_pair_result(sweep, records, pair, grids[pair]) for pair in range(len(sweep.pairs))],
        mean=mean,
        spread=spread,
        skipped=_skipped(sweep, records),
        summary=sweep_summary(sweep, records, seconds),
        axis=sweep.axis,
        path=None if sweep.path is None else sweep.path.shown(),
    )


def sweep_summary(sweep: StoredSweep, records: KnownUnits, seconds: float | None) -> SweepSummary:
    """Return the progress of the sweep; arguments as for `sweep_result`."""
    units, pairs = Units(sweep), range(len(sweep.pairs))
    cells = units.cell_numbers
    known = [record for number, record in records.items() if number in cells]
    with_value = sum(record.value is not None for record in known)
    return SweepSummary(
        cells=with_value,
        skipped=len(known) - with_value,
        total=sweep.num_cells,
        seconds=seconds,
        metric=sweep.metric,
        base=[_value(records.get(units.base(pair).number)) for pair in pairs],
        source=[_value(records.get(units.source(pair).number)) for pair in pairs],
        noise_floor=[noise_floor_of(sweep, records, pair) for pair in pairs],
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
        metric=sweep.metric,
        direction=sweep.direction,
        ablation=sweep.ablation,
        hooks=sweep.hooks,
        layers=sweep.layers,
        labels=[[column.label for column in pair.columns] for pair in sweep.pairs],
        total=sweep.num_cells,
        skipped=skipped,
        notes=[pair.notes for pair in sweep.pairs],
        axis=sweep.axis,
        path=None if sweep.path is None else sweep.path.shown(),
    )


def sweep_cell(sweep: StoredSweep, unit: Unit, record: UnitRecord) -> SweepCell:
    """Return a cell as readers get it."""
    return SweepCell(
        pair=unit.pair,
        hook=sweep.hooks[unit.hook],
        layer=sweep.layers[unit.layer],
        column=unit.column,
        label=sweep.pairs[unit.pair].columns[unit.column].label,
        value=record.value,
        logprob=record.logprob,
        foil_logprob=record.foil_logprob,
        reason=record.reason,
        neurons=record.neurons,
        feature=unit.feature,
    )


def grid_of(
    sweep: StoredSweep, pair: int, values: Mapping[int, float | None]
) -> dict[Hook, CellValues]:
    """Return a pair's grids from the number of each cell → its value."""
    return {
        hook: [[values.get(number) for number in row] for row in rows]
        for hook, rows in _numbers(sweep, pair).items()
    }


def _grids(sweep: StoredSweep, records: KnownUnits, pair: int) -> dict[Hook, CellValues]:
    numbers = Units(sweep).cells_of(pair)
    return grid_of(sweep, pair, {number: _value(records.get(number)) for number in numbers})


def _neurons(
    sweep: StoredSweep, records: KnownUnits, pair: int
) -> dict[Hook, list[list[list[int]]]]:
    """Return the neurons of each cell whose column selects them by rank; empty on other axes."""
    if all(column.ranks is None for column in sweep.pairs[pair].columns):
        return {}
    return {
        hook: [
            [record.neurons if (record := records.get(number)) else [] for number in row]
            for row in rows
        ]
        for hook, rows in _numbers(sweep, pair).items()
    }


def _numbers(sweep: StoredSweep, pair: int) -> dict[Hook, list[range]]:
    """Return the numbers of a pair's cells, `[layers][columns]`."""
    width, layers = sweep.num_columns, len(sweep.layers)
    first = Units(sweep).cells_of(pair).start
    return {
        hook: [
            range(start, start + width)
            for start in range(
                first + place * layers * width, first + (place + 1) * layers * width, width
            )
        ]
        for place, hook in enumerate(sweep.hooks)
    }


def _value(record: UnitRecord | None) -> float | None:
    return None if record is None else record.value


def _over_pairs(values: tuple[float | None, ...]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation of the values that exist."""
    present = [value for value in values if value is not None]
    if not present:
        return None, None
    mean = math.fsum(present) / len(present)
    if len(present) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in present) / (len(present) - 1))


def _pair_result(
    sweep: StoredSweep, records: KnownUnits, pair: int, grids: dict[Hook, CellValues]
) -> PairResult:
    units, stored = Units(sweep), sweep.pairs[pair]
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
        base=_baseline(stored, records.get(units.base(pair).number)),
        source=_baseline(stored, records.get(units.source(pair).number)),
        noise_floor=noise_floor_of(sweep, records, pair),
        noise_probes=sum(
            _value(records.get(unit.number)) is not None for unit in units.noise(pair)
        ),
        grids=grids,
        notes=stored.notes,
        heads=[column.head for column in stored.columns] if sweep.axis in HEAD_AXES else [],
        neurons=_neurons(sweep, records, pair),
    )


def _baseline(pair: StoredPair, record: UnitRecord | None) -> Baseline | None:
    if record is None or record.value is None:
        return None
    return Baseline(value=record.value, logprob=record.logprob, foil_logprob=record.foil_logprob)


def noise_floor_of(sweep: StoredSweep, records: KnownUnits, pair: int) -> float | None:
    """Return `PairResult.noise_floor`."""
    units = Units(sweep)
    values = [_value(records.get(unit.number)) for unit in units.noise(pair)]
    return noise_floor(
        sweep.metric,
        [value for value in values if value is not None],
        _value(records.get(units.base(pair).number)),
    )


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
        assert cell is not None
        result[cell.pair, cell.hook, cell.column, records[number].reason].append(
            sweep.layers[cell.layer]
        )
    return [
        Skipped(pair=pair, hook=sweep.hooks[hook], layers=layers, column=column, reason=reason)
        for (pair, hook, column, reason), layers in sorted(result.items())
    ]
