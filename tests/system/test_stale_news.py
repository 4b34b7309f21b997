"""Two workers: is what comes late, twice or from a stranger without effect, and what only takes
long left alone?
"""

import asyncio
import base64
import json
import uuid
from pathlib import Path

import pytest
import redis
from stack import Stack, stack_with
from wait_kit import wait_until

from midstream.api.context import open_context
from midstream.broker.queue.celery_app import UNACKED, queue_of
from midstream.schemas.jobs.jobs import State

TOKEN_S, VISIBILITY_S = 0.02, 4
#: A worker may be kept from its work for 3 s. What it has generated is given up only after it has
#: lost its lease: see `reap.lua`.
SETTINGS = {
    "engine_options": {"token_s": TOKEN_S},
    "tuning.visibility_timeout_s": VISIBILITY_S,
    "lease_s": 5,
    "capture_timeout_s": 8,
    "tuning.sweep_interval_s": 0.3,
}


stack = stack_with(workers=2, **SETTINGS)


@pytest.mark.long
# field case 37
def test_a_job_five_times_longer_than_the_visibility_timeout_starts_once(stack: Stack) -> None:
    job_id = stack.submit(["a"], max_tokens=int(5.1 * VISIBILITY_S / TOKEN_S))
    view = stack.wait(job_id)
    assert view.started is not None
    assert view.finished is not None
    assert view.finished - view.started > 5 * VISIBILITY_S
    assert (view.state, view.attempt) == (State.SUCCEEDED, 1)
    events = stack.do(lambda ledger: ledger.events(job_id))
    assert sum(event.event == "state" and event.data["state"] == "running" for event in events) == 1
    received = sum(
        stack.log(name).count(f"Task midstream.generate[{job_id}] received")
        for name in ("worker", "worker-2")
    )
    assert received == 1, "its message was not given out again either"


# field case 42
@pytest.mark.parametrize("kind", ["application/x-python-serialize", "application/json"])
def test_a_pickled_message_is_discarded_unread(stack: Stack, tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "ran"
    bomb = b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    name, tag = queue_of(stack.settings.served_model), str(uuid.uuid4())
    headers = {
        "lang": "py",
        "task": "midstream.generate",
        "id": tag,
        "root_id": tag,
        "parent_id": None,
        "group": None,
    }
    message = {
        "body": base64.b64encode(bomb).decode(),
        "content-encoding": "binary",
        "content-type": kind,
        "headers": headers,
        "properties": {
            "correlation_id": tag,
            "delivery_mode": 2,
            "delivery_info": {"exchange": name, "routing_key": name},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": tag,
        },
    }
    with redis.Redis.from_url(stack.settings.redis_url) as client:
        client.lpush(name, json.dumps(message))
        wait_until(
            lambda: not (client.llen(name) or client.hexists(UNACKED, tag)),
            why="it is taken from the queue, and not given back",
        )
    assert stack.wait(stack.submit(["the workers go on"], max_tokens=2)).state is State.SUCCEEDED
    assert not mark.exists()


def test_a_cancel_reaches_only_the_worker_that_runs_the_job(stack: Stack) -> None:
    job_id = stack.submit(["a"], max_tokens=1000)
    stack.wait_running(job_id)

    async def cancel() -> None:
        async with open_context(stack.settings) as edge:
            await edge.cancel(job_id)

    asyncio.run(cancel())
    assert stack.wait(job_id).state is State.CANCELLED
    assert f"job {job_id} attempt 1 stops: cancelled" in stack.log(
        "worker" if stack.view(job_id).worker == "w1" else "worker-2"
    )
    assert "midstream_cancel" not in stack.log("callbacks"), "which knows no such command"
