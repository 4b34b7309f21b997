"""The simulator of `benchmarks/capacity.py` against what is known of queues, and its plan against
arithmetic.
"""

import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
from tree import ROOT


@pytest.fixture(scope="module")
def capacity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capacity", ROOT / "benchmarks" / "capacity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["capacity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def costs(capacity: ModuleType) -> object:
    return capacity.Costs(
        api=capacity.Cost(1e-3, 0.0),
        redis=capacity.Cost(4e-4, 4e-4),
        relay=capacity.Cost(1e-4, 0.0),
        worker=capacity.Cost(2e-3, 0.0),
        rest=capacity.Cost(4e-4, 0.0),
        idle_redis_s=1e-4,
        idle_worker_s=1e-2,
        idle_rest_s=0.0,
        clients=8.0,
        services_clients=20.0,
        job_bytes=6500.0,
        power=0.5,
    )


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waits_are_those_of_a_queue_with_constant_service(
    capacity: ModuleType, load: float
) -> None:
    """M/D/1: P(no wait) = 1 - load; so the median wait is 0 below a load of one half, and positive
    above.
    """
    median, late = capacity.waits(load / 0.001, 0.001, seconds=200)
    assert (median < 1e-6) == (load < 0.5)
    assert 0 < late < 0.02


def test_a_plan_multiplies_unit_costs(capacity: ModuleType, costs: object) -> None:
    parts = {
        part.name: part
        for part in capacity.plan(capacity.Load(1000, 8.64e6, 0.0, peak=2.0, job_s=20.0), costs)
    }
    assert parts["one Redis, its core"].used == pytest.approx(
        200 * (4e-4 + 4e-4 / 2) + 1000 * 1e-4
    ), "4 jobs on each worker"
    assert parts["Redis, connections"].used == pytest.approx(8020)
    assert parts["one API replica, its core"].used == pytest.approx(0.2)
    assert parts["Redis, memory"].used == pytest.approx(100 * 7 * 86400 * 6500)
    shares = [part.share for part in capacity.plan(capacity.Load(1000, 8.64e6, 0.0), costs)]
    assert shares == sorted(shares, reverse=True)


def test_rows_load_the_bucket(capacity: ModuleType, costs: object) -> None:
    parts = {
        part.name: part
        for part in capacity.plan(capacity.Load(1, 1.0, 1e12, row_bytes=8192, days=30), costs)
    }
    assert parts["the bucket, bytes from one machine"].used == pytest.approx(
        1e12 * 8192 / (30 * 86400)
    )
    assert parts["the bucket, PUTs"].used == pytest.approx(1e12 * 8192 / (30 * 86400) / (256 << 20))


def test_the_predicted_rate_falls_with_idle_workers(capacity: ModuleType, costs: object) -> None:
    assert capacity.predicted(1, 64, costs, 2) > capacity.predicted(16, 64, costs, 2) > 0


def test_costs_are_found_again_in_runs_that_were_made_of_them(capacity: ModuleType) -> None:
    runs = []
    for n, at_once, per_s in ((1, 1, 30.0), (1, 256, 200.0), (16, 64, 160.0)):
        alone = max(1.0, min(at_once, 64) / n) ** -0.5
        spent = {
            part: 1e-3 + 4e-3 * alone + 0.1 * n / per_s
            for part in ("api", "redis", "relay", "worker", "flower")
        }
        runs.append(
            {
                "workers": n,
                "at_once": at_once,
                "per_s": per_s,
                "fitted": True,
                "clients": 20 + 8 * n,
                "job_bytes": 1.0,
                "spent": spent,
                "idle": dict.fromkeys(spent, 0.1 * n),
            }
        )
    found = capacity.costs_of({"runs": runs})
    assert (found.redis.each, found.redis.shared, found.power) == pytest.approx(
        (1e-3, 4e-3, 0.5), rel=0.02
    )
    assert (found.clients, found.services_clients, found.idle_worker_s) == pytest.approx(
        (8.0, 20.0, 0.1)
    )


@pytest.fixture
def found(capacity: ModuleType) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(capacity.DATA.read_text())
    return read


def test_the_page_has_the_tables_that_the_simulator_makes_of_the_runs(
    capacity: ModuleType, found: dict[str, Any]
) -> None:
    page = capacity.PAGE.read_text()
    for name, table in capacity.tables(found).items():
        assert re.search(rf"<!-- {name}: [a-z ]* -->\n\n{re.escape(table)}\n<!-- end -->", page), (
            f"{name}: run benchmarks/capacity.py page"
        )


def test_the_simulator_is_held_to_runs_with_1_4_and_16_workers(
    capacity: ModuleType, found: dict[str, Any]
) -> None:
    checked = capacity.check(found)
    assert {run["workers"] for run, _ in checked} == {1, 4, 16}
    tested = [said / run["per_s"] - 1 for run, said in checked if not run["fitted"]]
    assert len(tested) >= 3
    assert max(map(abs, tested)) < 0.15


def test_the_text_of_the_page_says_what_the_simulator_says(
    capacity: ModuleType, found: dict[str, Any]
) -> None:
    load, costs = capacity.PLANNED, capacity.costs_of(found)
    page = re.sub(r"[\s*]+", " ", capacity.PAGE.read_text())
    parts = {part.name: part for part in capacity.plan(load, costs)}
    day = {part.name: part for part in capacity.plan(capacity.DAY_KEPT, costs)}["Redis, memory"]
    quarter = capacity.plan(
        capacity.replace(load, workers=load.workers // 4, jobs=load.jobs / 4), costs
    )
    split = {part.name: part for part in quarter}["one Redis, its core"]
    harvest = parts["the bucket, bytes from one machine"].used
    for said in (
        f"carries {capacity.FULL / costs.redis.at(1):.0f} to "
        f"{capacity.FULL / costs.redis.at(0):.0f} jobs/s",
        f"{load.jobs / capacity.DAY_S:.0f}/s on average",
        f"{load.rate:.0f}/s in an hour three times as busy",
        f"a worker has {load.depth:.1f} jobs at a time",
        f"{load.jobs * 7 / 1e6:.0f} M jobs and {parts['Redis, memory'].used / 1e9:.0f} GB",
        f"for a day ({day.used / 1e9:.0f} GB)",
        f"{parts['one Redis, its core'].used:.2f} cores",
        f"without a single job take {load.workers * costs.idle_redis_s:.2f} of a core",
        f"use {split.used:.2f} of a core of Redis each",
        f"{parts['Redis, connections'].used:.0f} connections, {costs.clients:.0f} for each worker",
        f"{parts['one API replica, its core'].used:.1f} cores of the API",
        f"{harvest / 1e9:.1f} GB/s of rows",
        f"{harvest / (195 << 20):.0f} cores of all workers",
    ):
        assert said in page, said
