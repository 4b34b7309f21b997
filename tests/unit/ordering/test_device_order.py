"""The rank's data plane on a device that works late and in an adversarial order: every finished
capture has the rows that its request asked for, or the request failed with a reason.
"""

import os
from pathlib import Path

import pytest
from boundaries import BOUNDARIES, inject
from drawn_requests import Decides
from simulated_rank import simulate

from midstream.workers.runner.rows.planner import Planner

#: What decides where steering is applied → seeds of each simulation; and those that `make test`
#: runs too.
SEEDS: dict[Decides, int] = {"nothing": 200, "probes": 60, "tokens": 60}
FEW = {"nothing": 3, "probes": 2, "tokens": 3}
#: The first seed; another one looks for rare orders on purpose.
FIRST = int(os.environ.get("ORDERING_SEED", "0"))

#: Seeds that found a fault of the product.
FAULTY = (73, 153)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fails", [False, True], ids=["whole", "one failure"])
@pytest.mark.parametrize(
    ("decides", "seed"),
    [
        pytest.param(
            decides,
            FIRST + seed,
            marks=[] if seed < FEW[decides] or seed in FAULTY else [pytest.mark.long],
        )
        for decides, seeds in SEEDS.items()
        for seed in range(seeds)
    ],
)
def test_captures_and_edits_are_right_in_every_order_of_the_device(
    decides: Decides, seed: int, fails: bool, tmp_path: Path
) -> None:
    """One failure, at any boundary, fails only requests that ran."""
    faults = [inject(seed)] if fails else []
    assert simulate(seed, tmp_path, *faults, decides=decides).findings == []


@pytest.mark.parametrize("seed", [29, 78])
def test_no_bank_edits_as_before_when_planning_fails(seed: int, tmp_path: Path) -> None:
    planning = BOUNDARIES.index((Planner, "plan_steering", False))
    assert simulate(seed, tmp_path, inject(planning)).findings == []
