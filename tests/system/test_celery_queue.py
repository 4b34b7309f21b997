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
from ledger_kit import MODEL, settings_for

from midstream.broker.celery_app import lists_of, make_app, queue_of
from midstream.broker.messages import enqueue, post

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
    with redis.Redis.from_url(redis_url) as client:
        others = client.pubsub_numpat()  # an API of other tests may listen as well

    def send_once_heard() -> None:
        with redis.Redis.from_url(redis_url) as client:
            while client.pubsub_numpat() <= others:
                time.sleep(0.02)
        post(app, [(f"job_{number}", "generate", MODEL, 0, 6) for number in range(3)])

    sending = threading.Thread(target=send_once_heard)
    sending.start()
    with app.connection_for_read() as connection:
        for _ in app.events.Receiver(connection, handlers={"*": state.event}).itercapture(timeout=10, wakeup=False):
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
            message = queue.get(timeout=5)
            order.append(message.headers["id"])
            message.ack()
    assert order == ["answer", "batch"]
    app.close()


def test_an_enqueue_without_redis_fails_soon(redis_url: str) -> None:  # field case 39
    app = make_app(settings_for("redis://127.0.0.1:1/0"))
    began = time.monotonic()
    with pytest.raises(Exception, match="refused"):
        enqueue(app, "job_1", "generate", MODEL)
    assert time.monotonic() - began < 10
    app.close()


def test_a_task_longer_than_the_visibility_timeout_runs_once_with_leases_and_twice_without(redis_url: str) -> None:  # field case 37
    seconds = "6"
    workers = {
        leases: subprocess.Popen([sys.executable, str(WORKER), redis_url, leases, leases, seconds], stdout=subprocess.PIPE, text=True)
        for leases in ("with", "without")
    }
    try:
        app = make_app(settings_for(redis_url))
        for leases in workers:
            enqueue(app, f"job_{leases}", "generate", leases)
        deadline = time.monotonic() + 60
        with redis.Redis.from_url(redis_url) as client:
            while any(client.exists(*lists_of(queue_of(leases))) for leases in workers):
                assert time.monotonic() < deadline, "the workers did not take their messages"
                time.sleep(0.1)
            time.sleep(float(seconds) + 1)
        app.close()
    finally:
        for worker in workers.values():
            worker.kill()
    said = {leases: worker.communicate()[0] for leases, worker in workers.items()}
    assert said["with"].split("\n")[:2] == ["start job_with", "end job_with"]
    assert said["with"].count("start") == 1
    assert said["without"].count("start") > 1, "the control: without renewal the same task is given out again"
