"""Is nothing accepted lost, and does nothing happen twice, in 10,000 jobs while everything is
killed? A fixed seed and a random one.
"""

import json
import random
from pathlib import Path
from typing import Any

import gate
import pytest
from chaos import BUCKET, FULL, OTHER_WEIGHTS
from judge import Verdict
from s3_kit import FaultProxy

JOBS = 10_000
SEED = 20_260
#: Processes are killed so often that a job may lose more attempts than a service gives it.
OFTEN = {"max_attempts": 20}


def check(tmp_path: Path, seed: int, jobs: int, kills: dict[str, int], **options: Any) -> Verdict:
    report = gate.run(tmp_path, seed, jobs, kills, **OFTEN, **options)
    print(json.dumps(report.figures()))
    assert report.verdict.found == {rule: [] for rule in report.verdict.RULES}
    return report.verdict


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "seed", [SEED, random.SystemRandom().randrange(10**9)], ids=["fixed", "random"]
)
def test_the_gate_loses_and_duplicates_no_accepted_job(tmp_path: Path, seed: int) -> None:
    # field case 37, 38, 39
    verdict = check(tmp_path, seed, JOBS, FULL)
    assert verdict.seen["changed sources"] > 0
    assert verdict.seen["latches again"] > 0, "none was over a killed worker"
    assert verdict.seen["windows"] > 0


@pytest.mark.timeout(3600)
def test_the_gate_holds_where_harvests_go_into_a_bucket(tmp_path: Path, s3: FaultProxy) -> None:
    # A quarter of the jobs and of the kills.
    kills = {kind: -(-count // 4) for kind, count in FULL.items()} | BUCKET
    seed = random.SystemRandom().randrange(10**9)
    seen = check(tmp_path, seed, JOBS // 4, kills, bucket=s3, everyone=True).seen
    assert min(seen["harvests paused"], seen["doses"]) > 0


@pytest.mark.timeout(3600)
def test_no_job_ends_with_the_numbers_of_other_weights(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    assert check(tmp_path, seed, JOBS // 10, OTHER_WEIGHTS).seen["other weights"] > 0
