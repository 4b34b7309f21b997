"""Is a Redis that may lose accepted jobs refused by every process that relies on it? Is what it has
not written yet, because its disk is busy, kept from being told as safe, and what it has written
told? And what does the service do while Redis refuses writes, and after it has lost its data?
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
import redis
from ledger_kit import make_job, open_ledger
from mortal_redis import Mortal, mortal
from ports import free_port
from receipt_rig import Jobs, RelayProcess, deliver, once_each, receipt
from redis_kit import hold_back, slow_disk
from refusal_kit import refuses
from stack import MODULES, Stack, stack_with, unsuccessful
from wait_kit import wait_until, warn_if_late

from midstream.broker.ledger.core import aof_barrier, memory_pressure
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.receipts.outbox import Outbox
from midstream.broker.receipts.relay import Relay, connect_redis
from midstream.broker.redis_service import durability as redis_durability
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.settings.settings import Settings, SettingsError, to_environment
from midstream_ops import redis_server

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
    port = free_port()
    ended = threading.Event()
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


#: Seconds that Redis takes to load its log; a busy machine may miss the shorter ones.
LOADS_S = (2.0, 10.0, 50.0)


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
        for seconds in LOADS_S:
            stack.kill("redis")
            loading = threading.Thread(target=stack.load_redis, args=(seconds,))
            loading.start()
            stack.await_loading(loading.is_alive)
            redis_durability.require(stack.settings, codes.append)
            checking = [
                thread for thread in threading.enumerate() if thread.name == "redis durability"
            ]
            loading.join()
            for thread in checking:
                thread.join(60)
            assert not any(thread.is_alive() for thread in checking)
            if "waiting for Redis, which loads its log" in caplog.text:
                break
    finally:
        stack.stop()
    assert "waiting for Redis, which loads its log" in caplog.text
    assert codes == []


@contextmanager
def serving(relay: Relay) -> Iterator[Relay]:
    thread = threading.Thread(target=relay.serve)
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join()


@contextmanager
def slow_redis(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mortal]:
    """Every sync of its log takes a second, until it is started again."""
    monkeypatch.setenv("LD_PRELOAD", slow_disk(directory))
    with mortal(directory / "redis") as server:
        monkeypatch.delenv("LD_PRELOAD")
        yield server


class SlowDisk(NamedTuple):
    """A relay whose Redis is on a slow disk."""

    server: Mortal
    jobs: Jobs
    relay: RelayProcess


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    with slow_redis(tmp_path, monkeypatch) as server:
        relay = RelayProcess(server.url, tmp_path / "relay.log")
        yield SlowDisk(server, Jobs(server.url), relay)
        relay.kill()


@pytest.mark.slow("its disk takes a second for each sync, and Redis starts again")
def test_unsynced_receipts_are_not_acknowledged(slow: SlowDisk, tmp_path: Path) -> None:
    (job,) = slow.jobs.claim(1, 2)
    with Outbox(tmp_path, "w", 0, slow.relay.url) as outbox:
        deliver(outbox, [job], [0])
        hold_back(slow.server.url)
        deliver(outbox, [job], [1])
        slow.server.kill()
        slow.server.start()
    assert slow.jobs.arrived(job) == once_each(2)


@pytest.mark.long
def test_receipts_are_acknowledged_while_others_keep_a_busy_disk_busy(
    slow: SlowDisk, tmp_path: Path
) -> None:
    """One sync follows the other, and there is always something that Redis holds back."""
    enough = threading.Event()

    def write() -> None:
        with redis.Redis.from_url(slow.server.url) as client:
            while not enough.wait(0.0005):
                client.set("something", "to write" * 10)

    (job,) = slow.jobs.claim(1, 4)
    with ThreadPoolExecutor(1) as pool, Outbox(tmp_path, "w", 0, slow.relay.url) as outbox:
        pool.submit(write)
        try:
            hold_back(slow.server.url)
            began = time.monotonic()
            for request in range(4):
                deliver(outbox, [job], [request])
            warn_if_late(
                time.monotonic() - began,
                30,
                "a sync takes a second, and each waits for two at most",
            )
        finally:
            enough.set()


@pytest.mark.slow("its disk takes a second for each sync, and Redis starts again")
def test_receipts_lost_by_a_restarted_redis_are_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Forgetful(Settler):
        """Its Redis dies and is back just after it has committed what it held back."""

        def settle(
            self, worker: str, rank: int, epoch: str, receipts: Iterable[tuple[int, Receipt]]
        ) -> int:
            mark = super().settle(worker, rank, epoch, receipts)
            if not deaths and mark == 2:
                server.kill()
                server.start()
                deaths.append(mark)
            return mark

    deaths: list[int] = []
    with slow_redis(tmp_path, monkeypatch) as server:
        client = connect_redis(server.url)
        jobs = Jobs(server.url)
        with serving(Relay(Forgetful(client, jobs.settings), jobs.settings, client)) as relay:
            (job,) = jobs.claim(1, 2)
            with Outbox(tmp_path, "w", 0, relay.endpoint) as outbox:
                deliver(outbox, [job], [0])
                hold_back(server.url)
                deliver(outbox, [job], [1])
                assert deaths
                assert jobs.mark(outbox.store.epoch) == 2, (
                    "it came again: what was committed first was forgotten"
                )
            assert jobs.arrived(job) == once_each(2)


def test_a_relay_settles_again_when_redis_forgot_a_script_after_its_load(
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs = Jobs(redis_url)
    client = connect_redis(redis_url)
    client.script_flush()
    load = client.script_load
    forgotten = list[str]()

    def forget(text: str) -> str:
        sha = load(text)
        if not forgotten:  # as a restart does
            client.script_flush()
            forgotten.append(sha)
        return sha

    monkeypatch.setattr(client, "script_load", forget)
    with serving(Relay(Settler(client, jobs.settings), jobs.settings, client)) as relay:
        (job,) = jobs.claim(1, 1)
        with Outbox(tmp_path, "w", 0, relay.endpoint) as outbox:
            deliver(outbox, [job], [0])
        assert jobs.arrived(job) == once_each(1)
    assert forgotten
    assert "Redis rejects receipts" not in caplog.text


async def test_writes_to_a_dead_redis_are_not_confirmed_by_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mortal(tmp_path / "redis") as server:
        async with open_ledger(server.url) as ledger:
            await ledger.written()
            server.kill()
            waiting = [asyncio.create_task(ledger.written())]
            await asyncio.sleep(0.05)  # that question is on its way: who comes now asks another
            waiting.append(asyncio.create_task(ledger.written()))
            await asyncio.sleep(2 * aof_barrier.BACK_S)
            server.start()
            for asked in waiting:
                with refuses(match="restarted", kind="unavailable"):
                    await asked
            server.kill()
            server.start()
            # nobody waited meanwhile; on a busy machine this question may take long
            monkeypatch.setattr(aof_barrier, "BACK_S", 60.0)
            await ledger.written()


WAIT_S = 90.0
NOTICED = "Redis rejects writes"


stack = stack_with(api=True)


def ask(stack: Stack, **more: object) -> httpx2.Response:
    body = {
        "model": stack.settings.served_model,
        "prompts": ["hello"],
        "sampling": {"max_tokens": 2},
        **more,
    }
    return httpx2.post(f"{stack.url}/v1/jobs", json=body, timeout=60)


def ready(stack: Stack) -> bool:
    return httpx2.get(f"{stack.url}/readyz", timeout=30).status_code == 200


def runs_a_job(stack: Stack) -> None:
    answer = ask(stack)
    assert answer.status_code == 202, answer.text
    assert stack.wait(answer.json()["id"], WAIT_S).state is State.SUCCEEDED


@pytest.fixture
def unharmed(stack: Stack) -> Iterator[None]:
    """After the test, jobs run in the same processes."""
    processes = dict(stack.processes)
    yield
    runs_a_job(stack)
    assert stack.processes == processes
    assert all(process.poll() is None for process in processes.values())


def keep_under_way(stack: Stack) -> str:
    """A job whose message waits while the worker is stopped, so that the worker gets Redis' next
    answer.
    """
    stack.kill("worker", signal.SIGSTOP)
    try:
        return stack.submit(["hello"])
    except BaseException:
        stack.kill("worker", signal.SIGCONT)
        raise


def test_processes_wait_for_a_redis_out_of_memory(stack: Stack, unharmed: None) -> None:
    """It still gives messages out, and the worker keeps those that it took."""
    job = keep_under_way(stack)
    with redis.Redis.from_url(stack.settings.redis_url) as client:
        try:
            client.config_set("maxmemory", 1)
            stack.kill("worker", signal.SIGCONT)
            wait_until(lambda: f"claim of {job} waiting for Redis" in stack.log("worker"), WAIT_S)
            answer = ask(stack)
        finally:
            client.config_set("maxmemory", 0)
    assert answer.status_code == 503, answer.text
    wait_until(lambda: ready(stack), WAIT_S)
    assert stack.wait(job, WAIT_S).state is State.SUCCEEDED
    # the API looks at the memory once a second
    wait_until(lambda: ask(stack).status_code == 202, WAIT_S)


@pytest.mark.slow("a stack starts, and jobs run while Redis forgets scripts")
def test_scripts_that_redis_forgets_between_load_and_call_cost_no_job(
    stack: Stack, unharmed: None
) -> None:
    """A restart between the two has the same effect."""
    jobs: list[str] = []
    enough = threading.Event()

    def forget() -> None:
        with redis.Redis.from_url(stack.settings.redis_url) as client:
            while not enough.is_set():
                client.script_flush()

    def noticed() -> bool:
        with contextlib.suppress(MidstreamError):  # not accepted, and said so
            jobs.append(stack.submit(["hello"]))
        return "Redis was restarted during the call" in stack.log("worker")

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        wait_until(noticed, WAIT_S)
    finally:
        enough.set()
        forgetting.join()
    assert unsuccessful(stack.wait(job, WAIT_S) for job in jobs) == {}


@pytest.mark.long
def test_processes_wait_for_a_read_only_redis(stack: Stack, unharmed: None) -> None:
    """As a managed Redis is for a moment when another takes over: they log it once, no process
    ends, and the API answers 503; afterwards the waiting job and new ones run.

    (It keeps its data: there is none to copy from.)
    """
    who = ("worker", "callbacks")
    said = {name: stack.log(name).count(NOTICED) for name in who}
    job = keep_under_way(stack)
    with redis.Redis.from_url(stack.settings.redis_url) as client:
        try:
            client.slaveof("127.0.0.1", free_port())
            stack.kill("worker", signal.SIGCONT)
            for name in who:
                wait_until(lambda name=name: stack.log(name).count(NOTICED) > said[name], WAIT_S)
            answer = ask(stack)
            time.sleep(2.0)  # time for a process to end
        finally:
            client.slaveof()
    assert answer.status_code == 503, answer.text
    assert "retry-after" in answer.headers
    assert {name: stack.log(name).count(NOTICED) - said[name] for name in who} == dict.fromkeys(
        who, 1
    )
    wait_until(lambda: ready(stack), WAIT_S)
    assert stack.wait(job, WAIT_S).state is State.SUCCEEDED


@pytest.mark.parametrize("how", ["FLUSHALL", "AOF removed"])
def test_a_worker_registers_again_after_redis_lost_its_data(stack: Stack, how: str) -> None:
    if how == "FLUSHALL":
        with redis.Redis.from_url(stack.settings.redis_url) as client:
            client.flushall()
    else:
        stack.kill("redis")
        for path in (stack.directory / "redis").rglob("*.aof*"):  # with the manifest of Redis 7
            path.unlink()
        stack.restart("redis")
    wait_until(lambda: ready(stack), WAIT_S)
    runs_a_job(stack)
    answer = ask(stack, capture={"layers": "all", "positions": "all_prompt"})
    assert answer.status_code == 202, answer.text
    done = stack.wait(answer.json()["id"], WAIT_S)
    assert done.state is State.SUCCEEDED
    assert stack.result(done.id).capture_results.status == "ok"
