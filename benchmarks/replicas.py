"""What does it cost that a replica must have a write before it is acknowledged?

One Redis with a replica, both on this machine.

    python benchmarks/replicas.py [--rounds 4]

Submissions of one plain job, each acknowledged, in turns with and without `redis_replicas`: one at
a time, and 64 at once. A network adds its round trip to each wait.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import redis

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ops import redis_server
from midstream.schemas.base.records import now
from midstream.schemas.base.settings import Settings
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt

ALONE, AT_ONCE, EACH = 500, 64, 40


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


async def round_of(settings: Settings) -> tuple[float, float]:
    """Submissions per second: one at a time, and `AT_ONCE` together."""
    ledger = Ledger.connect(settings)

    async def submit(count: int) -> None:
        for _ in range(count):
            await ledger.submit(job(), {})

    await submit(50)
    began = time.perf_counter()
    await submit(ALONE)
    alone = ALONE / (time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.gather(*[submit(EACH) for _ in range(AT_ONCE)])
    together = AT_ONCE * EACH / (time.perf_counter() - began)
    await ledger.close()
    return alone, together


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        master, replica = (
            redis_server.start(Path(scratch) / name) for name in ("master", "replica")
        )
        try:
            with redis.Redis.from_url(replica.url) as client:
                client.replicaof("127.0.0.1", str(master.port))
            with redis.Redis.from_url(master.url) as client:
                while client.info("replication")["connected_slaves"] != 1 or not client.wait(
                    1, 1000
                ):
                    time.sleep(0.1)
            rates: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
            for _ in range(options.rounds):
                for replicas, found in rates.items():
                    found.append(
                        asyncio.run(
                            round_of(
                                Settings(
                                    redis_url=master.url, redis_replicas=replicas, queue_limit=0
                                )
                            )
                        )
                    )
        finally:
            replica.stop()
            master.stop()
    print(f"{'replicas':>8} {'alone /s':>9} {'ms':>6} {f'{AT_ONCE} at once /s':>15}")
    for replicas, found in rates.items():
        alone, together = (statistics.median(values) for values in zip(*found, strict=True))
        print(f"{replicas:>8} {alone:>9.0f} {1e3 / alone:>6.2f} {together:>15.0f}")
    ratios = [
        statistics.median(
            waited[place] / plain[place] for plain, waited in zip(rates[0], rates[1], strict=True)
        )
        for place in (0, 1)
    ]
    print(f"ratio of rates, median of pairs: {ratios[0]:.2f} alone, {ratios[1]:.2f} at once")
    print(json.dumps({"benchmark": "replicas", "rates": rates, "ratios": ratios}))


if __name__ == "__main__":
    main()
