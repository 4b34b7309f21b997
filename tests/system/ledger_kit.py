"""Jobs, receipts and a ledger for tests of the broker; the Redis behind them is real."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import redis
from celery import Celery

from midstream.broker.ledger.jobs.ledger import Ledger, new_job_id
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.processes.liveness import RELAY_KEY
from midstream.broker.queue.celery_app import (
    PRIORITY_STEPS,
    lists_of,
    queue_of,
    task_of,
)
from midstream.broker.queue.messages import job_of_task
from midstream.schemas.base.errors import Problem
from midstream.schemas.base.records import now, to_json
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import Job, Output, Sampling, State, StoredPrompt
from midstream.schemas.jobs.kinds import KINDS
from midstream.schemas.jobs.models import WorkerInfo
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.requests.steering import MODULES, Module
from midstream.schemas.settings.settings import Settings, load_settings

MODEL = "tiny"
WORKER = "w1"
BOOT = "boot1"
EPOCH = "epoch1"
IDENTITY = "a" * 64


def settings_for(url: str, **changes: Any) -> Settings:
    return load_settings({}, redis_url=url, model_name=MODEL, **changes)


@asynccontextmanager
async def open_ledger(url: str, **changes: Any) -> AsyncIterator[Ledger]:
    ledger = Ledger.connect(settings_for(url, **changes))
    try:
        yield ledger
    finally:
        await ledger.close()


def settler(url: str, **changes: Any) -> Settler:
    return Settler(redis.Redis.from_url(url), settings_for(url, **changes))


def make_job(prompts: int = 1, capture: bool = False, steer: bool = False, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "id": new_job_id(),
        "kind": "generate",
        "model": MODEL,
        "prompts": [StoredPrompt(token_ids=[1, 2, 3])] * prompts,
        "sampling": Sampling(),
        "created": now(),
        "identity": IDENTITY,
        "captures": [[StoredCapture(sites={"post_block": [0]}, positions="all", tag="t")]]
        * (prompts if capture else 0),
        "steering": [
            [
                StoredSteering(
                    layers=[0],
                    hook="post_block",
                    positions="all",
                    family="add",
                    tensors=["0" * 64],
                    scale=1.0,
                )
            ]
        ]
        * (prompts if steer else 0),
    }
    return Job(**(fields | changes))


def enqueue(app: Celery, job_id: str, kind: str, model: str, attempt: int = 0) -> None:
    """Send a message by Celery's own means: one of a former attempt, or one beside the ledger's."""
    app.send_task(
        task_of(kind),
        args=[job_id],
        queue=queue_of(model),
        priority=KINDS[kind].step,
        task_id=f"{job_id}.{attempt}" if attempt else job_id,
    )


class Sent(NamedTuple):
    """A message that waits for a worker."""

    job_id: str
    attempt: int  # attempts made when it was sent
    step: int


async def sent(ledger: Ledger, model: str = MODEL) -> list[Sent]:
    """The messages that wait, in the order in which workers get them."""
    raw = [
        message
        for name in lists_of(queue_of(model))
        for message in reversed(await ledger.redis.lrange(name, 0, -1))
    ]
    messages = [json.loads(each) for each in raw]
    return [
        Sent(*job_of_task(message["headers"]["id"]), message["properties"]["priority"])
        for message in messages
    ]


async def submit_unsent(ledger: Ledger, job: Job, blobs: dict[str, Any] | None = None) -> None:
    """Accept a job and lose its message in the same moment, before a worker can take it."""
    script = ledger.scripts._bound["submit"]

    async def lossy(args: list[Any]) -> Any:
        async with ledger.redis.pipeline(transaction=True) as pipe:
            await script(args=args, client=pipe)
            _ = pipe.lpop(lists_of(queue_of(job.model))[PRIORITY_STEPS.index(KINDS[job.kind].step)])
            reply, lost = await pipe.execute()
        assert json.loads(lost)["headers"]["id"] == job.id
        return reply

    ledger.scripts._bound["submit"] = lossy
    try:
        await ledger.submit(job, blobs or {})
    finally:
        ledger.scripts._bound["submit"] = script


def receipt(
    job: Job | str, request: int = 0, rank: int = 0, attempt: int = 1, **changes: Any
) -> Receipt:
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "worker": WORKER,
        "boot": BOOT,
        "job": job if isinstance(job, str) else job.id,
        "request": request,
        "attempt": attempt,
        "rank": rank,
        "world": 2,
        "tp": rank,
        "pp": 0,
        "step": 7,
        "actions": 3,
        "checksum": "fedcba9876543210",
        "status": "ok",
    }
    return Receipt(**(fields | changes))


def outputs(prompts: int = 1, text: str = "x") -> list[Output]:
    return [
        Output(index=place, text=text, token_ids=[5], finish_reason="stop", prompt_tokens=3)
        for place in range(prompts)
    ]


async def put_module(
    ledger: Ledger, module: Module, blobs: Mapping[str, bytes | Tensor]
) -> Module | None:
    """Returns the module that it replaces."""
    modules = Registry(ledger, MODULES)
    return (await modules.put(module.model, module.name, module.after, blobs))[1]


async def queued_job(ledger: Ledger, **changes: Any) -> Job:
    job = make_job(**changes)
    await ledger.submit(job, {})
    return job


async def running_job(ledger: Ledger, ranks: int = 2, worker: str = WORKER, **changes: Any) -> Job:
    job = make_job(**changes)
    await claimed(ledger, job, ranks, worker)
    return job


async def error_of(ledger: Ledger, job: Job) -> Problem:
    """What the job has failed with."""
    view = await ledger.view(job.id)
    assert view.state is State.FAILED
    assert view.error is not None
    return view.error


async def claimed(
    ledger: Ledger, job: Job, ranks: int = 2, worker: str = WORKER, boot: str = BOOT
) -> int:
    """Submit and claim `job`; returns the attempt."""
    await ledger.submit(job, {})
    return await claimed_again(ledger, job, ranks, worker, boot)


async def claimed_again(
    ledger: Ledger, job: Job, ranks: int = 1, worker: str = WORKER, boot: str = BOOT
) -> int:
    """Claim `job`, which is queued; returns the attempt."""
    claim = await ledger.claim(job.id, worker, boot, ranks, IDENTITY)
    assert claim is not None
    return claim.attempt


async def state_of(ledger: Ledger, job: Job) -> State:
    return (await ledger.view(job.id)).state


def worker_info(worker: str = WORKER, boot: str = BOOT, **changes: Any) -> WorkerInfo:
    facts: dict[str, Any] = {
        "worker": worker,
        "boot": boot,
        "model": MODEL,
        "version": "0.1.0",
        "host": "here",
        "pid": 1,
        "started": now(),
        "tp": 2,
        "pp": 1,
        "identity": IDENTITY,
    }
    return WorkerInfo(**(facts | changes))


async def relay_beat(ledger: Ledger, since: float = 0.0) -> None:
    """Gives a sign of life of a relay that has run since then."""
    await ledger.redis.set(RELAY_KEY, to_json({"since": since}), ex=60)
