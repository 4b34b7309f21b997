"""Jobs that wait for receipts, a relay to kill, and a look at what the ledger made of it all."""

import asyncio
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import forks
import ledger_kit
import redis
import zmq
from ports import free_port

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.receipts import frames
from midstream.broker.receipts.curve import ClientKeys
from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.jobs.jobs import JobView
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.settings.settings import Settings, load_settings, to_environment

T = TypeVar("T")
BOOT = "boot-1"
#: Time limit against hangs.
LONG_S = 60.0
READY = re.compile(r"^relay ready (tcp://127\.0\.0\.\S+)$", re.MULTILINE)


def receipt(job: str, request: int, *, rank: int = 0, world: int = 1, **changes: Any) -> Receipt:
    return ledger_kit.receipt(
        job,
        request,
        rank,
        **{"worker": "w", "boot": BOOT, "world": world, "step": request} | changes,
    )


class RelayProcess:
    """`python -m midstream.broker.relay` on one port, which may be killed and started again."""

    def __init__(self, redis_url: str, log: Path, url: str = "", **settings: Any):
        self.url = url or f"tcp://127.0.0.1:{free_port()}"
        self._environment = to_environment(
            load_settings({}, redis_url=redis_url, relay_url=self.url, **settings)
        )
        self.log = log
        self.process: forks.Fork | None = None
        self.start()

    def start(self) -> None:
        self.log.touch()
        mark = self.log.stat().st_size
        self.process = forks.start(
            "midstream.broker.relay", self._environment, self.log.parent, self.log
        )
        while (ready := READY.search(self.log.read_text()[mark:])) is None:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        self.endpoint = ready[1]

    def revive(self) -> None:
        """Start it again, if it was killed."""
        if self.process is None or self.process.poll() is not None:
            self.start()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


class SenderProcess:
    """A process that appends one receipt per `(job, request)` and says which are durable; to be
    killed.

    It begins with receipt number `first`. After `most` of them, if there are more, it waits for its
    end.
    """

    def __init__(
        self,
        directory: Path,
        relay_url: str,
        jobs: list[str],
        requests: int,
        first: int,
        most: int = 1_000_000,
    ):
        command = [
            sys.executable,
            __file__,
            str(directory),
            relay_url,
            json.dumps(jobs),
            str(requests),
            str(first),
            str(most),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def durable(self, enough: int, timeout: float = 60.0) -> int:
        """How many receipts it called durable: as soon as there are `enough`, or it has ended, or
        after `timeout` seconds.
        """
        count = 0
        until = time.monotonic() + timeout
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            while count < enough and (left := until - time.monotonic()) > 0:
                if ready.select(left):
                    told = os.read(self.process.stdout.fileno(), 65536)
                    if not told:
                        break
                    count += told.count(b".")
        return count

    def kill(self) -> int:
        """kill -9; returns how many more receipts it had called durable."""
        self.process.kill()
        self.process.wait()
        count = self.durable(sys.maxsize)
        self.process.stdout.close()
        return count


class Peer:
    """A bare DEALER that speaks for worker `w`, rank 0, or as who it is told to be."""

    def __init__(self, url: str, identity: bytes = b"w/0/test", keys: ClientKeys | None = None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(url)
        self.epoch = frames.new_epoch()

    def ask(self, kind: frames.FrameKind, seq: int, payload: bytes = b"") -> frames.Frame:
        self.socket.send(frames.pack(kind, self.epoch, seq, payload))
        return self.answer()

    def answer(self) -> frames.Frame:
        return frames.unpack(self.socket.recv())

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()


class Jobs:
    """Claimed jobs in a real ledger."""

    def __init__(self, redis_url: str):
        self.settings = Settings(redis_url=redis_url, model="m", lease_s=600)
        self.redis_url = redis_url

    def ledger(self, call: Callable[[Ledger], Awaitable[T]]) -> T:
        async def run() -> T:
            ledger = Ledger.connect(self.settings)
            try:
                return await call(ledger)
            finally:
                await ledger.close()

        return asyncio.run(run())

    def claim(self, count: int, requests: int, *, worker: str = "w", ranks: int = 1) -> list[str]:
        """`count` running jobs of `requests` prompts each, all of which wait for a receipt per
        prompt and rank.
        """

        async def make(ledger: Ledger) -> list[str]:
            made = []
            for _ in range(count):
                job = ledger_kit.make_job(requests, capture=True, model="m")
                await ledger.submit(job, {})
                assert (
                    await ledger.claim(job.id, worker, BOOT, ranks, ledger_kit.IDENTITY) is not None
                )
                made.append(job.id)
            return made

        return self.ledger(make)

    def view(self, job: str) -> JobView:
        return self.ledger(lambda ledger: ledger.view(job))

    def arrived(self, job: str) -> dict[tuple[int, int], int]:
        """`(request, rank)` → how many times a receipt of it was counted."""
        counts: dict[tuple[int, int], int] = {}
        with redis.Redis.from_url(self.redis_url) as client:
            for _, fields in client.xrange(f"ms:events:{job}"):
                event = json.loads(fields[b"e"])
                if event["event"] == "receipt":
                    key = (event["data"]["request"], event["data"]["rank"])
                    counts[key] = counts.get(key, 0) + 1
            tickets = {
                tuple(map(int, field.decode().split("/")))
                for field in client.hkeys(f"ms:ticket:{job}")
            }
        assert tickets == set(counts)
        return counts

    def mark(self, epoch: str, worker: str = "w", rank: int = 0) -> int:
        with redis.Redis.from_url(self.redis_url) as client:
            return int(client.get(f"ms:mark:{worker}:{rank}:{epoch}") or 0)


def fill(outbox: Outbox, jobs: list[str], requests: Iterable[int]) -> None:
    for request in requests:
        for job in jobs:
            outbox.append(receipt(job, request))


def deliver(outbox: Outbox, jobs: list[str], requests: Iterable[int], why: str = "") -> None:
    """Append a receipt for each request and job, and wait until the relay has acknowledged all."""
    fill(outbox, jobs, requests)
    assert outbox.flush(LONG_S), why


def once_each(requests: int, ranks: int = 1) -> dict[tuple[int, int], int]:
    """What `arrived` gives when nothing was lost and nothing counted twice."""
    return {(request, rank): 1 for request in range(requests) for rank in range(ranks)}


def main() -> None:
    """The program of `SenderProcess`."""
    directory, relay_url, jobs, requests, first, most = sys.argv[1:]
    total = len(json.loads(jobs)) * int(requests)
    end = min(total, int(first) + int(most))
    with Outbox(Path(directory), "w", 0, relay_url) as outbox:
        commit = outbox.store.commit

        def told(rows: list[tuple[str, bytes]], *more: int) -> int:
            last = commit(rows, *more)
            os.write(1, b"." * len(rows))
            return last

        outbox.store.commit = told  # type: ignore[method-assign]
        for number in range(int(first), end):
            job, request = divmod(number, int(requests))
            outbox.append(receipt(json.loads(jobs)[job], request))
            if number % 20 == 0:
                time.sleep(0.01)  # so that a kill falls into the work and not behind it
        if end < total:
            time.sleep(600)
        outbox.flush(60)


if __name__ == "__main__":
    main()
