"""A worker says what its start took its time for."""

import pytest

from midstream.workers.engine import start_times
from midstream_ops.processes import STARTED


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(start_times, "_begun", [])
    monkeypatch.setattr(start_times.time, "monotonic", lambda: now[0])
    return now


def test_each_part_lasts_until_the_next(clock: list[float]) -> None:
    for part, seconds in (("imports", 9.1), ("configuration", 2.0), ("core and ranks", 12.04)):
        start_times.begin(part)
        clock[0] += seconds
    told = "23.1 s: imports 9.1 s, configuration 2.0 s, core and ranks 12.0 s"
    assert start_times.told() == told


@pytest.mark.parametrize("before", ["2026-11-30 16:43:17 INFO x: ", '{"message": "'])
@pytest.mark.parametrize("after", [" [worker=w]\nready", '", "worker": "w"}'])
def test_midstream_up_finds_them_in_the_log(clock: list[float], before: str, after: str) -> None:
    start_times.begin("imports")
    clock[0] += 5
    found = STARTED.search(f"{before}engine started in {start_times.told()}{after}")
    assert found is not None
    assert found[1] == start_times.told() == "5.0 s: imports 5.0 s"
