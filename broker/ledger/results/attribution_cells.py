"""Chooses the cells or features of an attribution that are computed exactly: by their estimates, at
random, and for the method `adaptive` round by round.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ....schemas.jobs.attributions import NotLookedAt
from ....schemas.jobs.sweep_units import Units
from ....schemas.jobs.sweeps import Metric, StoredSweep, Unit, UnitRecord
from ....schemas.requests.attributions import Estimate, Why

#: Cells that it computes at a time, at the least: forward passes are batched.
LEAST_ROUND = 8

Records = Mapping[int, UnitRecord]


def unchanged(metric: Metric, base: float) -> float:
    """Return the value of a cell whose patch changes nothing, in the metric's units."""
    return 0.0 if metric == "recovered" else base


def exact_units(sweep: StoredSweep, pair: int, records: Records) -> Iterable[Unit]:
    """Return the pair's units with exact values: its cells, or with `sae` the chosen features."""
    units, attribution = Units(sweep), sweep.attributed
    if attribution is None or attribution.sae is None:
        return units.cells(pair)
    record = records.get(units.estimate(pair).number)
    estimate = None if record is None else record.estimated
    return units.features(pair, attribution.checked_features(estimate) if estimate else [])


def estimated_values(sweep: StoredSweep, pair: int, estimate: Estimate) -> dict[int, float | None]:
    """Return the number of each of these units → the estimate of its value."""
    units, attribution = Units(sweep), sweep.attributed
    if attribution is None or attribution.sae is None:
        return dict(zip(units.cells_of(pair), estimate.values, strict=False))
    nothing = unchanged(sweep.metric, estimate.base)
    scores = attribution.checked_features(estimate)
    return {
        unit.number: nothing + score.score
        for unit, score in zip(units.features(pair, scores), scores, strict=True)
    }


def effects(sweep: StoredSweep, pair: int, estimate: Estimate) -> dict[int, float]:
    """Return the number of each cell with an estimate → the size of its estimated effect, in the
    metric's units; strongest first.
    """
    nothing = unchanged(sweep.metric, estimate.base)
    sizes = {
        number: abs(value - nothing)
        for number, value in estimated_values(sweep, pair, estimate).items()
        if value is not None
    }
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def chosen_cells(sweep: StoredSweep, pair: int, estimate: Estimate) -> dict[Why, list[int]]:
    """Return the numbers of the pair's cells to be computed exactly; none for `adaptive`, which
    chooses later. A cell may be chosen for several reasons.

    The random cells are drawn from all cells that can be patched, the top ones among them, so that
    what is found in them holds for the grid. Random features are drawn where they are estimated.
    """
    attribution = sweep.attributed
    if attribution is None or attribution.verify is None or attribution.method == "adaptive":
        return {}
    verify, numbers = attribution.verify, Units(sweep).cells_of(pair)
    if attribution.sae is not None:
        features = Units(sweep).features(pair, attribution.checked_features(estimate))
        number_of = {(unit.column, unit.feature): unit.number for unit in features}
        top, drawn = (
            [number_of[score.column, score.feature] for score in scores]
            for scores in (estimate.features[: verify.top], estimate.drawn)
        )
        return {"top": top, "random": sorted(drawn)}
    sizes = effects(sweep, pair, estimate)
    columns = sweep.pairs[pair].columns
    possible = [unit.number for unit in Units(sweep).cells(pair) if columns[unit.column].places]
    top = list(sizes)[: verify.top]
    doubtful = [numbers[place] for place in estimate.doubtful if numbers[place] in sizes]
    draw = random.Random(f"{attribution.seed}/{pair}")
    return {
        "top": top,
        "random": sorted(draw.sample(possible, min(verify.random, len(possible)))),
        "doubtful": [number for number in doubtful if number not in top][: verify.doubtful],
    }


def cells_to_compute(sweep: StoredSweep, pair: int, records: Records) -> set[int] | None:
    """Return the numbers of the pair's cells to compute now; None: all of them.

    For `adaptive` the next round, from what the records say; empty once it is over.
    """
    attribution = sweep.attributed
    if attribution is None:
        return None
    record = records.get(Units(sweep).estimate(pair).number)
    estimate = None if record is None else record.estimated
    if estimate is None:
        return set()
    if attribution.method == "adaptive":
        return set(adaptive_round(sweep, pair, estimate, records).cells)
    return {number for numbers in estimate.chosen.values() for number in numbers}


class Round(NamedTuple):
    cells: list[int]  # numbers of the cells to compute next; empty: it is over
    left: NotLookedAt  # as it is before this round


def adaptive_round(sweep: StoredSweep, pair: int, estimate: Estimate, records: Records) -> Round:
    """Return the next round of the method `adaptive`. It depends on the records alone, so that an
    attempt after a killed worker continues.

    Coarse: the grid is divided into parts, and the strongest estimate of each is computed, with the
    top estimates. Fine: the worst underestimate in a part is added to the estimates of its other
    cells; those whose sum reaches the exact effect of the last of the top cells are computed,
    largest sum first. It is over when no sum does, or the budget is used up.
    """
    attribution, units = sweep.attributed, Units(sweep)
    assert attribution is not None
    assert attribution.verify is not None
    top, budget = attribution.verify.top, attribution.budget
    sizes = effects(sweep, pair, estimate)
    part_of = _parts(sweep, top)
    looked = [number for number in units.cells_of(pair) if number in records]
    exact: dict[int, float] = {}
    base = records.get(units.base(pair).number)
    nothing = unchanged(sweep.metric, base.value if base and base.value is not None else 0.0)
    for number in looked:
        if (value := records[number].value) is not None:
            exact[number] = abs(value - nothing)
    under: defaultdict[int, float] = defaultdict(float)
    for number, effect in exact.items():
        part = part_of(number)
        under[part] = max(under[part], effect - sizes.get(number, 0.0))
    unseen = [number for number in sizes if number not in records]
    sums = {number: sizes[number] + under[part_of(number)] for number in unseen}
    last = sorted(exact.values(), reverse=True)[top - 1] if len(exact) >= top else None
    reaching = [number for number in unseen if last is None or sums[number] >= last]
    left = NotLookedAt(
        cells=len(unseen),
        largest=max((sizes[number] for number in unseen), default=None),
        bound=max(sums.values(), default=None),
        last=last,
        settled=not reaching,
    )
    if not looked:
        first = dict.fromkeys(unseen[:top])
        strongest: dict[int, int] = {}
        for number in unseen:
            strongest.setdefault(part_of(number), number)
        return Round(list(first | dict.fromkeys(strongest.values()))[:budget], left)
    room = min(budget - len(looked), max(top, LEAST_ROUND))
    reaching.sort(key=lambda number: (-sums[number], number))
    return Round(reaching[: max(room, 0)], left)


def _parts(sweep: StoredSweep, parts: int) -> Callable[[int], int]:
    """Return the function from a cell's number to its part: each hook's layers and columns are cut
    so that there are about `parts` in all, at least one for each hook.
    """
    layers, columns = len(sweep.layers), sweep.num_columns
    share = max(1.0, layers * columns * len(sweep.hooks) / max(parts, 1))  # cells in a part
    high = min(layers, max(1, round(math.sqrt(share * layers / columns))))
    wide = min(columns, max(1, round(share / high)))
    units, across = Units(sweep), -(-columns // wide)

    def part(number: int) -> int:
        cell = units.cell(number)
        assert cell is not None
        return (cell.hook * layers + cell.layer // high) * across + cell.column // wide

    return part
