"""Which cells of an attribution are computed exactly, and how its estimates compare with them."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from midstream.schemas.artifacts.saes import StoredSae
from midstream_lab.records.estimates import Estimate, FeatureScore, StoredAttribution, Verify
from midstream_lab.records.sweep_units import Units
from midstream_lab.records.sweeps import Column, StoredPair, StoredSweep, UnitRecord
from midstream_lab.results.attribution_result import pair_attribution, spearman
from midstream_lab.results.sweep_result import (
    PairRecords,
    adaptive_round,
    cells_to_compute,
    chosen_cells,
)

LAYERS = 6
COLUMNS = 8
CELLS = LAYERS * COLUMNS


def sweep(verify: Verify | None, **changes: Any) -> StoredSweep:
    """One pair; the last column is skipped."""
    columns = [
        Column(label=str(place), places=[(place, place)] if place < COLUMNS - 1 else [])
        for place in range(COLUMNS)
    ]
    how = {"method": "attribution", "steps": 1, "seed": 5, "keep": 1, "verify": verify}
    return StoredSweep(
        pairs=[StoredPair(base=[1] * COLUMNS, source=[2] * COLUMNS, columns=columns)],
        hooks=["post_block"],
        layers=list(range(LAYERS)),
        metric="logit_diff",
        direction="denoise",
        noise=1,
        attribution=StoredAttribution(**(how | changes)),
    )


def estimate(effects: dict[int, float], **changes: Any) -> Estimate:
    """Estimates with these effects by index of the cell, and none elsewhere; the base is 10."""
    values = [
        None if place % COLUMNS == COLUMNS - 1 else 10.0 + effects.get(place, 0.0)
        for place in range(CELLS)
    ]
    return Estimate(base=10.0, values=values, **changes)


def records(asked: StoredSweep, stored: Estimate, exact: dict[int, float]) -> dict[int, UnitRecord]:
    """What is kept once cells with these exact effects are known; a no-op patch changes 0.1."""
    units = Units(asked)
    (noise,) = units.noise(0)
    known = {units.base(0).number: 10.0, noise.number: 10.1}
    known |= {units.first_cell + place: 10.0 + effect for place, effect in exact.items()}
    kept = {number: UnitRecord(unit=number, value=value) for number, value in known.items()}
    number = units.estimate(0).number
    return kept | {number: UnitRecord(unit=number, estimate=stored)}


def test_top_random_and_doubtful_cells_are_chosen() -> None:
    asked = sweep(Verify(top=2, random=5, doubtful=2))
    stored = estimate({3: -4.0, 9: 2.0, 20: 1.0}, doubtful=[9, 20, 7, 30, 31])
    chosen = chosen_cells(PairRecords(asked, 0, {}), stored)
    first = Units(asked).first_cell
    assert chosen["top"] == [first + 3, first + 9]
    assert chosen["doubtful"] == [first + 20, first + 30], "7 is skipped, 9 is a top cell"
    assert len({*chosen["random"]}) == 5
    assert all((number - first) % COLUMNS != COLUMNS - 1 for number in chosen["random"])
    assert chosen_cells(PairRecords(asked, 0, {}), stored) == chosen, "the seed decides"


def test_random_cells_are_drawn_from_the_whole_grid() -> None:
    asked = sweep(Verify(top=3, random=CELLS, doubtful=0))
    chosen = chosen_cells(PairRecords(asked, 0, {}), estimate({3: -4.0}))
    assert {*chosen["top"]} <= {*chosen["random"]}
    assert len(chosen["random"]) == LAYERS * (COLUMNS - 1)


def test_only_chosen_cells_are_computed() -> None:
    asked = sweep(Verify(top=2, random=0, doubtful=0))
    first = Units(asked).first_cell
    assert cells_to_compute(PairRecords(asked, 0, {})) == set(), (
        "without estimates nothing is known to be wanted"
    )
    kept = records(asked, Estimate(base=10.0, chosen={"top": [first + 3]}), {})
    assert cells_to_compute(PairRecords(asked, 0, kept)) == {first + 3}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [40, 30, 20, 10], -1.0),
        ([0, 0, 0, 0, 5], [0.1, -0.1, 0.2, 0.0, 9], 0.7071),  # scipy.stats.spearmanr
        ([1, 2, 2, 3], [1, 3, 2, 4], 0.9487),
        ([1, 1, 1], [1, 2, 3], None),
        ([1, 2], [1, 2], None),
    ],
)
def test_equal_values_share_their_mean_rank(
    first: list[float], second: list[float], expected: float | None
) -> None:
    """Cells whose patch changes nothing have equal estimates: in the order of the cells, their
    ranks would agree perfectly with those of anything else that is sorted alike.
    """
    assert spearman(first, second) == (expected and pytest.approx(expected, abs=1e-4))


@pytest.mark.parametrize("apart", [0.0, 0.7, -0.7])
def test_a_cell_is_off_beyond_noise_floor_and_tolerance(apart: float) -> None:
    """Effects are compared: each worker's values lie around its own unpatched prompt's."""
    asked = sweep(Verify(top=2, random=0, doubtful=0, tolerance=0.5))
    first = Units(asked).first_cell
    stored = estimate({3: 4.0, 9: 2.0})
    values = [value and value + apart for value in stored.values]
    chosen = Estimate(base=10.0 + apart, values=values, chosen={"top": [first + 3, first + 9]})
    found = pair_attribution(PairRecords(asked, 0, records(asked, chosen, {3: 4.59, 9: 2.61})))
    assert [(cell.layer, cell.column, cell.off) for cell in found.checked] == [
        (0, 3, False),
        (1, 1, True),
    ]
    assert [cell.difference for cell in found.checked] == pytest.approx([-0.59, -0.61])
    effects = [cell.estimate_effect - cell.exact_effect for cell in found.checked]
    assert effects == pytest.approx([-0.59, -0.61])


def test_recall_is_of_known_cells_and_needs_others_than_the_top() -> None:
    asked = sweep(Verify(top=2, random=2, doubtful=0))
    first = Units(asked).first_cell
    values = estimate({3: 4.0, 9: 2.0}).values
    top = {"top": [first + 3, first + 9]}
    alone = Estimate(base=10.0, values=values, chosen=top)
    exact = {3: 4.0, 9: 2.0}
    assert pair_attribution(PairRecords(asked, 0, records(asked, alone, exact))).recall is None
    more = Estimate(base=10.0, values=values, chosen=top | {"random": [first + 1, first + 2]})
    found = pair_attribution(PairRecords(asked, 0, records(asked, more, exact | {1: 0.0, 2: -3.0})))
    recall = found.recall
    assert recall.known == 4
    assert recall.found == 1
    assert recall.recall == 0.5
    assert found.random.cells == 2
    assert found.random.spearman is None
    assert found.random.unchanged == 1


def run_adaptive(
    asked: StoredSweep, stored: Estimate, truth: dict[int, float]
) -> tuple[set[int], Any, int]:
    """Rounds to the end; the indices of the cells looked at, what is said of the rest, rounds."""
    first = Units(asked).first_cell
    exact = dict[int, float]()
    rounds = 0
    while True:
        following = adaptive_round(PairRecords(asked, 0, records(asked, stored, exact)), stored)
        if not following.cells:
            return {*exact}, following.left, rounds
        assert not {number - first for number in following.cells} & {*exact}
        exact |= {number - first: truth.get(number - first, 0.0) for number in following.cells}
        rounds += 1


def test_adaptive_stops_soon_where_estimates_are_right() -> None:
    truth = {3: 4.0, 9: 2.0, 20: 1.0}
    asked = sweep(Verify(top=2), method="adaptive", budget=16)
    looked, left, rounds = run_adaptive(asked, estimate(truth), truth)
    assert {3, 9} <= looked
    assert len(looked) <= 8
    assert left.settled
    assert left.last == 2.0
    assert left.sampled == 4
    assert rounds == 2
    assert left.cells == LAYERS * (COLUMNS - 1) - len(looked)


@pytest.mark.parametrize(("noise", "found", "wrong"), [(0.1, 98, 1), (0.7, 96, 2), (2.0, 60, 0)])
def test_adaptive_is_settled_only_where_a_sample_says_so(
    noise: float, found: int, wrong: int
) -> None:
    """There are 20 grids whose estimates err by factors. `found`: how many of the 5 top cells of
    each it finds; `wrong`: how many grids it calls settled without one of them.
    """
    chance = np.random.default_rng(3)
    top = 0
    missed = 0
    asked = sweep(Verify(top=5), method="adaptive", budget=126)
    asked = replace(asked, hooks=["pre_attn", "attn_out", "mlp_out"], layers=list(range(30)))
    for _ in range(20):
        exact = np.abs(chance.normal(0, 0.3, (3, 30, COLUMNS)))
        for hook, layer, column in chance.integers(0, exact.shape, (5, 3)):
            near = np.exp(-(((np.arange(30) - layer) / 2) ** 2))
            exact[hook, :, column] += chance.uniform(1, 4) * near
        sizes = exact * np.exp(chance.normal(0, noise, exact.shape))
        stored = Estimate(base=0.0, values=sizes.ravel().tolist())
        truth = exact.ravel().tolist()
        looked, left, _ = run_adaptive(asked, stored, dict(enumerate(truth)))
        of_top = len({*np.argsort(truth)[-5:].tolist()} & looked)
        top += of_top
        if left.settled and of_top < 5:
            missed += 1
    assert top >= found, (top, missed)
    assert missed <= wrong, (top, missed)


def test_adaptive_ends_with_its_budget_and_admits_it() -> None:
    stored = estimate({3: 4.0})
    looked, left, _ = run_adaptive(sweep(Verify(top=2), method="adaptive", budget=5), stored, {})
    assert len(looked) == 5
    assert not left.settled


def features(count: int) -> list[FeatureScore]:
    """Scores that fall from `count` to 1, in two columns."""
    return [
        FeatureScore(column=number % 2, feature=number - 1, score=float(count - number))
        for number in range(count)
    ]


def test_features_are_chosen_compared_and_kept_apart_from_the_grid() -> None:
    sae = StoredSae(name="s", digest="", path="s", hook="post_block", layer=0, bytes=1)
    asked = sweep(Verify(top=3, random=4, doubtful=0, tolerance=0.5), sae=sae)
    units = Units(asked)
    scores = features(9)
    # the last one is not among the listed features; the second is among the top ones
    stored = Estimate(
        base=10.0, features=scores[:8], drawn=[scores[number] for number in (1, 5, 8)]
    )
    chosen = chosen_cells(PairRecords(asked, 0, {}), stored)
    first = units.estimate(0).number + 1
    assert chosen == {
        "top": [first, first + 1, first + 2],
        "random": [first + 1, first + 3, first + 4],
    }
    assert units.requests == (first + 7) * units.width
    assert asked.num_exact == 7
    stored = replace(stored, chosen=chosen)
    kept = records(asked, stored, {})
    assert cells_to_compute(PairRecords(asked, 0, kept)) == {*range(first, first + 5)}
    exact = dict(enumerate((9.0, 8.0, 1.0, 4.0, 3.0), first))  # of estimates 9, 8, 7, 4 and 1
    kept |= {n: UnitRecord(unit=n, value=10.0 + effect) for n, effect in exact.items()}
    found = pair_attribution(PairRecords(asked, 0, kept))
    assert [(cell.column, cell.feature, cell.estimate, cell.off) for cell in found.checked] == [
        (0, -1, 19.0, False),
        (1, 0, 18.0, False),
        (0, 1, 17.0, True),
        (1, 4, 14.0, False),
        (0, 7, 11.0, True),
    ]
    assert [cell.why for cell in found.checked][1] == ["top", "random"]
    assert found.random.cells == 3
    assert found.random.spearman == 1.0
    assert found.recall.known == 5
    assert found.recall.found == 2
    assert found.estimates == {"post_block": [[None] * COLUMNS] * LAYERS}
