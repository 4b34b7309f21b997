"""kombu's Redis transport with fewer round trips: takes several messages together and acknowledges
several together.

kombu needs three round trips for each message: to take it, to note it as unacknowledged, to
acknowledge it. Here the second also fetches more messages, as many as there is room for, and sends
the collected acknowledgements. kombu's data keeps its format. The same script notes the further
messages as unacknowledged. If an acknowledgement is late, or lost with its worker, the message is
delivered again, and the ledger then refuses it.

A message is delivered before it is noted: its task starts a round trip earlier. What is lost
between the two with its worker was always lost between taking and noting, and the reaper sends it
again.

This builds on private names of kombu 5.7 (pinned; a test checks that they exist). It doubles a
worker's throughput: docs/decisions/0013-transport.md.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.asynchronous import get_event_loop
from kombu.transport import redis as kombu_redis
from kombu.transport.virtual import base as kombu_virtual
from kombu.utils.json import dumps, loads
from redis.exceptions import ResponseError

from ..redis_service.availability import is_redis_unavailable

logger = logging.getLogger(__name__)

#: Maximum number of messages taken together: an idle worker cannot take messages that another
#: worker holds.
AT_ONCE = 8
#: Maximum number of seconds that acknowledgements wait to be sent with a message.
SETTLE_S = 0.02

#: Keys: kombu's index and hash of unacknowledged messages, the lists to take from, in order. Args:
#: now, tag of a message that was taken, the message as kombu notes it, how many more to take,
#: acknowledged tags. Returns the list and the text of each further message taken. ZREM comes first
#: because Redis at its memory limit serves BRPOP but refuses a script whose first write needs
#: memory; it does not refuse the writes that follow. A refusal would lose the message until the
#: reaper notices. The note is no larger than what ZREM frees.
TAKE = """
local now, tag, noted, room = unpack(ARGV, 1, 4)
redis.call('ZREM', KEYS[1], tag, unpack(ARGV, 5))
if #ARGV > 4 then
  redis.call('HDEL', KEYS[2], unpack(ARGV, 5))
