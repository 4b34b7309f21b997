"""Is every webhook sent, and in quiet times once, by several senders of which one may be killed at
any moment? And does the callbacks process sweep, survive a restart of Redis, and end when told?
Real processes.

Their clock is moved on through a file that they read, so that nobody waits for leases and ladders.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hook_kit import Got, Receiver
from ledger_kit import MODEL, claimed, make_job, open_ledger, outputs, queued_job
from mortal_redis import mortal
from wait_kit import wait_until

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.broker.webhooks.outbox import WebhookOutbox
from midstream.broker.webhooks.secrets import WebhookSecrets
from midstream.schemas.access.handling import Callback
from midstream.schemas.access.webhooks import WebhookDelivery
from midstream.schemas.settings.settings import Settings, to_environment
from midstream.schemas.settings.tuning import Tuning


class Senders:
    """`callbacks` processes over one Redis."""

    def __init__(self, directory: Path, redis_url: str):
        self.clock = directory / "ahead"
        self.log = directory / "log"
        settings = Settings(
            redis_url=redis_url,
            data_dir=str(directory),
            webhook_allow_private=True,
            fault=f"webhooks:clock={self.clock}",
            tuning=Tuning(webhook_timeout_s=20.0),
        )
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")
        } | to_environment(settings)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, count: int = 1) -> None:
        """More of them; waits until they are ready."""
        with self.log.open("a") as log:
            fresh = [
                subprocess.Popen(
                    [sys.executable, "-m", "midstream.broker.callbacks"],
                    env=self._environment,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
                for _ in range(count)
            ]
        self.processes += fresh
        for process in fresh:
            assert process.stdout is not None
            assert process.stdout.readline() == "callbacks ready\n"

    def kill_all(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def forward(self, seconds: float) -> None:
        fresh = self.clock.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.rename(self.clock)


@pytest.fixture
def senders(tmp_path: Path, redis_url: str) -> Iterator[Senders]:
    made = Senders(tmp_path, redis_url)
    try:
        yield made
    finally:
        made.kill_all()
        print(made.log.read_text())


async def finish_jobs(ledger: Ledger, url: str, count: int) -> set[str]:
    """The ids of so many jobs that have succeeded just now."""
    jobs = [make_job(callback=Callback(url=url, events=["job.succeeded"])) for _ in range(count)]
    for job in jobs:
        await ledger.store_outputs(job.id, await claimed(ledger, job), outputs())
    return {job.id for job in jobs}


async def settled(ledger: Ledger) -> list[WebhookDelivery]:
    """All deliveries once none is pending."""
    outbox = WebhookOutbox(ledger)
    async with asyncio.timeout(60):
        while True:
            if (await outbox.depth())[0] == 0:
                return (await outbox.deliveries(None, limit=1000)).deliveries
            await asyncio.sleep(0.05)


# field case 41
@pytest.mark.slow("three processes start, and one ends on a kill")
async def test_a_sender_killed_after_a_send_causes_a_repeat_and_loses_no_webhook(
    senders: Senders, receiver: Receiver, ledger: Ledger
) -> None:
    senders.start(2)

    # Quiet: each is sent once, by one of the two.
    jobs = await finish_jobs(ledger, receiver.url("/quiet"), 30)
    quiet = await settled(ledger)
    assert {got.body.data.id for got in receiver.at("/quiet")} == jobs
    assert len(receiver.at("/quiet")) == len({got.id for got in receiver.got}) == 30
    assert {len(delivery.attempts) for delivery in quiet} == {1}

    # Killed when the receiver has it, and before anybody could note that.
    def kill(got: Got) -> None:
        receiver.on_call = lambda got: None
        for process in senders.processes:
            process.kill()

    receiver.on_call = kill
    [job] = await finish_jobs(ledger, receiver.url("/killed"), 1)
    receiver.wait(1, "/killed")
    senders.kill_all()
    senders.start()
    await asyncio.sleep(0.5)  # a few rounds, in which the loan has not ended
    assert len(receiver.at("/killed")) == 1
    senders.forward(60)
    first, second = receiver.wait(2, "/killed")
    assert first.id == second.id
    assert first.raw == second.raw
    assert second.body.data.id == job
    assert int(second.headers["webhook-timestamp"]) >= int(first.headers["webhook-timestamp"]) + 60
    assert {delivery.job: delivery.state for delivery in await settled(ledger)}[job] == "delivered"

    # Told to stop, it ends by itself.
    [process] = senders.processes
    process.terminate()
    assert process.wait(60) == 0
    first.verify((await WebhookSecrets(ledger).of("default", "")).secrets[0].secret)


def test_the_reaper_resends_lost_messages_across_redis_restarts(tmp_path: Path) -> None:
    # field case 37
    async def lose_a_message() -> None:
        async with open_ledger(server.url) as ledger:
            job = await queued_job(ledger)
            await ledger.redis.delete(*lists_of(queue_of(MODEL)))
            await ledger.redis.zadd("ms:live", {job.id: 0})  # long queued

    with mortal(tmp_path / "redis") as server:
        settings = Settings(redis_url=server.url, tuning=Tuning(sweep_interval_s=0.2))
        process = subprocess.Popen(
            [sys.executable, "-m", "midstream.broker.callbacks"],
            env={**os.environ, **to_environment(settings)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "callbacks ready\n"
            server.kill()
            time.sleep(1)
            server.start()
            asyncio.run(lose_a_message())
            with redis.Redis.from_url(server.url) as client:
                wait_until(lambda: client.exists(*lists_of(queue_of(MODEL))) == 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def test_a_missing_setting_is_named_at_start() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    ended = subprocess.run(
        [sys.executable, "-m", "midstream.broker.callbacks"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "MIDSTREAM_REDIS_URL" in ended.stderr
