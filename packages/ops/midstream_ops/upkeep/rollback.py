"""`midstream rollback`: decides whether this version may go on with the data of a newer one.

The newer version has recorded which versions read what it stores. If that includes this one, the
records that unfinished work needs are still read one by one: a request may have used a field that
only the newer version knows.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.named.source_runs import LedgerRuns
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.broker.ledger.people.keys import LedgerKeys
from midstream.broker.processes import install
from midstream.broker.processes.folder_schema import FILE, lower_folder, of_folder
from midstream.broker.redis_service import opening
from midstream.broker.redis_service.ledger_schema import lower_redis, of_redis
from midstream.client.cli.terminal import say
from midstream.client.render.jobs import count
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.ledger_shares import NamedReading, shares
from midstream.schemas.packages import part
from midstream.schemas.requests.artifact_kinds import ARTIFACTS
from midstream.schemas.service.stored_schema import SCHEMA, StoredSchema, refuse
from midstream.schemas.settings.settings import Settings

from .. import redis_server
from .installation import installation, opened
from .locks import take

#: What is wrong with a record, in words.
Troubles = list[str]


def run(data_dir: Path | None, *, dry_run: bool) -> None:
    """Check everything, and record this version where a newer one is recorded."""
    found = installation(data_dir, needs_redis=False)
    with ExitStack() as stack:
        take(found.data, stack)
        refuse(f"the data directory {found.data}", of_folder(found.data))
        server = None
        url = found.settings.redis_url
        if not url:
            server = _redis_of(found.data)
            stack.callback(server.stop)
            url = server.url
        with opening.client(url, socket_timeout=60) as client:
            stored = of_redis(client)
            refuse("the ledger in Redis", stored)
            settings = msgspec.structs.replace(found.settings, redis_url=url)
            troubles, read = asyncio.run(_read(settings, alone=server is not None))
            _judge(troubles, read)
            if dry_run:
                say(f"a dry run: nothing was changed; {_written_by(stored)}")
                return
            lower_redis(client)
        if (found.data / FILE).exists():
            lower_folder(found.data)
    say(f"midstream {__version__} may go on with this data: start it. {_written_by(stored)}")


def _redis_of(data: Path) -> redis_server.RedisServer:
    """Start the Redis of a data directory, alone."""
    if not (data / "redis").is_dir():
        raise MidstreamError("not_found", f"{data} has no data of Redis", field="data_dir")
    password = install.redis_password(data)
    return redis_server.start(data / "redis", password=password, say=say)


def _written_by(stored: StoredSchema | None) -> str:
    if stored is None:
        return "No version is recorded in it"
    return f"It was written by midstream {stored.version} (stored schema {stored.schema})"


def _judge(troubles: Troubles, read: int) -> None:
    """Raise MidstreamError if something cannot be read."""
    if not troubles:
        say(f"{count(read, 'record')} read: jobs, models, artifacts, keys and runs")
        return
    raise MidstreamError(
        "version_mismatch",
        f"midstream {__version__} (stored schema {SCHEMA}) cannot read {len(troubles)} of {read} "
        f"records: {'; '.join(troubles)}",
        hint="start the newer version again and let these jobs end (`midstream drain`), or delete "
        "what is named; or restore a backup that this version made",
    )


async def _read(settings: Settings, *, alone: bool) -> tuple[Troubles, int]:
    """Read what unfinished work needs; return what cannot be read, and how much was tried.

    `alone`: nothing else can have opened this Redis. Otherwise raises MidstreamError("conflict")
    while workers are alive.
    """
    troubles: Troubles = []
    read = 0

    async def tried(call: Callable[[], Awaitable[object]], what: str) -> None:
        nonlocal read
        read += 1
        try:
            await call()
        except MidstreamError as error:
            troubles.append(error.detail)
        except msgspec.DecodeError as error:
            troubles.append(f"{what}: {error}")

    async with opened(settings) as ledger:
        running = [worker.worker for worker in await ledger.workers(queue=None)]
        if running and not alone:
            raise MidstreamError(
                "conflict", f"workers are alive: {', '.join(running)}", hint="stop them first"
            )
        async for what, call in _records(ledger):
            await tried(call, what)
    return troubles, read


async def _records(ledger: Ledger) -> AsyncIterator[NamedReading]:
    """Yield what each record is, and what reads it."""
    for id in [name.decode() for name in await ledger.redis.zrange("ms:live", 0, -1)]:
        yield f"job {id}", partial(ledger.job, id)
    yield "keys", LedgerKeys(ledger).list
    yield "tenants", ledger.tenants.list
    yield "models", ledger.models
    for name in [raw.decode() for raw in await ledger.redis.hkeys("ms:models")]:
        yield f"global steering of {name!r}", partial(LedgerSteering(ledger).current, name)
        yield f"source runs of {name!r}", partial(LedgerRuns(ledger).list, name)
        for kind in ARTIFACTS.values():
            registry = Registry(ledger, kind)
            for each in await registry.names(name):
                yield f"{kind.noun} {each!r} of {name!r}", partial(registry.get, name, each)
    for share in shares():
        if share.check:
            async for what, call in part(share.check)(ledger):
                yield what, call
