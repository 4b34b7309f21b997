"""Celery configuration: queues, priorities and switches.

A message carries a job id and nothing else. It is a hint that a job waits: the ledger decides which
worker runs it, and the reaper sends it again if it was lost. The scripts of the ledger put the
messages into these queues (`messages`).
"""

import functools
import re
import socket

from celery import Celery

from ...schemas.jobs.queues import Queue
from ...schemas.settings.settings import Settings
from ..redis_service import opening as redis_open

#: kombu's Redis priorities: one list per step; 0 is served first.
PRIORITY_STEPS = (0, 3, 6, 9)
#: The queue of the `callbacks` worker.
CALLBACKS_QUEUE = "midstream.callbacks"
#: Seconds between searches for abandoned messages (kombu's default amounts to about 100 s).
RESTORE_INTERVAL_S = 2
#: Seconds after which the lock of a killed process expires (kombu's default: 300): only one process
#: searches at a time.
RESTORE_LOCK_S = 5
#: A connection whose peer has vanished silently (a cut link, a machine that lost power) is dropped
#: after 20 s: kombu waits for messages without a timeout, and the kernel alone would take two
#: hours.
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,
}
#: Prefix of kombu's keys other than the queues: another Celery app may use the same database, and
#: kombu delivers every message that it finds unacknowledged for longer than *its own* visibility
#: timeout. No queue's name contains `:`.
PREFIX = "midstream:"
UNACKED = f"{PREFIX}unacked"
UNACKED_INDEX = f"{PREFIX}unacked_index"
UNACKED_MUTEX = f"{PREFIX}unacked_mutex"
#: Between the queue's name and the priority in the name of kombu's Redis lists.
SEPARATOR = "\x06\x16"


def queue_of(model: str, queue: Queue = "") -> str:
    """Return `midstream.<model>`, followed by `_<queue>` for a queue other than that of its vLLM
    workers; a character not allowed in a queue's name becomes `_<code>_`.
    """
    name = re.sub(r"[^A-Za-z0-9.-]", lambda odd: f"_{ord(odd[0]):x}_", model)
    return f"midstream.{name}_{queue}" if queue else f"midstream.{name}"


def lists_of(queue: str) -> list[str]:
    """Return the Redis lists in which a queue's messages wait, one per priority."""
    return [queue if step == 0 else f"{queue}{SEPARATOR}{step}" for step in PRIORITY_STEPS]


def task_of(kind: str) -> str:
    """Return the name of the task that runs jobs of a kind: `midstream.generate`, `.completion`,
    `.chat`, `.sweep`, `.attribution`, `.fit`, `.harvest`.
    """
    return f"midstream.{kind}"


def make_app(settings: Settings) -> Celery:
    """Return the Celery app that API, workers and callbacks share. It has no result backend: the
    ledger holds results.
    """
    app = Celery("midstream", broker=settings.redis_url, set_as_current=False)
    app.midstream_redis_url = settings.redis_url
    app.conf.update(
        broker_use_ssl=redis_open.tls_of(settings.redis_url),
        accept_content=["json"],
        task_serializer="json",
        event_serializer="json",
        result_accept_content=["json"],
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_acks_late=True,
        # a failed task has written its problem to the ledger: its message is done
        task_acks_on_failure_or_timeout=True,
        task_track_started=True,
        task_send_sent_event=True,
        worker_send_task_events=True,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,  # not possible on threads
        worker_enable_remote_control=True,
        worker_consumer="midstream.broker.queue.consumer:WorkerConsumer",
        # full concurrency after a reconnect: the ledger refuses duplicate runs
        worker_enable_prefetch_count_reduction=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # Redis may restart: keep trying
        broker_channel_error_retry=True,  # Redis may refuse writes for a while: see `consumer`
        # A publisher that cannot reach Redis fails quickly; the job is committed, and the reaper
        # sends its message later.
        task_publish_retry_policy={
            "max_retries": 2,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
        broker_transport_options={
            "visibility_timeout": settings.tuning.visibility_timeout_s,
            "unacked_restore_interval": RESTORE_INTERVAL_S,
            "unacked_restore_throttle": 1,
            "unacked_mutex_expire": RESTORE_LOCK_S,
            "unacked_key": UNACKED,
            "unacked_index_key": UNACKED_INDEX,
            "unacked_mutex_key": UNACKED_MUTEX,
            # kombu strips the part between `/` and the first `.`
            "fanout_prefix": f"/{PREFIX}{{db}}.",
            "priority_steps": list(PRIORITY_STEPS),
            "sep": SEPARATOR,
            "queue_order_strategy": "priority",
            "socket_keepalive": True,
            "socket_keepalive_options": KEEPALIVE,
            "socket_connect_timeout": 5,
        },
        task_default_queue=CALLBACKS_QUEUE,
        task_create_missing_queues=True,
        task_queues=None,
        enable_utc=True,
    )
    return app


@functools.cache
def channels_of(redis_url: str) -> str:
    """Return the prefix of the channels for events and remote control of this URL's database."""
    return f"/{PREFIX}{redis_open.database_of(redis_url)}."
