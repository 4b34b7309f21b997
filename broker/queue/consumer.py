"""Celery consumer that survives restarts of Redis under load, with rate-limited logging.

kombu clears a lost connection's `client`. Any later use of the connection, an acknowledgement or
the second attempt to close it, raises an AttributeError, which Celery treats as unrecoverable: the
worker would end, and with it an engine that takes a minute to load. The message itself is safe: it
is delivered again, and the ledger then refuses it. A Redis that answers but refuses writes would
also end the worker; it is awaited like an unreachable one.

Task events (received, started, succeeded; for Flower) are sent in batches a few times a second: by
default Celery sends them on every turn of its loop, which under load costs worker and Flower more
than the tasks do.
"""

import logging
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer as CeleryConsumer
from celery.worker.state import maybe_shutdown
from redis.exceptions import ResponseError

from ..redis_service.availability import await_writes, is_redis_unavailable
from .transport import is_closed

logger = logging.getLogger(__name__)


#: Task events are sent after at most this many seconds, and as soon as there are `EVENTS_AT_ONCE`.
EVENTS_S = 0.1
EVENTS_AT_ONCE = 240


class WorkerConsumer(CeleryConsumer):
    """Celery's consumer, named by the setting `worker_consumer`."""

    _events_wait = False  # a timer that sends them is set

    def on_send_event_buffered(self) -> None:
        """Schedule sending the buffer after any thread has added an event."""
        if self.hub and not self._events_wait:
            self._events_wait = True
            # timers are set on the loop's thread alone
            self.hub.call_soon(self.hub.call_later, EVENTS_S, self._send_events)

    def _send_events(self) -> None:
        self._events_wait = False
        self._flush_events()

    def shutdown(self) -> None:
        """Shut down, and send the events of the last tasks: the pool has drained."""
        self._flush_events()
        super().shutdown()

    def register_with_event_loop(self, hub: Any) -> None:
        """Restore the timers when the loop starts: those of a previous start were dropped with its
        connection.
        """
        self._events_wait = False
        if self.event_dispatcher is not None:
            self.event_dispatcher.buffer_limit = EVENTS_AT_ONCE
        super().register_with_event_loop(hub)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Drop a lost connection; a new one follows.

        Celery closes it twice, the second time without `client` if the first attempt failed, as
        happens when messages must be restored and Redis is still unreachable.
        """
        _reraise_failure(exc)
        try:
            super().on_connection_error_after_connected(exc)
        except AttributeError as error:
            if self.connection is not None:  # not while closing: Celery has already released it
                raise
            logger.warning("could not close a lost connection: %s", error)
        self._await_writes(exc)

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        _reraise_failure(exc)
        super().on_connection_error_before_connected(exc)
        self._await_writes(exc)

    def _await_writes(self, exc: Exception) -> None:
        """Wait for a Redis that answers but refuses writes (full disk, full memory, read-only);
        Celery handles an unreachable one.
        """
        if isinstance(exc, ResponseError):
            logger.error("Redis rejects writes; no jobs are taken until it accepts them: %s", exc)
            await_writes(self.app.midstream_redis_url, maybe_shutdown)
            logger.warning("Redis accepts writes again")

    def call_soon_ack(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Schedule `p`, which is `ack_log_error` or `reject_log_error` of a message."""
        return super().call_soon_ack(settle, p, *args, **kwargs)


def _reraise_failure(exc: Exception) -> None:
    """Raise errors that waiting does not resolve, such as a missing permission."""
    if isinstance(exc, ResponseError) and not is_redis_unavailable(exc):
        raise exc


def settle(act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Acknowledge or reject; a message whose connection is closed will be delivered again, and the
    ledger then refuses it.
    """
    try:
        act(*args, **kwargs)
    except AttributeError as error:
        message = act.__self__  # type: ignore[attr-defined]
        if not is_closed(message.channel):
            raise
        logger.warning(
            "message %s stays unacknowledged; its connection is closed: %s",
            message.delivery_tag,
            error,
        )
