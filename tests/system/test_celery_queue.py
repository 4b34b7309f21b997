"""Does the queue deliver by priority, keep what runs, and hold to json? With a real Celery worker and Redis."""

import base64
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
from lease_worker import VISIBILITY_TIMEOUT_S
from ledger_kit import MODEL, settings_for

from midstream.broker.queue.celery_app import lists_of, make_app, queue_of
from midstream.broker.queue.messages import enqueue, post

WORKER = Path(__file__).with_name("lease_worker.py")


def test_a_message_is_json_and_carries_the_job_id_alone(redis_url: str) -> None:  # field case 42
    app = make_app(settings_for(redis_url))
    enqueue(app, "job_1", "generate", MODEL)
    enqueue(app, "job_1", "generate", MODEL, attempt=2)
    with redis.Redis.from_url(redis_url) as client:
        raw = [message for name in lists_of(queue_of(MODEL)) for message in client.lrange(name, 0, -1)]
    messages = [json.loads(each) for each in raw]
    assert {message["content-type"] for message in messages} == {"application/json"}
    assert {message["headers"]["id"] for message in messages} == {"job_1", "job_1.2"}
    assert {message["headers"]["argsrepr"] for message in messages} == {"['job_1']"}
    app.close()


def test_a_prepared_message_is_the_one_that_celery_would_send(redis_url: str) -> None:
    app = make_app(settings_for(redis_url))
    name = queue_of(MODEL)
    app.send_task("midstream.chat", args=["job_1"], queue=name, priority=3, task_id="job_1.2")
    post(app, [("job_1", "chat", MODEL, 2, 3), ("job_2", "generate", MODEL, 0, 0)])
    with redis.Redis.from_url(redis_url) as client:
        urgent, (prepared, composed), *_ = ([json.loads(raw) for raw in client.lrange(each, 0, -1)] for each in lists_of(name))
    assert [message["headers"]["id"] for message in urgent] == ["job_2"]
    assert prepared["properties"].pop("delivery_tag") != composed["properties"].pop("delivery_tag")
    assert json.loads(base64.b64decode(prepared.pop("body"))) == json.loads(base64.b64decode(composed.pop("body")))
    assert prepared == composed
    app.close()


def test_flower_hears_of_every_message_that_was_sent_together(redis_url: str) -> None:
    app = make_app(settings_for(redis_url))
    state = app.events.State()

    def listening() -> set[str]:
        with redis.Redis.from_url(redis_url) as client:
            return {each["id"] for each in client.client_list(_type="pubsub")}

    others = listening()  # an API of other tests may listen as well

    def send_once_heard() -> None:
        deadline = time.monotonic() + 60
        while listening() <= others:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.02)
        post(app, [(f"job_{number}", "generate", MODEL, 0, 6) for number in range(3)])

    sending = threading.Thread(target=send_once_heard)
    sending.start()
    with app.connection_for_read() as connection:
        for _ in app.events.Receiver(connection, handlers={"*": state.event}).itercapture(timeout=60, wakeup=False):
            if state.tasks:  # the first that is heard may be that it listens
                break
    sending.join()
    told = {name: (task.name, task.args, task.state, task.routing_key) for name, task in state.tasks.items()}
    assert told == {f"job_{n}": ("midstream.generate", f"['job_{n}']", "PENDING", queue_of(MODEL)) for n in range(3)}
    app.close()


def test_who_waits_for_an_answer_is_served_before_a_batch(redis_url: str) -> None:
    app = make_app(settings_for(redis_url))
    enqueue(app, "batch", "generate", MODEL)
    enqueue(app, "answer", "chat", MODEL)
    with app.connection_for_read() as connection, connection.SimpleQueue(queue_of(MODEL)) as queue:
        order = []
        for _ in range(2):
            message = queue.get(timeout=30)
            order.append(message.headers["id"])
            message.ack()
    assert order == ["answer", "batch"]
    app.close()


def test_an_enqueue_without_redis_fails_soon(redis_url: str) -> None:  # field case 39
    app = make_app(settings_for("redis://127.0.0.1:1/0"))
    began = time.monotonic()
    with pytest.raises(Exception, match="refused"):
        enqueue(app, "job_1", "generate", MODEL)
    assert time.monotonic() - began < 30
    app.close()


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
                workers.append(subprocess.Popen([sys.executable, str(WORKER), redis_url, leases, leases, str(takes)], stdout=output))
        app = make_app(settings_for(redis_url))
        for leases in seconds:
            enqueue(app, f"job_{leases}", "generate", leases)
        wait_for("start", "without", 2)  # the control: without renewal the same task is given out again
        wait_for("end", "with", 1)
        app.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert said("with") == ["start job_with", "end job_with"]
