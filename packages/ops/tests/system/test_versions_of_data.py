"""Does a newer version go on with an older one's data, and an older one with a newer one's where it
can; and is it refused where it cannot?
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from up_kit import START_S, Up
from wait_kit import wait_until

from midstream import Client
from midstream.broker.processes.folder_schema import FILE
from midstream.broker.redis_service.ledger_schema import SERVICE
from midstream.client.cli.keys import own_redis_url
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.jobs import State
from midstream.schemas.service.stored_schema import SCHEMA
from midstream_ops import redis_server

#: What every process of another version runs first. Python imports it by its name.
OTHER = """
import os
if os.environ.get("OTHER_VERSION"):
    import midstream.schemas.base as base
    import midstream.schemas.base.version as version
    version.__version__ = os.environ["OTHER_VERSION"]
    from midstream.schemas.service import stored_schema
    stored_schema.SCHEMA = int(os.environ["OTHER_SCHEMA"])
    stored_schema.READABLE_FROM = int(os.environ["OTHER_FROM"])
"""
CAPTURE: dict[str, Any] = {"layers": "all", "positions": "all_prompt"}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Up]]:
    """Start `midstream up` on the same data, of this version, or of one with another schema: its
    number, and the oldest that reads its data.
    """
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(OTHER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    started: list[Up] = []

    def begin(schema: int = 0, readable_from: int = 0) -> Up:
        with monkeypatch.context() as patch:
            if schema:
                patch.setenv("OTHER_VERSION", "9.0.0")
                patch.setenv("OTHER_SCHEMA", str(schema))
                patch.setenv("OTHER_FROM", str(readable_from))
            gate = f"turnstile:file={tmp_path / 'gate'}"
            few = {"tuning.worker_concurrency": 2, "lease_s": 6}
            started.append(Up(tmp_path / "data", fault=gate, **few))
        return started[-1]

    yield begin
    for up in started:
        up.close()
        assert up.alive() == []


def in_flight(client: Client, gate: Path, number: int) -> list[str]:
    """Jobs of which one has ended, two run, and the others wait; the gate holds them."""
    gate.unlink(missing_ok=True)
    jobs = submit(client, 1)
    client.wait(jobs[0], timeout=60)
    gate.write_text("1")
    jobs += submit(client, number - 1)
    wait_until(lambda: [client.jobs.get(job).state for job in jobs].count(State.RUNNING) >= 2)
    return jobs


def submit(client: Client, number: int) -> list[str]:
    return [
        client.submit(model="fake", prompts=[f"text {each}"], max_tokens=12, capture=CAPTURE).id
        for each in range(number)
    ]


@pytest.mark.long
def test_an_upgrade_and_a_rollback_go_on_with_jobs_in_flight(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    up = start()
    with Client(up.ready()) as client:
        jobs = in_flight(client, gate, 8)
        documents = [f"a document with several words {n}" for n in range(60)]
        harvest = client.harvests.submit(model="fake", source={"lines": documents}, layers=[1]).id
    assert up.interrupt() == 0
    newer = start(SCHEMA + 1, SCHEMA)
    with Client(newer.ready()) as client:
        jobs += in_flight(client, gate, 8)
    assert newer.interrupt(signal.SIGTERM) == 0
    dry = up.midstream("rollback", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "a dry run: nothing was changed" in dry.stdout
    assert f"written by midstream 9.0.0 (stored schema {SCHEMA + 1})" in dry.stdout
    done = up.midstream("rollback")
    assert done.returncode == 0, done.stderr
    assert f"midstream {__version__} may go on with this data" in done.stdout
    older = start()
    gate.unlink()
    with Client(older.ready()) as client:
        running = older.midstream("rollback")
        assert "is in use by a stack" in running.stderr
        for job in jobs:
            assert client.wait(job, timeout=120).state is State.SUCCEEDED
            with client.capture(job) as reader:
                assert all(check.ok for check in reader.verify())
        assert client.harvests.wait(harvest, timeout=120).state == "succeeded"


@pytest.mark.long
def test_data_that_only_a_newer_version_reads_are_refused_by_name(
    start: Callable[..., Up],
) -> None:
    newer = start(SCHEMA + 1, SCHEMA + 1)
    newer.ready()
    assert newer.interrupt() == 0
    words = f"was written by midstream 9.0.0 (stored schema {SCHEMA + 1}"
    older = start()
    assert older.process.wait(START_S) == 1
    assert words in older.output()
    assert "start midstream 9.0.0 or a newer one" in older.output()
    told = older.midstream("rollback")
    assert told.returncode == 1
    assert words in told.stderr
    (newer.data / FILE).unlink()  # as where only Redis is shared
    older = start()
    assert older.process.wait(START_S) == 1
    assert f"the ledger in Redis {words}" in older.output()


@pytest.mark.long
def test_a_rollback_names_what_this_version_cannot_read(
    start: Callable[..., Up], tmp_path: Path
) -> None:
    newer = start(SCHEMA + 1, SCHEMA)
    with Client(newer.ready()) as client:
        *_, waiting = in_flight(client, tmp_path / "gate", 5)
        server = redis.Redis.from_url(own_redis_url(newer.data))
        raw = server.hget(f"ms:job:{waiting}", "spec")
        assert raw is not None
        spec = msgspec.msgpack.decode(raw) | {"invented_later": 1}
        server.hset(f"ms:job:{waiting}", "spec", msgspec.msgpack.encode(spec))
    assert newer.interrupt() == 0
    refused = newer.midstream("rollback")
    assert refused.returncode == 1
    assert f"job {waiting} was accepted by midstream 9.0.0" in refused.stderr
    assert "invented_later" in refused.stderr
    server = redis_server.start(newer.data / "redis", password=password_of(newer.data))
    try:
        stored = redis.Redis.from_url(server.url).hget(SERVICE, "schema")
    finally:
        server.stop()
    assert stored == str(SCHEMA + 1).encode(), "nothing was changed"


def password_of(data: Path) -> str:
    return (data / "secrets" / "redis.password").read_text().strip()
