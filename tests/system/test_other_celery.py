"""Another Celery app in the same Redis database: neither app delivers the other's messages again,
nor obeys its remote control.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from celery import Celery
from ledger_kit import settings_for
from wait_kit import wait_until

from midstream.broker.queue.celery_app import UNACKED, channels_of, make_app, queue_of
from midstream.broker.redis_service.acl import rules

#: Longer than the visibility timeout of the app that looks for abandoned messages.
TASK_S = 2.5
OTHER = f"""
import os, time
from celery import Celery
app = Celery("other", broker=os.environ["OTHER_URL"])
app.conf.update(task_acks_late=True, task_ignore_result=True)

@app.task(name="other.long")
def long():
    print("start", flush=True)
    time.sleep({TASK_S})
    print("end", flush=True)

quiet = dict(redirect_stdouts=False, quiet=True, loglevel="ERROR")
app.Worker(pool="threads", concurrency=4, hostname="other@test", **quiet).start()
"""


@pytest.mark.slow("a task outlives the visibility timeout")
def test_another_celery_apps_long_task_runs_once_and_only_it_is_controlled(
    redis_url: str, tmp_path: Path
) -> None:
    other = Celery("other", broker=redis_url)
    ours = make_app(settings_for(redis_url, **{"tuning.visibility_timeout_s": 1}))
    output = tmp_path / "output"
    with output.open("w") as file:
        worker = subprocess.Popen(
            [sys.executable, "-c", OTHER],
            stdout=file,
            env={"OTHER_URL": redis_url, "PATH": "/usr/bin:/bin"},
        )
    try:
        wait_until(lambda: other.control.inspect(timeout=1).ping() is not None)
        assert ours.control.inspect(timeout=1).ping() is None, "it is not a worker of ours"
        other.send_task("other.long")
        wait_until(lambda: "start" in output.read_text())
        with ours.connection_for_read() as connection:
            while "end" not in output.read_text():
                connection.default_channel.qos.restore_visible(interval=1)
                time.sleep(0.2)
        with redis.Redis.from_url(redis_url) as client:
            wait_until(lambda: client.hlen("unacked") == 0)
            assert client.llen("celery") == 0
    finally:
        worker.kill()
        worker.wait()
        for app in (other, ours):
            app.close()
    assert output.read_text().split() == ["start", "end"]


def test_our_messages_are_not_delivered_again_by_another_celery_app(redis_url: str) -> None:
    other = Celery("other", broker=redis_url)
    ours = make_app(settings_for(redis_url))
    other.conf.broker_transport_options = {"visibility_timeout": 0}
    try:
        ours.send_task("midstream.generate", args=["job_x"], queue=queue_of("tiny"))
        with (
            ours.connection_for_read() as connection,
            connection.SimpleQueue(queue_of("tiny")) as queue,
        ):
            message = queue.get(timeout=30)
            with redis.Redis.from_url(redis_url) as client, other.connection_for_read() as another:
                another.default_channel.qos.restore_visible(interval=1)
                assert client.hlen(UNACKED) == 1
                assert client.hlen("unacked") == 0
                assert client.llen(queue_of("tiny")) == 0
            message.ack()
    finally:
        for app in (other, ours):
            app.close()


def test_the_users_file_permits_the_channels_of_the_database_that_is_used(redis_url: str) -> None:
    """Redis itself says so: a user with the rules of a role subscribes and publishes, in database 3
    as in 0.
    """
    for database in (0, 3):
        prefix = channels_of(f"redis://127.0.0.1:1/{database}")
        with redis.Redis.from_url(redis_url) as client:
            client.execute_command(
                "ACL",
                "SETUSER",
                "flower",
                "reset",
                "on",
                ">secret",
                *rules("flower", database).split(),
            )
            try:
                with (
                    redis.Redis.from_url(redis_url, username="flower", password="secret") as flower,
                    flower.pubsub() as subscribed,
                ):
                    subscribed.psubscribe(f"{prefix}celeryev/*")
                    subscribed.subscribe(f"{prefix}celery.pidbox")
                    assert [subscribed.get_message(timeout=30)["type"] for _ in range(2)] == [
                        "psubscribe",
                        "subscribe",
                    ]
                    flower.publish(f"{prefix}celeryev/worker.online", "")
                    flower.hgetall(UNACKED)
            finally:
                client.execute_command("ACL", "DELUSER", "flower")
