"""Does the queue deliver by priority, keep what runs, and hold to json?

With a real Celery worker and Redis.
"""

import asyncio
import base64
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from lease_worker import VISIBILITY_TIMEOUT_S
from ledger_kit import MODEL, claimed, enqueue, make_job, open_ledger, settings_for

from midstream.broker.queue.celery_app import lists_of, make_app, queue_of
from midstream.schemas.jobs.jobs import Job

WORKER = Path(__file__).with_name("lease_worker.py")


def waiting(url: str, model: str = MODEL) -> list[dict[str, Any]]:
    """The messages in a model's queue, the next one first."""
    with redis.Redis.from_url(url) as client:
        return [
            json.loads(raw)
            for name in lists_of(queue_of(model))
            for raw in reversed(client.lrange(name, 0, -1))
        ]


def accept(url: str, *jobs: Job, **changes: Any) -> None:
    async def main() -> None:
        async with open_ledger(url, **changes) as ledger:
            for job in jobs:
                await ledger.submit(job, {})

    asyncio.run(main())


def test_a_message_is_json_and_carries_the_job_id_alone(redis_url: str) -> None:  # field case 42
    async def main() -> None:
        async with open_ledger(redis_url) as ledger:
            attempt = await claimed(ledger, job)
            await ledger.release(job.id, attempt)

    job = make_job()
    asyncio.run(main())
    messages = waiting(redis_url)
    assert {message["content-type"] for message in messages} == {"application/json"}
    assert [message["headers"]["id"] for message in messages] == [job.id, f"{job.id}.1"]
    assert [json.loads(message["body"])[0] for message in messages] == [[job.id]] * 2
    assert len({message["properties"]["delivery_tag"] for message in messages}) == 2


def test_a_message_of_the_ledger_is_the_one_that_celery_would_send(redis_url: str) -> None:
    app, job = make_app(settings_for(redis_url)), make_job(kind="chat")
    accept(redis_url, job)
    enqueue(app, job.id, "chat", MODEL)
    ours, celerys = waiting(redis_url)
    assert json.loads(ours.pop("body")) == json.loads(base64.b64decode(celerys.pop("body")))
    assert (
        ours["properties"].pop("body_encoding"),
        celerys["properties"].pop("body_encoding"),
    ) == ("utf-8", "base64")
    for of_process in ("origin",):
        assert ours["headers"].pop(of_process) != celerys["headers"].pop(of_process)
    for of_process in ("delivery_tag", "reply_to"):
        assert ours["properties"].pop(of_process) != celerys["properties"].pop(of_process)
    assert ours == celerys
    app.close()


@pytest.mark.parametrize(
    "model",
    ["tiny", "org/Model-7b.v2", "a b\tc%d", "größe", "模型🙂_x", "\u0080\u07ff\u0800\uffff"],
)
def test_lua_and_python_name_the_same_queue_for_any_model(redis_url: str, model: str) -> None:
    accept(redis_url, job := make_job(model=model))
    (message,) = waiting(redis_url, model)
    assert message["headers"]["id"] == job.id
    assert message["properties"]["delivery_info"]["routing_key"] == queue_of(model)


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
        deadline = time.monotonic() + 60
        while listening() <= others:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.02)
        accept(url, *jobs)

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


def test_interactive_jobs_are_served_before_batch_jobs(redis_url: str) -> None:
    app = make_app(settings_for(redis_url))
    batch, answer = make_job(), make_job(kind="chat")
    accept(redis_url, batch, answer)
    with app.connection_for_read() as connection, connection.SimpleQueue(queue_of(MODEL)) as queue:
        order = []
        for _ in range(2):
            message = queue.get(timeout=30)
            order.append(message.headers["id"])
            message.ack()
    assert order == [answer.id, batch.id]
    app.close()


@pytest.mark.long
def test_a_task_over_the_visibility_timeout_runs_once_only_with_leases(  # field case 37
    redis_url: str, tmp_path: Path
) -> None:
    seconds = {"with": VISIBILITY_TIMEOUT_S + 3.0, "without": 60.0}
    workers = []

    def said(leases: str) -> list[str]:
        return (tmp_path / leases).read_text().splitlines()

    def wait_for(word: str, leases: str, times: int) -> None:
        deadline = time.monotonic() + 120
        while said(leases).count(f"{word} job_{leases}") < times:
            assert time.monotonic() < deadline, (word, leases, said(leases))
            time.sleep(0.1)

    try:
        for leases, takes in seconds.items():
            with (tmp_path / leases).open("w") as output:
                workers.append(
                    subprocess.Popen(
                        [sys.executable, str(WORKER), redis_url, leases, leases, str(takes)],
                        stdout=output,
                    )
                )
        app = make_app(settings_for(redis_url))
        for leases in seconds:
            enqueue(app, f"job_{leases}", "generate", leases)
        # the control: without renewal the same task is given out again
        wait_for("start", "without", 2)
        wait_for("end", "with", 1)
        app.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert said("with") == ["start job_with", "end job_with"]
