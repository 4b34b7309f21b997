"""Is every webhook sent, and in quiet times once, by several senders of which one may be killed at
any moment? Real processes.

Their clock is moved on through a file that they read, so that nobody waits for leases and ladders.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hook_kit import Got, Receiver
from ledger_kit import claimed, make_job, outputs

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.schemas.access.handling import Callback
from midstream.schemas.access.webhooks import WebhookDelivery
from midstream.schemas.settings.settings import Settings, to_environment
from midstream.schemas.settings.tuning import Tuning
from midstream_webhooks.outbox import WebhookOutbox
from midstream_webhooks.secrets import WebhookSecrets


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
