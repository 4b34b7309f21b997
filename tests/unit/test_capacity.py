"""The simulator of `benchmarks/capacity.py` against what is known of queues, and its plan against arithmetic."""

import importlib.util
import sys
from types import ModuleType

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
        api=capacity.Cost(1e-3, 0.0), redis=capacity.Cost(4e-4, 4e-4), relay=capacity.Cost(1e-4, 0.0), worker=capacity.Cost(2e-3, 0.0),
        rest=capacity.Cost(4e-4, 0.0), idle_redis_s=1e-4, idle_worker_s=1e-2, idle_rest_s=0.0, clients=8.0, services_clients=20.0,
        job_bytes=6500.0,
    )  # fmt: skip


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waits_are_those_of_a_queue_with_constant_service(capacity: ModuleType, load: float) -> None:
    """M/D/1: P(no wait) = 1 - load; so the median wait is 0 below a load of one half, and positive above."""
    median, late = capacity.waits(load / 0.001, 0.001, seconds=200)
    assert (median < 1e-6) == (load < 0.5)
    assert 0 < late < 0.02


def test_a_plan_multiplies_unit_costs(capacity: ModuleType, costs: object) -> None:
    parts = {part.name: part for part in capacity.plan(capacity.Load(1000, 8.64e6, 0.0, peak=2.0, job_s=20.0), costs)}
    assert parts["one Redis, its core"].used == pytest.approx(200 * (4e-4 + 4e-4 / 4) + 1000 * 1e-4), "4 jobs on each worker"
    assert parts["Redis, connections"].used == pytest.approx(8020)
    assert parts["one API replica, its core"].used == pytest.approx(0.2)
    assert parts["Redis, memory"].used == pytest.approx(100 * 7 * 86400 * 6500)
    shares = [part.share for part in capacity.plan(capacity.Load(1000, 8.64e6, 0.0), costs)]
    assert shares == sorted(shares, reverse=True)


def test_rows_load_the_bucket(capacity: ModuleType, costs: object) -> None:
    parts = {part.name: part for part in capacity.plan(capacity.Load(1, 1.0, 1e12, row_bytes=8192, days=30), costs)}
    assert parts["the bucket, bytes from one machine"].used == pytest.approx(1e12 * 8192 / (30 * 86400))
    assert parts["the bucket, PUTs"].used == pytest.approx(1e12 * 8192 / (30 * 86400) / (256 << 20))


def test_the_predicted_rate_falls_with_idle_workers(capacity: ModuleType, costs: object) -> None:
    assert capacity.predicted(1, 64, costs, 2) > capacity.predicted(16, 64, costs, 2) > 0


def test_costs_are_found_again_in_runs_that_were_made_of_them(capacity: ModuleType) -> None:
    true = capacity.Cost(2e-3, 5e-3)
    runs = [
        {"workers": n, "at_once": m, "per_s": 100.0, "spent": {"redis": true.at(m / n) + 0.1 * n / 100.0}, "idle": {"redis": 0.1 * n}}
        for n, m in ((1, 64), (16, 64), (16, 16))
    ]
    found = capacity._cost(runs, "redis")
    assert (found.each, found.shared) == pytest.approx((true.each, true.shared))
