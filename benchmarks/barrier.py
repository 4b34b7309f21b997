"""Which durability barrier acknowledges how many submissions per second?

On the redis-server or valkey-server that `midstream up` would start; another one: put it first in
PATH.

    python benchmarks/barrier.py [--rounds 2]

Submissions of one plain job, each acknowledged, in turns with each barrier on the same server: one
at a time, and 64 at once. Decision 14 has the results.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ops import redis_server
from midstream.schemas.base.records import now
from midstream.schemas.base.settings import Settings
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt

AT_ONCE, SECONDS = 64, 3.0


class WaitAof:
    """A barrier that waits for the fsync of a write that follows all others.

    WAITAOF covers its own connection's writes, hence the SET. Concurrent callers share one wait, as
    with the product's barrier.
    """

    def __init__(self, url: str) -> None:
        self._client = redis.asyncio.Redis.from_url(url)
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        if self._next is None:
            self._next = asyncio.create_task(self._wait())
        await asyncio.shield(self._next)

    async def _wait(self) -> None:
        async with self._asking:
            self._next = None
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.set("ms:probe", 1, ex=60).execute_command("WAITAOF", 1, 0, 5000)
                assert (await pipe.execute())[1][0] == 1, "no fsync in five seconds"

    async def close(self) -> None:
        await self._client.aclose()


async def no_barrier() -> None:
    pass


#: Name → (appendfsync, hz of the server, kind of barrier).
BARRIERS = {
    "everysec, none": ("everysec", 10, "none"),
    "everysec, INFO": ("everysec", 10, "info"),
    "always, INFO": ("always", 10, "info"),
    "everysec, WAITAOF": ("everysec", 10, "waitaof"),
    "everysec, WAITAOF, hz 500": ("everysec", 500, "waitaof"),
    "always, WAITAOF": ("always", 10, "waitaof"),
}


def job() -> Job:
    prompt = StoredPrompt(token_ids=list(range(20)), text="twenty tokens")
    return Job(
        id=new_job_id(),
        kind="generate",
        model="m",
        prompts=[prompt],
        sampling=Sampling(max_tokens=1),
        created=now(),
    )


async def round_of(url: str, kind: str) -> tuple[float, float]:
    """Submissions per second: one at a time, and `AT_ONCE` together."""
    ledger: Any = Ledger.connect(Settings(redis_url=url, queue_limit=0))
    barrier = WaitAof(url)
    if kind != "info":
        ledger._written = barrier if kind == "waitaof" else no_barrier
    rates = []
    for callers in (1, AT_ONCE):
        done = 0
        until = time.perf_counter() + SECONDS

        async def submit(until: float = until) -> None:
            nonlocal done
            while time.perf_counter() < until:
                await ledger.submit(job(), {})
                done += 1

        began = time.perf_counter()
        await asyncio.gather(*[submit() for _ in range(callers)])
        rates.append(done / (time.perf_counter() - began))
    await barrier.close()
    await ledger.close()
    return rates[0], rates[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = redis_server.start(Path(scratch) / "redis")
        try:
            with redis.Redis.from_url(server.url) as client:
                info = client.info("server")
                # Valkey names the Redis that it is compatible with, 7.2
                has_wait = tuple(map(int, info["redis_version"].split(".")[:2])) >= (7, 2)
                rates: dict[str, list[tuple[float, float]]] = {
                    name: [] for name, row in BARRIERS.items() if has_wait or row[2] != "waitaof"
                }
                for _ in range(options.rounds):
                    for name, found in rates.items():
                        appendfsync, hz, kind = BARRIERS[name]
                        client.flushall()
                        client.config_set("appendfsync", appendfsync)
                        client.config_set("hz", hz)
                        found.append(asyncio.run(round_of(server.url, kind)))
        finally:
            server.stop()
    version = f"Valkey {info['valkey_version']}" if "valkey_version" in info else ""
    print(version or f"Redis {info['redis_version']}")
    print(f"{'':<28} {'alone /s':>9} {'ms':>7} {f'{AT_ONCE} at once /s':>15}")
    for name, found in rates.items():
        alone, together = (statistics.median(values) for values in zip(*found, strict=True))
        print(f"{name:<28} {alone:>9.0f} {1e3 / alone:>7.2f} {together:>15.0f}")
    print(json.dumps({"benchmark": "barrier", "server": info["redis_version"], "rates": rates}))


if __name__ == "__main__":
    main()
