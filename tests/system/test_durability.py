"""Is a Redis that may lose accepted jobs refused by every process that relies on it?"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from ledger_kit import make_job, open_ledger
from ports import free_port
from receipt_rig import Jobs, RelayProcess, once_each, receipt
from refusal_kit import refuses
from stack import MODULES, Stack

from midstream.broker.ledger.core import memory_pressure
from midstream.broker.receipts.outbox import Outbox
from midstream.broker.redis_service import durability as redis_durability, server as redis_server
from midstream.schemas.settings.settings import Settings, SettingsError, to_environment

#: Commands in a log that is loaded slowly.
LOADED_COMMANDS = 60_000


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis without AOF that evicts keys, and whose users may not ask for its configuration, as
    in a managed service.
    """
    server = redis_server.start(tmp_path_factory.mktemp("lossy"))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.execute_command("ACL", "SETUSER", "default", "-config")
    yield server.url
    server.kill()


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[] if part in ("relay", "worker") else pytest.mark.long)
        for part in MODULES
    ],
)
def test_a_redis_that_may_forget_jobs_is_refused(part: str, lossy: str, tmp_path: Path) -> None:
    settings = Settings(
        data_dir=str(tmp_path),
        redis_url=lossy,
        relay_url=f"tcp://127.0.0.1:{free_port()}",
        api_port=free_port(),
        engine="fake",
        model="m",
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")
    } | to_environment(settings)
    done = subprocess.run(
        [sys.executable, "-m", MODULES[part]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "append-only" in done.stderr
    assert "allkeys-lru" in done.stderr
    assert "MIDSTREAM_REDIS_ALLOW_LOSSY=true" in done.stderr


def test_redis_allow_lossy_accepts_a_lossy_redis(
    lossy: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis_durability.require(Settings(redis_url=lossy, redis_allow_lossy=True))
    assert "may lose accepted jobs" in caplog.text


def test_an_unreachable_redis_is_checked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_durability, "ASK_AGAIN_S", 0.05)
    port, ended = free_port(), threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    redis_durability.require(Settings(redis_url=f"redis://127.0.0.1:{port}/0"), end)
    assert not ended.wait(0.3)
    command = [
        redis_server.executable(),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(tmp_path),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        assert ended.wait(60)
        assert codes == [redis_durability.EXIT_BAD_SETTINGS]
    finally:
        server.kill()
        server.wait()


def test_a_durable_redis_is_accepted(redis_url: str) -> None:
    redis_durability.require(Settings(redis_url=redis_url))


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("appendonly", "no", "yes"), ("maxmemory-policy", "allkeys-lru", "noeviction")],
    ids=["log", "eviction"],
)
async def test_a_redis_that_is_made_lossy_accepts_no_job_until_it_is_durable_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str, right: str
) -> None:
    monkeypatch.setattr(memory_pressure, "SAMPLE_S", 0.0)

    async with open_ledger(redis_url) as ledger:
        await ledger.submit(make_job(), {})
        await ledger.redis.config_set(name, wrong)
        try:
            told = ("may lose accepted jobs", f"CONFIG SET {name} {right}")
            with refuses(*told, kind="unavailable"):
                await ledger.submit(make_job(), {})
            async with open_ledger(redis_url, redis_allow_lossy=True) as other:
                await other.submit(make_job(), {})
        finally:
            await ledger.redis.config_set(name, right)
        await ledger.submit(make_job(), {})


def test_receipts_are_not_acknowledged_while_redis_has_no_log(
    redis_url: str, tmp_path: Path
) -> None:
    jobs = Jobs(redis_url)
    relay = RelayProcess(redis_url, tmp_path / "relay.log")
    (job,) = jobs.claim(1, 1)
    with redis.Redis.from_url(redis_url) as client, Outbox(tmp_path, "w", 0, relay.url) as outbox:
        try:
            client.config_set("appendonly", "no")
            outbox.append(receipt(job, 0))
            assert not outbox.flush(1.0)
            client.config_set("appendonly", "yes")
            assert outbox.flush(60.0)
        finally:
            client.config_set("appendonly", "yes")
            relay.kill()
    assert "no append-only file" in (tmp_path / "relay.log").read_text()
    assert jobs.arrived(job) == once_each(1)


def test_a_load_without_progress_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    load = redis_durability.LogLoading()
    assert load.watch({"loading": 1, "loading_loaded_bytes": 5})
    monkeypatch.setattr(redis_durability, "STALLED_S", -1.0)
    assert load.watch({"loading": 1, "loading_loaded_bytes": 6}), "it has made progress"
    with pytest.raises(SettingsError, match="no progress"):
        load.watch({"loading": 1, "loading_loaded_bytes": 6})
    assert not load.watch({"loading": 0})
    assert redis_durability.dangers({"aof_enabled": 0, "loading": 1}) == [], (
        "the log counts as off while it is loaded"
    )


def fill_log(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, client.pipeline(transaction=False) as pipe:
        for number in range(LOADED_COMMANDS):
            pipe.set("ms:test-load", number)
        pipe.execute()


@pytest.mark.slow("its log of 60,000 commands is written, and loaded for two seconds")
def test_a_redis_that_loads_its_log_is_checked_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_durability, "ASK_AGAIN_S", 0.05)
    codes: list[int] = []
    stack = Stack(tmp_path)
    try:
        stack.restart("redis")
        fill_log(stack.settings.redis_url)
        stack.kill("redis")
        loading = threading.Thread(target=stack.load_redis, args=(2.0,))
        loading.start()
        stack.await_loading()
        redis_durability.require(stack.settings, codes.append)
        checking = [thread for thread in threading.enumerate() if thread.name == "redis durability"]
        loading.join()
        for thread in checking:
            thread.join(60)
        assert not any(thread.is_alive() for thread in checking)
    finally:
        stack.stop()
    assert "waiting for Redis, which loads its log" in caplog.text
    assert codes == []
