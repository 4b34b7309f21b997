"""What is the message that a job waits, and how are many of them sent at once?

They are Celery's messages, made once per kind, model and step by Celery itself and filled in for each job: composing one anew costs
more than everything else that happens to a small job outside its engine. Those of one call leave in one pipeline, and one event
tells of them all. A test holds that a message is the same, part by part, as the one that `send_task` would send.
"""

import base64
import json
import os
import time
import uuid
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from celery import Celery
from celery.events.event import get_exchange
from celery.utils.nodenames import anon_nodename
from kombu import Producer

from .celery_app import PRIORITY_OF_KIND, SEPARATOR, queue_of, task_of

#: Job id, kind, model, attempts made, step of the queue (one of `PRIORITY_STEPS`).
Waiting = tuple[str, str, str, int, int]

#: What stands for the job's id, the task's id, the body and the delivery tag in a form that is to be filled in.
JOB, TASK, BODY, TAG = "@job@", "@task@", "@body@", "@tag@"
#: Celery's event of several tasks in one.
EVENTS_TOPIC = "task.multi"


class Form(NamedTuple):
    """The message of any job of a kind, model and step, and what is told of it."""

    list: str  # Redis list that the message waits in
    text: str
    body: str
    event: dict[str, Any]


def list_of(queue: str, step: int) -> str:
    """The Redis list of a queue and priority step, as kombu names it."""
    return queue if step == 0 else f"{queue}{SEPARATOR}{step}"


def task_id_of(job_id: str, attempt: int) -> str:
    """Each message has an id of its own: the job's, and from the second on how many attempts were made."""
    return job_id if attempt == 0 else f"{job_id}.{attempt}"


def job_of_task(task_id: str) -> tuple[str, int]:
    """(job id, attempts made when it was sent) of a task that `task_id_of` named."""
    job_id, _, attempts = task_id.partition(".")
    return job_id, int(attempts) if attempts.isdigit() else 0


@cache
def _form(app: Celery, kind: str, model: str, step: int) -> Form:
    queue = queue_of(model)
    made = app.amqp.as_task_v2(
        TASK, task_of(kind), [JOB], {}, origin=anon_nodename(), reply_to=app.thread_oid, create_sent_event=True, ignore_result=None
    )
    properties = made.properties | {
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": step,
        "body_encoding": "base64",
        "delivery_tag": TAG,
    }
    message = {
        "body": BODY,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": made.headers,
        "properties": properties,
    }
    event = made.sent_event | {"queue": queue, "exchange": "", "routing_key": queue}
    return Form(list_of(queue, step), json.dumps(message), json.dumps(made.body), event)


def message_of(app: Celery, waiting: Waiting) -> tuple[str, str]:
    """The list to put it into, and the message."""
    job_id, kind, model, attempt, step = waiting
    form = _form(app, kind, model, step)
    body = base64.b64encode(form.body.replace(JOB, job_id).encode()).decode()
    text = form.text.replace(TASK, task_id_of(job_id, attempt)).replace(JOB, job_id)
    return form.list, text.replace(BODY, body).replace(TAG, str(uuid.uuid4()))


def event_of(app: Celery, waiting: Waiting) -> dict[str, Any]:
    """That the message was sent, for Flower."""
    job_id, kind, model, attempt, step = waiting
    task_id = task_id_of(job_id, attempt)
    told = _form(app, kind, model, step).event | {"uuid": task_id, "root_id": task_id, "args": repr([job_id])}
    frame = {"type": "task-sent", "hostname": anon_nodename(), "pid": os.getpid(), "utcoffset": 0, "clock": app.clock.forward()}
    return frame | told | {"timestamp": time.time()}


def post(app: Celery, waiting: Sequence[Waiting]) -> None:
    """Send the messages of these jobs: all or, when it raises, perhaps none.

    Blocks for two round trips to Redis; thread-safe. Raises kombu.exceptions.OperationalError when Redis is away.
    """
    lists: dict[str, list[str]] = {}
    for one in waiting:
        name, message = message_of(app, one)
        lists.setdefault(name, []).append(message)
    events = [event_of(app, one) for one in waiting]
    policy = app.conf.task_publish_retry_policy

    with app.producer_or_acquire() as producer:

        def put() -> None:
            if lists:
                with producer.channel.conn_or_acquire() as client, client.pipeline(transaction=True) as pipe:
                    for name, messages in lists.items():
                        pipe.lpush(name, *messages)
                    pipe.execute()
                lists.clear()  # what is tried again is what is told of them
            _tell(app, producer, events)

        producer.connection.ensure(producer, put, **policy)()


def _tell(app: Celery, producer: Producer, events: list[dict[str, Any]]) -> None:
    exchange = get_exchange(producer.connection, name=app.conf.event_exchange)
    producer.publish(
        events,
        exchange=exchange.name,
        routing_key=EVENTS_TOPIC,
        declare=[exchange],
        serializer="json",
        headers={"hostname": anon_nodename()},
        delivery_mode=1,
        retry=False,
    )


def enqueue(app: Celery, job_id: str, kind: str, model: str, attempt: int = 0, step: int | None = None) -> None:
    """`post` the message of one job; `step` None: what the kind of job has by itself."""
    post(app, [(job_id, kind, model, attempt, PRIORITY_OF_KIND[kind] if step is None else step)])
