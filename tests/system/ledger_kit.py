"""Jobs, receipts and a ledger for tests of the broker; the Redis behind them is real."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis

from midstream.broker.ledger.jobs import Ledger, new_job_id
from midstream.broker.ledger.settlement import Settler
from midstream.schemas.base import now
from midstream.schemas.jobs import Job, Output, Sampling, StoredPrompt
from midstream.schemas.models import WorkerInfo
from midstream.schemas.receipts import Receipt
from midstream.schemas.settings import Settings
from midstream.schemas.specs import StoredCapture, StoredSteering

MODEL, WORKER, BOOT, EPOCH = "tiny", "w1", "boot1", "epoch1"


def settings_for(url: str, **changes: Any) -> Settings:
    return Settings(redis_url=url, model_name=MODEL, **changes)


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
        "captures": [[StoredCapture(sites={"post_block": [0]}, positions="all", tag="t")]] * (prompts if capture else 0),
        "steering": [[StoredSteering(layers=[0], hook="post_block", positions="all", family="add", tensors=["0" * 64], scale=1.0)]]
        * (prompts if steer else 0),
    }
    return Job(**(fields | changes))


def receipt(job: Job | str, request: int = 0, rank: int = 0, attempt: int = 1, **changes: Any) -> Receipt:
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
    return [Output(index=place, text=text, token_ids=[5], finish_reason="stop", prompt_tokens=3) for place in range(prompts)]


async def claimed(ledger: Ledger, job: Job, ranks: int = 2, worker: str = WORKER, boot: str = BOOT) -> int:
    """Submit and claim `job`; returns the attempt."""
    await ledger.submit(job, {})
    claim = await ledger.claim(job.id, worker, boot, ranks)
    assert claim is not None
    return claim.attempt


def worker_info(worker: str = WORKER, boot: str = BOOT, **changes: Any) -> WorkerInfo:
    facts: dict[str, Any] = {
        "worker": worker, "boot": boot, "model": MODEL, "version": "0.1.0", "host": "here", "pid": 1, "started": now(), "tp": 2, "pp": 1,
    }  # fmt: skip
    return WorkerInfo(**(facts | changes))
