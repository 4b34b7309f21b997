"""The fault gate in short: every kind of process is killed under load.

`make test-faults` runs it whole, with harvests into a bucket, and with two models of one name.
"""

import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import gate
import pytest
from chaos import FIRST
from clients import GRADIENT_WAYS, HARVEST_EVERY, POLICY_WAYS, WATCHED_WAYS, WAYS, plans
from leftovers import Census
from stack import Stack

from midstream_ops.processes import birth

JOBS = 500
#: On a machine that stands still leases run out more often than anything is killed: a job that is
#: run again for that is none that was lost. The whole gate keeps to what the service does by
#: itself.
MAX_ATTEMPTS = 50
KILLS = {
    "worker": 4,
    "gradients": 2,
    "redis": 1,
    "relay": 1,
    "api": 1,
    "callbacks": 1,
    "worker stop": 1,
    "gradients stop": 1,
    "api stop": 1,
    "worker start": 1,
    "worker pause": 1,
    "gradients pause": 1,
    "redis full": 1,
    "machine": 1,
}


def check(report: gate.Report, kills: dict[str, int]) -> None:
    print(json.dumps(report.figures()))  # with the seed, should it fail
    assert report.verdict.found == {rule: [] for rule in report.verdict.RULES}
    assert report.verdict.seen["again"] > 0, (
        "some jobs were in the hands of a worker when it was killed"
    )
    replicas = {name: 2 * kills[name] for name in ("api", "api stop") if name in kills}
    assert report.figures()["kills"] == kills | replicas
    assert report.verdict.seen["harvests"] == JOBS // HARVEST_EVERY
    assert report.verdict.seen["attributions"] > 0
    assert report.verdict.seen["fits"] > 0
    assert report.verdict.seen["latched"] > 0


# The first seed once drew no fit at all.
@pytest.mark.parametrize("seed", [885224849, *range(9)])
def test_every_way_of_asking_is_planned_before_the_first_kill(seed: int) -> None:
    ways = WAYS | GRADIENT_WAYS | POLICY_WAYS | WATCHED_WAYS
    made = plans(random.Random(seed), JOBS, ways=ways)
    assert {plan.way for plan in made[: int(FIRST * JOBS)]} == {"harvest", *ways}


@pytest.mark.parametrize(("later", "left"), [(0, 1), (1, 0)], ids=["its own", "another's"])
def test_a_session_that_leads_another_process_now_is_not_left_over(
    tmp_path: Path, later: int, left: int
) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        sessions = {process.pid: birth(process.pid) - later}
        stack = cast(Stack, SimpleNamespace(processes={}, sessions=sessions))
        found = Census(stack, tmp_path)._orphans()
        process.kill()
    assert found == [(process.pid, "sleep")] * left


@pytest.mark.long
# field case 37, 38, 39
@pytest.mark.timeout(600)
def test_the_fault_gate_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    check(gate.run(tmp_path, seed, JOBS, KILLS, max_attempts=MAX_ATTEMPTS), KILLS)
