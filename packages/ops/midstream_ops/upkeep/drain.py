"""`midstream drain`: takes no new jobs, and waits until what was accepted has ended."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from midstream.broker.ledger.core import closing
from midstream.broker.ledger.core.connection import of_each
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.people.audit import LedgerAudit
from midstream.client.cli.terminal import say
from midstream.client.render.jobs import count, moment
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now

from .installation import installation, opened

#: Seconds between two looks at what has not ended.
LOOK_S = 1.0


class Unfinished(NamedTuple):
    """What has not ended."""

    jobs: Counter[tuple[str, str]]  # model and state → jobs
    harvests: int
    served: set[str]  # models with a live worker

    def lines(self) -> list[str]:
        """Return what is said of it."""
        lines = [
            f"{model}: {number} {state}{self._waits(model)}"
            for (model, state), number in sorted(self.jobs.items())
        ]
        if self.harvests:
            lines.append(
                f"{count(self.harvests, 'harvest')} under way: the parts that were begun end, and "
                "the others wait until the service is open"
            )
        return lines or ["nothing is unfinished"]

    def _waits(self, model: str) -> str:
        return "" if model in self.served else ", for a worker: none serves this model"


async def unfinished(ledger: Ledger) -> Unfinished:
    """Return what has not ended, of all models and tenants."""
    ids = [name.decode() for name in await ledger.redis.zrange("ms:live", 0, -1)]
    found = await of_each(
        ledger.redis, ids, lambda pipe, id: pipe.hmget(f"ms:job:{id}", "model", "state")
    )
    known = [(model.decode(), state.decode()) for model, state in found if model and state]
    harvests = int(await ledger.redis.scard("ms:harvests-live"))
    served = {worker.model for worker in await ledger.workers(queue=None)}
    return Unfinished(Counter(known), harvests, served)


def run(data_dir: Path | None, *, opens: bool, timeout: float, dry_run: bool) -> None:
    """Close the service and wait, or with `opens` open it again."""
    settings = installation(data_dir).settings

    async def act() -> None:
        async with opened(settings) as ledger:
            if opens:
                await _open(ledger, dry_run)
            else:
                await _drain(ledger, timeout, dry_run)

    asyncio.run(act())


async def _open(ledger: Ledger, dry_run: bool) -> None:
    since = await closing.closed_since(ledger.redis)
    if since is None:
        say("the service takes new jobs already")
    elif dry_run:
        say(f"the service has taken no new jobs since {moment(since)}; it would take them again")
    else:
        await closing.reopen(ledger.redis)
        await LedgerAudit(ledger).append("drain --open", "service", "", before={"closed": since})
        await ledger.written()
        say("the service takes new jobs")


async def _drain(ledger: Ledger, timeout: float, dry_run: bool) -> None:
    """Raises MidstreamError("conflict") if jobs are unfinished after `timeout`."""
    if dry_run:
        since = await closing.closed_since(ledger.redis)
        state = "takes new jobs" if since is None else f"has been closed since {moment(since)}"
        say(f"the service {state}")
        say("\n".join((await unfinished(ledger)).lines()))
        return
    former = await closing.closed_since(ledger.redis)
    since = await closing.close(ledger.redis, now())
    if former is None:
        await LedgerAudit(ledger).append("drain", "service", "", after={"closed": since})
    await ledger.written()
    say(f"closed to new jobs and harvests since {moment(since)}; `midstream drain --open` opens it")
    deadline = time.monotonic() + timeout
    told: list[str] = []
    while (left := await _looked(ledger)) is None or left.jobs:
        lines = ["Redis does not answer"] if left is None else left.lines()
        if timeout and time.monotonic() > deadline:
            raise MidstreamError(
                "conflict",
                f"not drained after {timeout:g} s: {'; '.join(lines)}",
                hint="the service stays closed: call it again to go on waiting",
            )
        if lines != told:
            told = lines
            say("; ".join(lines))
        await asyncio.sleep(LOOK_S)
    if left.harvests:
        say("; ".join(left.lines()))
    say("drained: no accepted job is unfinished")


async def _looked(ledger: Ledger) -> Unfinished | None:
    """Return what has not ended; None while Redis is unreachable, as when it is started again."""
    try:
        return await unfinished(ledger)
    except MidstreamError as error:
        if error.kind != "unavailable":
            raise
        return None
