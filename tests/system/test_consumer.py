"""Does a worker survive that a message's connection is closed before the message is
acknowledged?
"""

import logging

import pytest
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu import Connection, Message
from kombu.utils.imports import symbol_by_name

from midstream.broker.queue.celery_app import make_app
from midstream.broker.queue.consumer import WorkerConsumer, settle
from midstream.broker.queue.transport import is_closed
from midstream.schemas.settings.settings import Settings


def taken(redis_url: str) -> tuple[Connection, Message]:
    """A message that was delivered and is not acknowledged, and the connection it came through."""
    connection = Connection(redis_url)
    connection.SimpleQueue("acks").put({"job": 1})
    return connection, connection.SimpleQueue("acks").get(timeout=30)


def lose(connection: Connection) -> None:
    """What is left when Redis went away while a connection was given up: no client, and its pool
    gone.
    """
    channel = connection.default_channel
    channel._disconnect_pools()
    channel.qos._on_collect.cancel()  # or the end of the tests would try to restore the message
    connection.transport.client = None


logger = logging.getLogger(__name__)


# field case 37
def test_an_acknowledgement_on_a_lost_connection_is_a_warning(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection, message = taken(redis_url)
    lose(connection)
    assert is_closed(message.channel)
    with pytest.raises(
        AttributeError
    ):  # what kombu does; when it no longer does, all of this can go
        message.ack_log_error(logger, ())
    settle(message.ack_log_error, logger, ())
    assert "its connection is closed" in caplog.text


def test_another_attribute_error_is_not_hidden(redis_url: str) -> None:
    connection, message = taken(redis_url)

    class Broken:
        channel = message.channel
        delivery_tag = "tag"

        def ack(self) -> None:
            raise AttributeError("a bug")

    with connection, pytest.raises(AttributeError, match="a bug"):
        settle(Broken().ack)


# field case 37
@pytest.mark.parametrize("still_connected", [False, True])
def test_a_lost_connection_that_cannot_be_closed_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, still_connected: bool
) -> None:
    def fail(self: CeleryConsumer, exc: Exception) -> None:
        self.connection = "a connection" if still_connected else None
        raise AttributeError("'NoneType' object has no attribute 'hostname'")

    monkeypatch.setattr(CeleryConsumer, "on_connection_error_after_connected", fail)
    consumer = WorkerConsumer.__new__(WorkerConsumer)
    if still_connected:  # then it is a bug, not the closing
        with pytest.raises(AttributeError):
            consumer.on_connection_error_after_connected(ConnectionError())
    else:
        consumer.on_connection_error_after_connected(ConnectionError())


def test_every_worker_uses_this_consumer() -> None:
    assert (
        symbol_by_name(make_app(Settings(redis_url="redis://127.0.0.1:1/0")).conf.worker_consumer)
        is WorkerConsumer
    )
