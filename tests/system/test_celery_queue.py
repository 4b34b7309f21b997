"""Does the queue deliver by priority, and hold to json, as Celery would? Is what is late or a
stranger's without effect?
"""

import asyncio
import base64
import json
import socket
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.app.trace import trace_task
from ledger_kit import (
    MODEL,
    claimed,
    enqueue,
    make_job,
    open_ledger,
    queued_job,
    settings_for,
)
from stack import Stack, stack_with
from wait_kit import wait_until

from midstream.api.context import open_context
from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.queue.celery_app import UNACKED, lists_of, make_app, queue_of
from midstream.schemas.jobs.jobs import Job, State
from midstream.workers.serving import tasks


def waiting(url: str, model: str = MODEL) -> list[dict[str, Any]]:
    """The messages in a model's queue, the next one first."""
    with redis.Redis.from_url(url) as client:
        return [
            json.loads(raw)
            for name in lists_of(queue_of(model))
            for raw in reversed(client.lrange(name, 0, -1))
        ]


async def accept(url: str, *jobs: Job) -> None:
    async with open_ledger(url) as ledger:
        for job in jobs:
            await ledger.submit(job, {})


async def test_a_message_is_json_and_carries_the_job_id_alone(
    ledger: Ledger, redis_url: str
) -> None:  # field case 42
    job = make_job()
    await ledger.release(job.id, await claimed(ledger, job))
    messages = waiting(redis_url)
    assert {message["content-type"] for message in messages} == {"application/json"}
    assert [message["headers"]["id"] for message in messages] == [job.id, f"{job.id}.1"]
    assert [json.loads(message["body"])[0] for message in messages] == [[job.id]] * 2
    assert len({message["properties"]["delivery_tag"] for message in messages}) == 2


async def test_a_message_of_the_ledger_is_the_one_that_celery_would_send(
    ledger: Ledger, redis_url: str
) -> None:
    app = make_app(settings_for(redis_url))
    job = make_job(kind="chat")
    await ledger.submit(job, {})
    enqueue(app, job.id, "chat", MODEL)
    app.close()
    ours, celerys = waiting(redis_url)
    assert json.loads(ours.pop("body")) == json.loads(base64.b64decode(celerys.pop("body")))
    own = [
        [message["properties"].pop(name) for name in ("body_encoding", "delivery_tag", "reply_to")]
        + [message["headers"].pop("origin")]
        for message in (ours, celerys)
    ]
    assert [each[0] for each in own] == ["utf-8", "base64"]
    assert not set(own[0]) & set(own[1]), "of a process, and of a message"
    assert ours == celerys


@pytest.mark.parametrize(
    "model",
    ["tiny", "org/Model-7b.v2", "a b\tc%d", "größe", "模型🙂_x", "\u0080\u07ff\u0800\uffff"],
)
async def test_lua_and_python_name_the_same_queue_for_any_model(
    ledger: Ledger, redis_url: str, model: str
) -> None:
    job = await queued_job(ledger, model=model)
    (message,) = waiting(redis_url, model)
    assert message["headers"]["id"] == job.id
    assert message["properties"]["delivery_info"]["routing_key"] == queue_of(model)


@pytest.mark.parametrize("database", [0, 5])
def test_every_sent_message_is_a_task_sent_event(redis_url: str, database: int) -> None:
    url = redis_url.rpartition("/")[0] + f"/{database}"
    app = make_app(settings_for(url))
    state = app.events.State()
    jobs = [make_job() for _ in range(3)]

    def listening() -> set[str]:
        with redis.Redis.from_url(url) as client:
            return {each["id"] for each in client.client_list(_type="pubsub")}

    others = listening()  # an API of other tests may listen as well

    def send_once_heard() -> None:
        wait_until(lambda: listening() > others)
        asyncio.run(accept(url, *jobs))

    sending = threading.Thread(target=send_once_heard)
    sending.start()
    with app.connection_for_read() as connection:
        for _ in app.events.Receiver(connection, handlers={"*": state.event}).itercapture(
            timeout=60, wakeup=False
        ):
            if len(state.tasks) == len(jobs):
                break
    sending.join()
    told = {
        name: (task.name, task.args, task.state, task.routing_key)
        for name, task in state.tasks.items()
    }
    assert told == {
        job.id: ("midstream.generate", f"['{job.id}']", "PENDING", queue_of(MODEL)) for job in jobs
    }
    app.close()
    with redis.Redis.from_url(url) as client:
        client.flushdb()


