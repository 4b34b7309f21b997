"""Does the doctor find what is wrong with a whole stack, and say what to do?"""

import functools
import json
import math
import os
from types import ModuleType

import pytest
import redis
from ports import free_port
from stack import Stack, stack_with
from typer.testing import CliRunner

from midstream.client.cli import main as cli
from midstream.client.sdk.discovery import STATE_FILE
from midstream_ops.checks import disk_checks, engine_checks, redis_checks
from midstream_ops.checks.finding import CheckFinding, findings_of
from midstream_ops.checks.service import Service
from midstream_ops.checks.table import of
from midstream_ops.engine_packages import import_trouble

IMPORT_TROUBLE = functools.cache(import_trouble)

stack = stack_with(
    api=True,
    admin_key="ms_abcdef012345_" + "s3cr3t" * 8,
    # a worker that stands still for some seconds is not dead
    lease_s=15.0,
    **{"tuning.visibility_timeout_s": 20},
)


@pytest.fixture
def patient_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round trip and no fsync is too slow: how busy the machine that runs the tests is, is not
    what they are about. A process imports torch once for all of them.
    """
    monkeypatch.setattr(engine_checks, "import_trouble", IMPORT_TROUBLE)
    for level in ("WARN", "FAIL"):
        monkeypatch.setattr(redis_checks, f"PING_{level}_MS", math.inf)
        monkeypatch.setattr(disk_checks, f"FSYNC_{level}_MS", math.inf)


def bad(stack: Stack) -> dict[str, CheckFinding]:
    """What the doctor does not like, by what it is about; a fake model has nothing to certify, and
    an environment's server may have published faults.
    """
    found = findings_of(of("quick"), Service(stack.settings, stack.settings.redis_url, stack.url))
    return {
        finding.about: finding
        for finding in found
        if finding.level not in ("info", "ok")
        and finding.about not in ("model fake-model", "redis version")
    }


@pytest.mark.slow("a process of its own imports torch")
def test_the_doctor_finds_a_healthy_stack_by_its_data_directory(
    stack: Stack, patient_doctor: None
) -> None:
    (stack.directory / STATE_FILE).write_text(
        json.dumps({"pid": os.getpid(), "url": stack.url, "redis_url": stack.settings.redis_url})
    )
    done = CliRunner().invoke(cli.app, ["doctor", "--data-dir", str(stack.directory), "--json"])
    found = {finding["about"]: finding for finding in json.loads(done.stdout)}
    parts = {"api", "worker w1", "relay", "callbacks", "disk fsync", "keys"}
    assert {"redis AOF", "redis eviction", "redis clock"} | parts <= found.keys()
    assert [finding for finding in found.values() if finding["level"] == "fail"] == []
    assert done.exit_code == 0
    model = found["model fake-model"]
    assert model["level"] == "warn"
    assert "not certified" in model["found"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("checks", "limit", "about"),
    [
        (redis_checks, "PING_{}_MS", "redis latency"),
        (disk_checks, "FSYNC_{}_MS", "disk fsync"),
    ],
)
@pytest.mark.parametrize("level", ["warn", pytest.param("fail", marks=pytest.mark.matrix)])
def test_the_doctor_reports_a_slow_redis_and_a_slow_disk(
    stack: Stack,
    patient_doctor: None,
    monkeypatch: pytest.MonkeyPatch,
    checks: ModuleType,
    limit: str,
    about: str,
    level: str,
) -> None:
    monkeypatch.setattr(checks, limit.format(level.upper()), 0.0)
    found = bad(stack)
    assert found[about].level == level
    assert found[about].advice


@pytest.mark.matrix
def test_the_doctor_says_what_to_do_about_a_redis_that_forgets(
    stack: Stack, patient_doctor: None
) -> None:
    client = redis.Redis.from_url(stack.settings.redis_url)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    try:
        found = bad(stack)
        assert set(found) - {"redis version"} == {"redis eviction", "redis AOF", "ready"}
        assert "CONFIG SET maxmemory-policy noeviction" in found["redis eviction"].advice
        assert "CONFIG SET appendonly yes" in found["redis AOF"].advice
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")
    client.config_set("appendfsync", "no")
    client.config_set("maxmemory", client.info()["used_memory"])
    try:
        assert {about: finding.level for about, finding in bad(stack).items()} == {
            "redis AOF": "fail",
            "redis memory": "fail",
        }
    finally:
        client.config_set("appendfsync", "everysec")
        client.config_set("maxmemory", 0)
        client.close()


@pytest.mark.slow("the doctor waits for what is away")
def test_the_doctor_reports_an_unreachable_redis_and_api(
    stack: Stack, patient_doctor: None
) -> None:
    nowhere = free_port()
    redis_url = f"redis://:s3cr3t@127.0.0.1:{nowhere}/0"
    url = f"http://127.0.0.1:{nowhere}"
    found = list(findings_of(of("quick"), Service(stack.settings, redis_url, url)))
    assert {finding.about for finding in found if finding.level == "fail"} == {
        "redis",
        "api",
        "service",
    }
    assert "s3cr3t" not in str(found)


@pytest.fixture(scope="module")
def lonely(stack: Stack) -> Stack:
    """Its worker and its relay are dead, and a job waits: for the last test."""
    for name in ("relay", "worker"):
        stack.kill(name)
    # as they expire by themselves
    stack.do(lambda ledger: ledger.redis.delete("ms:relay", "ms:alive:w1"))
    stack.submit(["wait"])
    return stack


@pytest.mark.slow("the doctor waits for what is dead")
def test_the_doctor_reports_a_dead_relay_and_worker_and_exits_1(
    lonely: Stack, patient_doctor: None
) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--data-dir", str(lonely.directory), "--json"])
    failed = [each["about"] for each in json.loads(done.stdout) if each["level"] == "fail"]
    assert sorted(failed) == ["queue", "ready", "relay", "workers"]
    assert done.exit_code == 1
    assert "python -m midstream.broker.relay" in done.stdout
