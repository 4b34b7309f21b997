"""The rank's data plane on a device that works late and in an adversarial order: every finished
capture has the rows that its request asked for, or the request failed with a reason.
"""

import os
from pathlib import Path

import pytest
from boundaries import BOUNDARIES, inject
from simulated_rank import simulate

from midstream.workers.runner.rows.planner import Planner

#: Seeds of each simulation, and those that `make test` runs too.
SEEDS, FEW = 200, 10
#: The first seed; another one looks for rare orders on purpose.
FIRST = int(os.environ.get("ORDERING_SEED", "0"))

#: Seeds that found a fault of the product.
FAULTY = (73, 153)

seeds = pytest.mark.parametrize(
    "seed",
    [
        pytest.param(FIRST + seed, marks=[] if seed < FEW or seed in FAULTY else [pytest.mark.long])
        for seed in range(SEEDS)
    ],
)


@pytest.mark.timeout(120)
@seeds
def test_captures_are_whole_in_every_order_of_the_device(seed: int, tmp_path: Path) -> None:
    assert simulate(seed, tmp_path).findings == []


@pytest.mark.timeout(120)
@seeds
def test_one_failure_anywhere_fails_only_requests_that_ran(seed: int, tmp_path: Path) -> None:
    assert simulate(seed, tmp_path, inject(seed)).findings == []


gated = pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed < FEW else [pytest.mark.long]) for seed in range(60)],
)


@pytest.mark.timeout(120)
@gated
def test_gates_open_at_the_right_tokens_in_every_order(seed: int, tmp_path: Path) -> None:
    assert simulate(seed, tmp_path, gates=True).findings == []


@pytest.mark.timeout(120)
@gated
def test_one_failure_anywhere_leaves_the_gates_of_others(seed: int, tmp_path: Path) -> None:
    assert simulate(seed, tmp_path, inject(seed), gates=True).findings == []


@pytest.mark.parametrize("seed", [29, 78])
def test_no_bank_edits_as_before_when_planning_fails(seed: int, tmp_path: Path) -> None:
    planning = BOUNDARIES.index((Planner, "plan_steering", False))
    assert simulate(seed, tmp_path, inject(planning)).findings == []
