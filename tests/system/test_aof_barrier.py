"""Is what Redis has not written yet, because its disk is busy, kept from being told as safe?

And is what it has written told?
"""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from ledger_kit import open_ledger
from mortal_redis import Mortal, mortal
from receipt_rig import Jobs, RelayProcess, deliver, once_each
from redis_kit import hold_back, slow_disk
from refusal_kit import refuses

from midstream.broker.ledger.core import aof_barrier
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.receipts.outbox import Outbox
from midstream.broker.receipts.relay import Relay, connect_redis
from midstream.schemas.jobs.receipts import Receipt


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
            assert time.monotonic() - began < 30, (
                "a sync takes a second, and each waits for two of them at most"
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
        client, jobs = connect_redis(server.url), Jobs(server.url)
        with serving(Relay(Forgetful(client, jobs.settings), "", client)) as relay:
            (job,) = jobs.claim(1, 2)
            with Outbox(tmp_path, "w", 0, relay.endpoint) as outbox:
                deliver(outbox, [job], [0])
                hold_back(server.url)
                deliver(outbox, [job], [1])
                assert deaths
                assert jobs.mark(outbox.epoch) == 2, (
                    "it came again: what was committed first was forgotten"
                )
            assert jobs.arrived(job) == once_each(2)


def test_a_relay_settles_again_when_redis_forgot_a_script_after_its_load(
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    jobs, client = Jobs(redis_url), connect_redis(redis_url)
    client.script_flush()
    load, forgotten = client.script_load, list[str]()

    def forget(text: str) -> str:
        sha = load(text)
        if not forgotten:  # as a restart does
            client.script_flush()
            forgotten.append(sha)
        return sha

    monkeypatch.setattr(client, "script_load", forget)
    with serving(Relay(Settler(client, jobs.settings), "", client)) as relay:
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
