"""Clients that submit, wait and repeat, while something happens to the service; then what became of
every job.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable

from clients import Clients, Observed, plans
from judge import Verdict, judge_jobs

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.schemas.settings.settings import Settings

#: Seconds that a client rests between two jobs: all share two cores.
PAUSE_S = 0.2
#: After the last step the load goes on for so long; then everything under way ends within
#: `SETTLE_S`.
AFTER_S = 5.0
SETTLE_S = 60.0

Step = tuple[str, Callable[[], object]]


async def load(
    url: str, steps: list[Step], seed: int, max_wait_s: float, at_once: int
) -> list[Observed]:
    """Return what `at_once` clients of the API at `url` saw, while `steps` happen one after the
    other.
    """
    rng = random.Random(seed)
    run = f"load-{os.urandom(4).hex()}"
    clients = Clients({"api": url}, run, rng, max_wait_s, lambda *_: True)
    todo = iter(plans(rng, 100_000))
    observed = list[Observed]()
    over = asyncio.Event()

    async def one() -> None:
        while not over.is_set():
            observed.append(await clients.follow(next(todo)))
            await asyncio.sleep(PAUSE_S)

    async def happen() -> None:
        try:
            for name, act in steps:
                print(f"{time.strftime('%H:%M:%S')} {name} ({len(observed)} jobs are over)")
                await asyncio.to_thread(act)
            await asyncio.sleep(AFTER_S)
        finally:
            over.set()

    try:
        await asyncio.gather(happen(), *[one() for _ in range(at_once)])
    finally:
        await clients.close()
    return observed


async def judged(settings: Settings, observed: list[Observed]) -> Verdict:
    """Return the verdict on every job once none is under way. `settings`: those of a user who may
    read everything in Redis.
    """
    ledger = Ledger.connect(settings)
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline and await ledger.redis.zcard("ms:live"):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await ledger.close()
    verdict = Verdict()
    await judge_jobs(settings, observed, verdict)
    print(f"{len(observed)} jobs: {dict(verdict.seen)}")
    return verdict
