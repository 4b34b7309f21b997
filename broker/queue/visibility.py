"""Renews the messages of running tasks in kombu's index of unacknowledged messages.

kombu delivers a message that was not acknowledged within the visibility timeout to another
consumer, whether or not its task is alive: a healthy 150 s task under a 10 s timeout ran twice
concurrently. So a live consumer renews its messages, and the timeout can be short. This reads
private names of kombu 5.7 (pinned; a test checks that they exist).
"""

import logging
import time
from typing import Any

from celery import bootsteps
from redis.exceptions import ResponseError

log = logging.getLogger(__name__)

#: Seconds between renewals, and the least number of them in a visibility timeout: one may be late.
RENEW_S = 2.0
RENEWALS = 4


class LeaseStep(bootsteps.StartStopStep):
    """Consumer bootstep: add with `app.steps["consumer"].add(LeaseStep)`.

    Renews while `app.may_renew()` is true: a worker whose engine has died must release its
    messages.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        self._timer_entry: Any = None
        super().__init__(consumer, **kwargs)

    def start(self, consumer: Any) -> None:
        timeout = consumer.app.conf.broker_transport_options["visibility_timeout"]
        self._timer_entry = consumer.timer.call_repeatedly(
            min(RENEW_S, timeout / RENEWALS), renew_unacked, (consumer,)
        )

    def stop(self, consumer: Any) -> None:
        if self._timer_entry is not None:
            self._timer_entry.cancel()
            self._timer_entry = None

    shutdown = stop


def renew_unacked(consumer: Any) -> int:
    """Set every message that this consumer holds to the current time in the index; returns how many
    it holds.

    ZADD XX: a message that was acknowledged or delivered elsewhere meanwhile is not added again.
    """
    if consumer.task_consumer is None or not consumer.app.may_renew():
        return 0
    channel = consumer.task_consumer.channel
    if not (held := set(channel.qos._delivered) - channel.qos._dirty):
        return 0
    try:
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(held, time.time()), xx=True)
    except (*channel.connection_errors, ResponseError) as error:
        # the consumer notices the same and reconnects
        log.warning(
            "messages not renewed (count: %d); Redis is unreachable or rejecting writes: %s",
            len(held),
            error,
        )
    return len(held)
