"""The fault gate in short: every kind of process is killed under load.

`make test-faults` runs it whole, with harvests into a bucket, and with two models of one name.
"""

import json
import random
from pathlib import Path

import gate
import pytest
from clients import HARVEST_EVERY

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


@pytest.mark.long
# field case 37, 38, 39
@pytest.mark.timeout(600)
def test_the_fault_gate_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    check(gate.run(tmp_path, seed, JOBS, KILLS, max_attempts=MAX_ATTEMPTS), KILLS)
