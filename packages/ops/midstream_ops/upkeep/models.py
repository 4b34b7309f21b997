"""`midstream delete model NAME`: removes what the ledger has of a model served no longer."""

import asyncio
from typing import NamedTuple

import msgspec

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.core.connection import of_each
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.people.audit import LedgerAudit
from midstream.client.cli.terminal import say
from midstream.client.render.jobs import count
from midstream.schemas.base.errors import MidstreamError, suggestion
from midstream.schemas.requests.artifact_kinds import ARTIFACTS

from .drain import unfinished
from .installation import installation, opened

#: Kinds of artifacts in the order in which they are deleted: policies name probes and modules.
_FIRST = ("policies", "probes")


class ModelContents(NamedTuple):
    """What the ledger has of a model."""

    artifacts: dict[str, list[str]]  # plural of the kind → names as stored
    runs: list[str]  # names of source runs, as stored
    steered: bool  # global steering is set
    captures: int  # captures in files, which stay

    def lines(self) -> list[str]:
        """Return what is said of it."""
        lines = [f"{plural}: {', '.join(names)}" for plural, names in self.artifacts.items()]
        lines += [f"source runs: {', '.join(self.runs)}"] if self.runs else []
        lines += ["global steering"] if self.steered else []
        return [*lines, "its entry, tokenizer and counts"]


def delete(name: str, *, dry_run: bool) -> bool:
    """Delete what the ledger has of a model; return whether it did. Raises MidstreamError."""
    settings = installation().settings

    async def act() -> None:
        async with opened(settings) as ledger:
            await _check(ledger, name)
            found = await found_of(ledger, name)
            say(f"{name} has: " + "; ".join(found.lines()))
            if found.captures:
                say(
                    f"{count(found.captures, 'capture')} of it stay: `midstream list captures` and "
                    "`midstream delete capture`"
                )
            if not dry_run:
                await _delete(ledger, name, found)

    asyncio.run(act())
    if dry_run:
        say("a dry run: nothing was deleted")
    return not dry_run


async def _check(ledger: Ledger, name: str) -> None:
    """Raise MidstreamError for a model that is unknown, served, or that unfinished jobs name."""
    entries: dict[bytes, bytes] = await ledger.redis.hgetall("ms:models")
    known = {each.decode() for each in entries}
    if name not in known:
        raise MidstreamError(
            "not_found",
            f"no model {name!r} is listed",
            allowed=", ".join(sorted(known)) or None,
            hint=suggestion(name, known),
        )
    workers = [each.worker for each in await ledger.workers(queue=None) if each.model == name]
    if workers:
        raise MidstreamError(
            "conflict", f"{name!r} is served by {', '.join(workers)}", hint="stop them first"
        )
    harvests = await _harvests_of(ledger, name)
    if harvests:
        raise MidstreamError(
            "conflict",
            f"harvests of {name!r} that have not ended: {', '.join(harvests)}",
            hint="cancel them, or start a worker of the model",
        )
    jobs = sum(
        number for (model, _), number in (await unfinished(ledger)).jobs.items() if model == name
    )
    if jobs:
        raise MidstreamError(
            "conflict",
            f"{count(jobs, 'job')} of {name!r} unfinished",
            hint="cancel them, or start a worker of the model",
        )


async def found_of(ledger: Ledger, name: str) -> ModelContents:
    """Return what the ledger has of a model."""
    kinds = sorted(ARTIFACTS.values(), key=lambda kind: kind.plural not in _FIRST)
    artifacts = {
        kind.plural: names for kind in kinds if (names := await Registry(ledger, kind).names(name))
    }
    redis = ledger.redis
    runs = sorted(run.decode() for run in await redis.hkeys(f"ms:runs:{name}"))
    steered = bool(await redis.hexists(f"ms:steering:{name}", "entries"))
    ids = [job.decode() for job in await redis.zrange("ms:captures", 0, -1)]
    models = await of_each(redis, ids, lambda pipe, id: pipe.hget(f"ms:capture:{id}", "model"))
    return ModelContents(artifacts, runs, steered, models.count(name.encode()))


async def _harvests_of(ledger: Ledger, name: str) -> list[str]:
    """Return the ids of a model's harvests that have not ended."""
    ids = sorted(id.decode() for id in await ledger.redis.smembers("ms:harvests-live"))
    specs = await of_each(ledger.redis, ids, lambda pipe, id: pipe.hget(f"ms:harvest:{id}", "spec"))
    return [
        id
        for id, spec in zip(ids, specs, strict=True)
        if spec is not None and msgspec.msgpack.decode(spec)["model"] == name
    ]


async def _delete(ledger: Ledger, name: str, found: ModelContents) -> None:
    """Delete the artifacts, and then the rest: where this is cut off, the model is still listed,
    and another call goes on. Raises MidstreamError.
    """
    for plural, names in found.artifacts.items():
        registry = Registry(ledger, ARTIFACTS[plural])
        for each in names:
            await registry.delete(name, each)
    outcome, *rest = scripts.text(await ledger.run("delete_model", model=name))
    if outcome == "served":
        raise MidstreamError("conflict", f"{name!r} is served by {rest[0]}", hint="stop it first")
    before = found._asdict()
    await LedgerAudit(ledger).append("delete model", "model", name, before=before)
    await ledger.written()
