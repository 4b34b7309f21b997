"""Are messages that a worker takes several at a time as safe as those that kombu takes one by
one?
"""

import logging
import time
import uuid
from collections.abc import Iterator

import pytest
import redis
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu import Connection, Consumer, Message, Producer, Queue
from kombu.asynchronous import Hub, get_event_loop, set_event_loop
from kombu.transport import redis as kombu_redis
from kombu.utils.imports import symbol_by_name

from midstream.broker.queue.celery_app import make_app
from midstream.broker.queue.consumer import WorkerConsumer, settle
from midstream.broker.queue.transport import AT_ONCE, QueueTransport, is_closed
from midstream.schemas.settings.settings import Settings
from midstream.workers.app import make_worker_app

OPTIONS = {"visibility_timeout": 60, "queue_order_strategy": "priority"}


def direct(name: str) -> Queue:
    """A queue with its name as exchange and routing key, as the ledger's are."""
    return Queue(name, exchange=name, routing_key=name)


@pytest.fixture
def name() -> str:
    return f"midstream.{uuid.uuid4().hex}"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def connection(redis_url: str) -> Iterator[Connection]:
    with Connection(redis_url, transport=QueueTransport, transport_options=OPTIONS) as connection:
        yield connection


@pytest.fixture
def loop() -> Iterator[Hub]:
    """As in a worker, whose acknowledgements wait for a message to go along with."""
    former = get_event_loop()
    hub = Hub()
    set_event_loop(hub)
    yield hub
    set_event_loop(former)
    hub.close()


def put(redis_url: str, name: str, *numbers: int, priority: int = 0) -> None:
    """Send messages as kombu itself does."""
    with (
        Connection(redis_url, transport_options=OPTIONS) as connection,
        connection.channel() as channel,
    ):
        for number in numbers:
            Producer(channel).publish(
                {"number": number},
                routing_key=name,
                declare=[direct(name)],
                exchange=name,
                priority=priority,
            )


def take(connection: Connection, name: str, prefetch: int = 0) -> list[Message]:
    """What one look at the queue gives."""
    taken: list[Message] = []
    with Consumer(
        connection.channel(), [direct(name)], on_message=taken.append, accept=["json"]
    ) as consumer:
        consumer.qos(prefetch_count=prefetch)
        connection.drain_events(timeout=60)
    return taken


def numbers(messages: list[Message]) -> list[int]:
    return [message.decode()["number"] for message in messages]


def noted(client: redis.Redis, messages: list[Message]) -> list[bool]:
    """Of each message: does Redis have it as unacknowledged, in the hash and in the index?"""
    return [
        client.hexists("unacked", message.delivery_tag)
        and client.zscore("unacked_index", message.delivery_tag) is not None
        for message in messages
    ]


def test_one_poll_takes_all_waiting_messages(
    redis_url: str, client: redis.Redis, connection: Connection, name: str
) -> None:
    put(redis_url, name, 1, 2, 3)
    messages = take(connection, name)
    assert numbers(messages) == [1, 2, 3]
    assert noted(client, messages) == [True] * 3
    assert not client.exists(name)
    for message in messages:
        message.ack()
    assert noted(client, messages) == [False] * 3


def test_a_message_is_delivered_before_it_is_noted(
    redis_url: str, client: redis.Redis, connection: Connection, name: str
) -> None:
    """Its task begins a round trip earlier."""
    put(redis_url, name, 1)
    before: list[bool] = []
    taken: list[Message] = []

    def deliver(message: Message) -> None:
        before.extend(noted(client, [message]))
        taken.append(message)

    with Consumer(connection.channel(), [direct(name)], on_message=deliver, accept=["json"]):
        connection.drain_events(timeout=60)
    assert before == [False]
    assert noted(client, taken) == [True]


@pytest.mark.parametrize(("settled", "left"), [("ack", 0), ("reject", 0), ("requeue", 1)])
def test_a_message_may_be_settled_while_it_is_delivered(
    redis_url: str, client: redis.Redis, connection: Connection, name: str, settled: str, left: int
) -> None:
    put(redis_url, name, 1)
    taken: list[Message] = []

    def deliver(message: Message) -> None:
        taken.append(message)
        getattr(message, settled)()

    with Consumer(connection.channel(), [direct(name)], on_message=deliver, accept=["json"]):
        connection.drain_events(timeout=60)
    assert noted(client, taken) == [False]
    assert client.llen(name) == left


def test_prefetch_is_limited_to_free_slots(
    redis_url: str, client: redis.Redis, connection: Connection, name: str
) -> None:
    put(redis_url, name, *range(AT_ONCE + 5))
    assert numbers(take(connection, name, prefetch=3)) == [0, 1, 2]
    assert numbers(take(connection, name)) == list(range(3, 3 + AT_ONCE))
    assert client.llen(name) == 2


