"""Is nothing accepted lost, and does nothing happen twice, in 10,000 jobs while everything is
killed? A fixed seed and a random one.
"""

import json
import random
from pathlib import Path

import gate
import pytest
import s3_kit
from chaos import BUCKET, FULL, OTHER_WEIGHTS

JOBS, SEED = 10_000, 20_260


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [SEED, None], ids=["fixed", "random"])
def test_the_gate_loses_and_duplicates_no_accepted_job(tmp_path: Path, seed: int | None) -> None:
    # field case 37, 38, 39
    chosen = random.SystemRandom().randrange(10**9) if seed is None else seed
    print(f"\nfault gate with seed {chosen}")
    report = gate.run(tmp_path, chosen, JOBS, FULL)
    print(report.table(), json.dumps(report.figures()), sep="\n")
    assert report.verdict.found == {rule: [] for rule in report.verdict.RULES}
    assert report.verdict.seen["changed sources"] > 0
    assert report.verdict.seen["latches again"] > 0, "none was over a killed worker"


@pytest.mark.timeout(3600)
def test_the_gate_holds_where_harvests_go_into_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"\nfault gate with a bucket, seed {seed}")
    for name, value in s3_kit.ENVIRONMENT.items():  # for whoever reads the harvests afterwards
        monkeypatch.setenv(name, value)
    with s3_kit.s3_server() as bucket:
        # A quarter of the jobs and of the kills: else some jobs would lose as many workers as they
        # have attempts.
        report = gate.run(
            tmp_path,
            seed,
            JOBS // 4,
            {kind: -(-count // 4) for kind, count in FULL.items()} | BUCKET,
            bucket=bucket,
        )
    print(report.table(), json.dumps(report.figures()), sep="\n")
    assert report.verdict.found == {rule: [] for rule in report.verdict.RULES}
    assert report.verdict.seen["harvests paused"] > 0


@pytest.mark.timeout(3600)
def test_no_job_ends_with_the_numbers_of_other_weights(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"\nfault gate with two models of one name, seed {seed}")
    report = gate.run(tmp_path, seed, JOBS // 10, OTHER_WEIGHTS)
    print(report.table(), json.dumps(report.figures()), sep="\n")
    assert report.verdict.found == {rule: [] for rule in report.verdict.RULES}
    assert report.verdict.seen["other weights"] > 0
