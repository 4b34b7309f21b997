"""Does the queue deliver by priority, and hold to json, as Celery would?"""

import asyncio
import base64
import json
import threading
from typing import Any

import pytest
import redis
from ledger_kit import MODEL, claimed, enqueue, make_job, open_ledger, queued_job, settings_for
from wait_kit import wait_until

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.queue.celery_app import lists_of, make_app, queue_of
from midstream.schemas.jobs.jobs import Job


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
    assert (
        {message["content-type"] for message in messages},
        [message["headers"]["id"] for message in messages],
        [json.loads(message["body"])[0] for message in messages],
    ) == ({"application/json"}, [job.id, f"{job.id}.1"], [[job.id]] * 2)
    assert len({message["properties"]["delivery_tag"] for message in messages}) == 2


async def test_a_message_of_the_ledger_is_the_one_that_celery_would_send(
    ledger: Ledger, redis_url: str
) -> None:
    app, job = make_app(settings_for(redis_url)), make_job(kind="chat")
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
    assert (message["headers"]["id"], message["properties"]["delivery_info"]["routing_key"]) == (
        job.id,
        queue_of(model),
    )


@pytest.mark.parametrize("database", [0, 5])
def test_every_sent_message_is_a_task_sent_event(redis_url: str, database: int) -> None:
    url = redis_url.rpartition("/")[0] + f"/{database}"
    app = make_app(settings_for(url))
    state, jobs = app.events.State(), [make_job() for _ in range(3)]

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
    app, batch, answer = make_app(ledger.settings), make_job(), make_job(kind="chat")
    for job in (batch, answer):
        await ledger.submit(job, {})
    with app.connection_for_read() as connection, connection.SimpleQueue(queue_of(MODEL)) as queue:
        messages = [queue.get(timeout=30) for _ in range(2)]
        for message in messages:
            message.ack()
    assert [message.headers["id"] for message in messages] == [answer.id, batch.id]
    app.close()