def test_urgent_messages_are_taken_first(redis_url: str, connection: Connection, name: str) -> None:
    put(redis_url, name, 1, 2, priority=9)
    put(redis_url, name, 3, 4, priority=3)
    assert numbers(take(connection, name)) == [3, 4, 1, 2]


@pytest.mark.parametrize("stock", [False, True])
def test_unacknowledged_messages_of_a_dead_worker_are_redelivered(
    redis_url: str, client: redis.Redis, connection: Connection, name: str, stock: bool
) -> None:
    put(redis_url, name, 1, 2, 3)
    messages = take(connection, name)
    for message in messages:  # long ago
        client.zadd("unacked_index", {message.delivery_tag: 1}, xx=True)
        message.channel.qos._on_collect.cancel()
        message.channel.qos._delivered.clear()
    transport = kombu_redis.Transport if stock else QueueTransport
    with Connection(redis_url, transport=transport, transport_options=OPTIONS) as other:
        other.default_channel.qos.restore_visible(interval=1)
        again = [
            *take(other, name),
            *(take(other, name) if stock else []),
            *(take(other, name) if stock else []),
        ]
        assert sorted(numbers(again)) == [1, 2, 3]
        assert all(message.headers["redelivered"] for message in again)
        for message in again:
            message.ack()


def test_a_message_is_noted_while_redis_has_no_memory(
    redis_url: str, client: redis.Redis, connection: Connection, name: str
) -> None:
    put(redis_url, name, 1, 2)
    messages: list[Message] = []
    with Consumer(
        connection.channel(), [direct(name)], on_message=messages.append, accept=["json"]
    ):
        client.config_set("maxmemory", 1)
        try:
            connection.drain_events(timeout=60)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.lpush(name, "more")
        finally:
            client.config_set("maxmemory", 0)
    assert numbers(messages) == [1, 2]
    assert noted(client, messages) == [True, True]


def test_the_lock_of_a_worker_killed_while_it_restored_expires_soon(
    redis_url: str, client: redis.Redis
) -> None:
    app = make_worker_app(Settings(redis_url=redis_url, engine="fake", model="fake-model"))
    with app.connection_for_read() as connection:
        qos = connection.default_channel.qos
        with kombu_redis.Mutex(qos.channel.client, qos.unacked_mutex_key, qos.unacked_mutex_expire):
            assert 0 < client.ttl(qos.unacked_mutex_key) <= 10


def test_acknowledgements_wait_for_the_next_message(
    redis_url: str, client: redis.Redis, connection: Connection, name: str, loop: Hub
) -> None:
    put(redis_url, name, 1, 2)
    messages = take(connection, name)
    channel = messages[0].channel
    for message in messages:
        message.ack()
    assert noted(client, messages) == [True, True]
    assert channel.qos.can_consume_max_estimate() is None
    assert not set(channel.qos._delivered) - channel.qos._dirty, (
        "they are not held any more, whatever Redis still says"
    )
    put(redis_url, name, 3)
    with Consumer(channel, [direct(name)], on_message=messages.append, accept=["json"]):
        connection.drain_events(timeout=60)
    assert noted(client, messages) == [False, False, True]


def test_acknowledgements_are_flushed_without_further_messages(
    redis_url: str, client: redis.Redis, connection: Connection, name: str, loop: Hub
) -> None:
    put(redis_url, name, 1)
    messages = take(connection, name)
    messages[0].ack()
    began = time.monotonic()
    while any(noted(client, messages)) and time.monotonic() < began + 10:
        next(loop.loop) if loop.readers else loop.fire_timers()
    assert noted(client, messages) == [False]


def test_acknowledged_messages_are_not_restored_on_close(
    redis_url: str, client: redis.Redis, connection: Connection, name: str, loop: Hub
) -> None:
    put(redis_url, name, 1, 2)
    messages = take(connection, name)
    messages[0].ack()
    messages[0].channel.close()
    assert noted(client, messages) == [False, False]
    assert numbers(take(connection, name)) == [2], "what was not acknowledged is there again"


def test_a_failed_acknowledgement_is_a_warning(
    redis_url: str, connection: Connection, name: str, loop: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    put(redis_url, name, 1)
    (message,) = take(connection, name)
    message.ack()
    message.channel.qos._on_collect.cancel()
    client = connection.transport.client
    connection.transport.client = None
    message.channel.qos.settle()
    connection.transport.client = client
    assert "stay unacknowledged" in caplog.text


def test_workers_use_this_transport_and_flower_sees_a_broker_that_it_knows() -> None:
    settings = Settings(redis_url="redis://127.0.0.1:1/0", engine="fake", model="fake-model")
    assert isinstance(make_worker_app(settings).connection_for_read().transport, QueueTransport)
    assert make_app(settings).connection().as_uri().startswith("redis://")


# --- Connections that break before a message is acknowledged --------------------------------------


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