end
redis.call('ZADD', KEYS[1], now, tag)
redis.call('HSET', KEYS[2], tag, noted)
local taken = {}
for at = 3, #KEYS do
  while #taken < 2 * room do
    local text = redis.call('RPOP', KEYS[at])
    if not text then
      break
    end
    local properties = cjson.decode(text).properties
    local info = properties.delivery_info
    redis.call('ZADD', KEYS[1], now, properties.delivery_tag)
    redis.call('HSET', KEYS[2], properties.delivery_tag,
      '[' .. text .. ',' .. cjson.encode(info.exchange) .. ','
        .. cjson.encode(info.routing_key) .. ']')
    taken[#taken + 1] = KEYS[at]
    taken[#taken + 1] = text
  end
end
return taken
"""


def is_closed(channel: Any) -> bool:
    """Return whether kombu has closed the connection of a channel; it clears `client` when it
    does.
    """
    return channel.connection is None or channel.connection.client is None


class QoS(kombu_redis.QoS):
    """Tracks a channel's delivered and acknowledged messages.

    Acknowledge on the thread of the event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._acknowledged: list[str] = []  # not yet sent to Redis
        self._settles = False  # a timer is set
        self._unnoted: Any = None  # the message that is being delivered

    def append(self, message: Any, delivery_tag: str) -> None:
        kombu_virtual.QoS.append(self, message, delivery_tag)
        if delivery_tag in self.channel.noted:
            return
        self._unnoted = message
        if not self.channel.taking:
            self.note()

    def note(self) -> None:
        """Note the message as unacknowledged that is being delivered, and take further ones."""
        if (message := self._unnoted) is None:
            return
        self._unnoted = None
        info = message.delivery_info
        acknowledged = self._acknowledged
        self._acknowledged = []
        self.channel.take_along(
            message.delivery_tag,
            dumps([message._raw, info["exchange"], info["routing_key"]]),
            acknowledged,
        )

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.note()
        super().reject(delivery_tag, requeue)

    def ack(self, delivery_tag: str) -> None:
        self.note()
        if (hub := get_event_loop()) is None:
            super().ack(delivery_tag)
            return
        if is_closed(self.channel):
            raise AttributeError("the connection is closed")  # as kombu itself does
        kombu_virtual.QoS.ack(self, delivery_tag)
        self._acknowledged.append(delivery_tag)
        if not self._settles:
            self._settles = True
            hub.call_later(SETTLE_S, self.settle)

    def settle(self) -> None:
        """Send acknowledgements to Redis; if this fails, the messages are delivered again."""
        self._settles = False
        tags = self._acknowledged
        self._acknowledged = []
        if not tags:
            return
        if is_closed(self.channel):
            logger.warning(
                "messages stay unacknowledged (count: %d); their connection is closed", len(tags)
            )
            return
        try:
            with self.pipe_or_acquire() as pipe:
                pipe.zrem(self.unacked_index_key, *tags).hdel(self.unacked_key, *tags).execute()
        except (*self.channel.connection_errors, ResponseError) as error:
            logger.warning(
                (
                    "messages stay unacknowledged (count: %d); Redis is unreachable or rejecting "
                    "writes: %s"
                ),
                len(tags),
                error,
            )

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Restore abandoned messages.

        If Redis refuses writes, kombu tries again in two seconds; the consumer logs the refusal.
        """
        try:
            super().restore_visible(*args, **kwargs)
        except ResponseError as error:
            if not is_redis_unavailable(error):
                raise
            logger.debug("cannot restore abandoned messages: %s", error)


class QueueChannel(kombu_redis.Channel):
    """kombu's channel, extended to take several messages together and to keep its client."""

    QoS = QoS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.noted: set[str] = set()  # tags of further messages taken, which are being delivered
        self.taking = False  # a message is being delivered, and will then be noted
        self._room = 0  # for further messages, while one is delivered
        self._along: list[bytes] = []
        self._kept: Any = None
        self._take: Any = None
        super().__init__(*args, **kwargs)

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        if client is None:
            if self._kept is None or self._kept.connection_pool is not self.pool:
                self._kept = self._create_client()
                self._take = self._kept.register_script(TAKE)
            client = self._kept
        yield client

    def take_along(self, tag: str, noted: str, acknowledged: list[str]) -> None:
        """Note a message as unacknowledged, and take as many further messages as there is room
        for.
        """
        lists = (
            [
                self._q_for_pri(queue, step)
                for step in self.priority_steps
                for queue in self.active_queues
            ]
            if self._room > 0
            else []
        )
        with self.conn_or_acquire() as client:
            keys = [self.unacked_index_key, self.unacked_key, *lists]
            self._along = self._take(
                keys, [time.time(), tag, noted, self._room, *acknowledged], client
            )
        self._room = 0

    def _brpop_read(self, **options: Any) -> Any:
        free = (
            AT_ONCE
            if (remaining := self.qos.can_consume_max_estimate()) is None
            else min(remaining, AT_ONCE)
        )
        self._room = 0 if self._closing else free - 1
        self._along = []
        self.taking = True
        try:
            result = super()._brpop_read(**options)
        finally:
            self.taking = False
            self.qos.note()
            self._room = 0
        along = self._along
        self._along = []
        for name, text in zip(along[::2], along[1::2], strict=True):
            message = loads(text.decode())
            tag = message["properties"]["delivery_tag"]
            self.noted.add(tag)
            try:
                self.connection._deliver(message, name.decode().rsplit(self.sep, 1)[0])
            finally:
                self.noted.discard(tag)
        return result

    def close(self) -> None:
        if self._qos is not None:
            self._qos.settle()  # otherwise acknowledged messages would be restored
        super().close()


class QueueTransport(kombu_redis.Transport):
    """The transport of workers and `callbacks`, named in their setting `broker_transport`."""

    Channel = QueueChannel


#: For Celery's setting `broker_transport`.
TRANSPORT = f"{__name__}:{QueueTransport.__name__}"