async def test_interactive_jobs_are_served_before_batch_jobs(ledger: Ledger) -> None:
    app = make_app(ledger.settings)
    batch = make_job()
    answer = make_job(kind="chat")
    for job in (batch, answer):
        await ledger.submit(job, {})
    with app.connection_for_read() as connection, connection.SimpleQueue(queue_of(MODEL)) as queue:
        messages = [queue.get(timeout=30) for _ in range(2)]
        for message in messages:
            message.ack()
    assert [message.headers["id"] for message in messages] == [answer.id, batch.id]
    app.close()


def test_a_part_that_is_put_back_is_rejected_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = Celery("test", broker="memory://", set_as_current=False)
    rejected: list[bool] = []

    @app.task(name="part")
    def part(job_id: str) -> None:
        raise tasks.PutBack("put back")

    message = app.amqp.as_task_v2("id", "part", args=("job",))
    headers = {**message.headers, "id": "id", "task": "part"}
    request = tasks.TaskRequest(
        SimpleNamespace(
            headers=headers,
            body=message.body,
            delivery_info={},
            properties={},
            payload=message.body,
        ),
        app=app,
        task=part,
        on_reject=lambda _logger, _errors, requeue: rejected.append(requeue),
        on_ack=lambda *_: rejected.append(False),
        decoded=True,
        headers=headers,
        body=message.body,
        connection_errors=(),
        eventer=None,
    )
    with caplog.at_level("INFO"):
        assert trace_task(part, "id", ("job",), {}, request={"id": "id"}, app=app).info is not None
    request.on_failure(SimpleNamespace(exception=tasks.PutBack("put back"), traceback=""))
    assert rejected == [True]
    assert [record.levelname for record in caplog.records] == ["INFO"]


# --- Two workers: what is late or a stranger's has no effect, what only takes long is left alone --


TOKEN_S = 0.02
VISIBILITY_S = 4
#: A worker may be kept from its work for 3 s. What it has generated is given up only after it has
#: lost its lease: see `reap.lua`.
SETTINGS = {
    "engine_options": {"token_s": TOKEN_S},
    "tuning.visibility_timeout_s": VISIBILITY_S,
    "lease_s": 5,
    "capture_timeout_s": 8,
    "tuning.sweep_interval_s": 0.3,
}


workers = stack_with(workers=2, **SETTINGS)


def test_worker_stats_include_the_engine(workers: Stack) -> None:
    node = f"w1@{socket.gethostname()}"
    shown = workers.app.control.inspect([node], timeout=60).stats()[node]["midstream"]
    assert shown["model"] == "fake-model"
    assert shown["tp"] == 1
    assert shown["pp"] == 1
    assert shown["healthy"] is True


@pytest.mark.long
# field case 37
def test_a_job_five_times_longer_than_the_visibility_timeout_starts_once(workers: Stack) -> None:
    job_id = workers.submit(["a"], max_tokens=int(5.1 * VISIBILITY_S / TOKEN_S))
    view = workers.wait(job_id)
    assert view.started is not None
    assert view.finished is not None
    assert view.finished - view.started > 5 * VISIBILITY_S
    assert view.state == State.SUCCEEDED
    assert view.attempt == 1
    events = workers.do(lambda ledger: ledger.events(job_id))
    assert sum(event.event == "state" and event.data["state"] == "running" for event in events) == 1
    received = sum(
        workers.log(name).count(f"Task midstream.generate[{job_id}] received")
        for name in ("worker", "worker-2")
    )
    assert received == 1, "its message was not given out again either"


# field case 42
@pytest.mark.parametrize("kind", ["application/x-python-serialize", "application/json"])
def test_a_pickled_message_is_discarded_unread(workers: Stack, tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "ran"
    bomb = b"cposix\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    name = queue_of(workers.settings.served_model)
    tag = str(uuid.uuid4())
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
    with redis.Redis.from_url(workers.settings.redis_url) as client:
        client.lpush(name, json.dumps(message))
        wait_until(
            lambda: not (client.llen(name) or client.hexists(UNACKED, tag)),
            why="it is taken from the queue, and not given back",
        )
    assert (
        workers.wait(workers.submit(["the workers go on"], max_tokens=2)).state is State.SUCCEEDED
    )
    assert not mark.exists()


def test_a_cancel_reaches_only_the_worker_that_runs_the_job(workers: Stack) -> None:
    job_id = workers.submit(["a"], max_tokens=1000)
    workers.wait_running(job_id)

    async def cancel() -> None:
        async with open_context(workers.settings) as edge:
            await edge.cancel(job_id)

    asyncio.run(cancel())
    assert workers.wait(job_id).state is State.CANCELLED
    assert f"job {job_id} attempt 1 stops: cancelled" in workers.log(
        "worker" if workers.view(job_id).worker == "w1" else "worker-2"
    )
    assert "midstream_cancel" not in workers.log("callbacks"), "which knows no such command"
