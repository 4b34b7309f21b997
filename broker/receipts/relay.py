"""The relay: commits receipts of all ranks to Redis and acknowledges them.

`python -m midstream.broker.relay`: one ROUTER socket and one thread. It reads the frames that have
arrived, commits them to the ledger in groups of one outbox epoch each, and acknowledges what is
written. It is stateless: killed at any moment, it loses nothing, because the outboxes resend what
was not acknowledged.
"""

import gc
import json
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import msgspec
import redis
import redis.backoff
import redis.retry
import zmq
from redis.exceptions import NoScriptError

from ...schemas.base.errors import Translated
from ...schemas.base.records import from_msgpack, to_msgpack
from ...schemas.base.version import __version__
from ...schemas.jobs.captures import path_fault
from ...schemas.jobs.receipts import LostRange, NumberedReceipt, receipt_decoder
from ...schemas.settings import faults
from ...schemas.settings.faults import crash_point
from ...schemas.settings.settings import Settings, SettingsError, load_settings
from ..ledger.core.aof_barrier import PATIENCE_S, PAUSE_S, Barrier
from ..ledger.jobs.settlement import Settler, mark_key
from ..processes.liveness import RELAY_ALIVE_S, RELAY_BEAT_S, RELAY_KEY
from ..redis_service import durability as redis_durability, opening as redis_open
from ..telemetry import logs, metrics, start as observability
from . import frames
from .curve import ServerKeys, server_keys
from .frames import Frame, FrameError, FrameKind, ProtocolMismatch
from .sender import EITHER_SIDE

log = logging.getLogger(__name__)

#: Maximum number of frames read from the socket before they are committed.
BATCH = 2048
#: New objects after which Python collects garbage: more than a full batch makes. Receipts have no
#: cycles, and with Python's default (700) the collections took a third of the relay's time.
GC_OBJECTS = 100_000
#: Seconds between the first two attempts to reach Redis.
RETRY_S = 0.1
#: The longest pause between two.
MAX_RETRY_S = 2.0
#: Seconds after SIGTERM for which frames that have arrived are still committed.
DRAIN_S = 3.0
#: Seconds between two log lines with the same complaint about the same peer.
COMPLAIN_EVERY_S = 10.0
LOOPBACK = {"127.0.0.1", "::1", "localhost"}

#: One outbox epoch, whose receipts are committed in order.
OutboxEpoch = tuple[str, int, str]  # worker, rank, epoch


class ImpostorError(FrameError):
    """A sender identifies as a worker that its key does not belong to."""


class FrameBatch:
    """The frames of one turn, grouped by kind and stream."""

    def __init__(self) -> None:
        self.receipts: defaultdict[OutboxEpoch, list[NumberedReceipt]] = defaultdict(list)
        self.losses: list[tuple[OutboxEpoch, LostRange]] = []
        self.peers: dict[
            OutboxEpoch, bytes
        ] = {}  # where answers go: the latest sender of the stream
        self.greetings: dict[OutboxEpoch, int] = {}  # the latest nonce

    def add(self, identity: bytes, frame: Frame) -> None:
        """Add a frame. Raises FrameError if it makes no sense from this peer."""
        worker, rank = frames.peer_of(identity)
        stream = (worker, rank, frame.epoch)
        if frame.kind is FrameKind.RECEIPT:
            with _readable("receipt"):
                receipt = receipt_decoder.decode(frame.payload)
            if (receipt.worker, receipt.rank) != (worker, rank):
                raise FrameError(
                    f"receipt {frame.seq} names worker {receipt.worker!r} rank {receipt.rank}, "
                    "which is not its sender"
                )
            for file in receipt.files:
                if fault := path_fault(file.path, receipt.job):
                    raise FrameError(f"receipt {frame.seq}: {fault}")
            self.receipts[stream].append((frame.seq, receipt))
        elif frame.kind is FrameKind.HELLO:
            self.greetings[stream] = frame.seq
        elif frame.kind is FrameKind.LOST:
            with _readable("LOST range"):
                self.losses.append((stream, from_msgpack(frame.payload, LostRange)))
        else:
            raise FrameError(f"only the relay sends {frame.kind.name}")
        self.peers[stream] = identity


class Relay:
    """Serves outboxes on `relay_url` until `stop`."""

    def __init__(
        self,
        settler: Settler,
        settings: Settings,
        redis_client: "redis.Redis | None" = None,
        curve: ServerKeys | None = None,
    ):
        """Bind immediately; port 0 or `*` takes a free port, see `endpoint`.

        Raises SettingsError if `relay_url` is not an address, is off loopback without `curve` or
        `relay_allow_remote`, or is in use.
        """
        self._settler = settler
        self._settings = settings
        self._redis = redis_client
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._known = curve.clients if curve is not None else None
        self._authenticator = (
            curve.guard(self._context, self._socket) if curve is not None else None
        )
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.LINGER, 500),
            (zmq.SNDHWM, BATCH),
            (zmq.RCVHWM, BATCH),
            *EITHER_SIDE,
        ):
            self._socket.setsockopt(option, value)
        try:
            allow_remote = settings.relay_allow_remote or curve is not None
            self._socket.bind(bind_address(settings.relay_url, allow_remote))
        except zmq.ZMQError as error:
            self._close()
            raise SettingsError(
                f"relay_url={settings.relay_url!r}: cannot listen there: {error}"
            ) from error
        except BaseException:
            self._close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.received = 0  # number of receipts read from the socket
        self._stopping = False
        self._closed = False
        self._gave_up = False  # Redis was unreachable while stopping
        self._started = time.time()
        self._next_beat = 0.0
        self._complaints = logs.Complaints(COMPLAIN_EVERY_S)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def stop(self) -> None:
        """Commit the frames that have arrived, then end; from any thread or a signal handler."""
        self._stopping = True
        if not self._closed:
            os.write(self._wake_write, b"s")

    def serve(self) -> None:
        """Run until `stop`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(self._beat())
                if batch := self._read_batch():
                    self._commit(batch)
            deadline = time.monotonic() + DRAIN_S
            while time.monotonic() < deadline and (batch := self._read_batch()):
                self._commit(batch)
        finally:
            self._closed = True
            self._close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _close(self) -> None:
        self._socket.close()  # its LINGER lets the last acknowledgements leave
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    # --- receiving

    def _read_batch(self) -> FrameBatch | None:
        """Return the frames that have arrived, up to `BATCH`; None: no frame."""
        batch = FrameBatch()
        count = 0
        while count < BATCH:
            try:
                message, key = self._receive()
            except zmq.Again:
                break
            count += 1
            identity = message[0]
            raw = message[1] if len(message) == 2 else b""
            try:
                if len(message) != 2:
                    raise FrameError(
                        f"a message must have one part; this one has {len(message) - 1}"
                    )
                frame = frames.unpack(raw)
                self._check_key(identity, key)
                batch.add(identity, frame)
                if frame.kind is FrameKind.RECEIPT:
                    self.received += 1
            except ProtocolMismatch as error:
                self._refuse(identity, raw, "protocol", f"upgrade the older one; {error}")
            except ImpostorError as error:
                self._refuse(identity, raw, "identity", str(error))
            except FrameError as error:
                self._refuse(identity, raw, "malformed", str(error))
        return batch if count else None

    def _receive(self) -> tuple[list[bytes], str]:
        """Return a message and the public key of its connection; raise `zmq.Again` if there is no
        message.
        """
        if self._known is None:
            return self._socket.recv_multipart(zmq.DONTWAIT), ""
        parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        return [part.bytes for part in parts], str(parts[-1].get("User-Id"))

    def _check_key(self, identity: bytes, key: str) -> None:
        """Raise ImpostorError if the sender's key is not the key of the worker that it names."""
        if self._known is None:
            return
        worker, _ = frames.peer_of(identity)
        known = self._known.key_of(worker)
        if known != key:
            reason = "has no key here" if known is None else "has a different key"
            raise ImpostorError(
                f"the sender with CURVE key {key} identifies as worker {worker!r}, which {reason}"
            )

    def _refuse(self, identity: bytes, raw: bytes, reason: str, detail: str) -> None:
        metrics.REFUSED_FRAMES.labels(reason).inc()
        answer = frames.refuse(raw, reason, detail)
        self._complain(
            f"{identity!r} {reason}",
            "rejected a frame of %r: %s",
            identity,
            frames.refusal(frames.unpack(answer)).detail,
        )
        self._send(identity, answer)

    # --- committing and answering

    def _commit(self, batch: FrameBatch) -> None:
        """Commit the batch to Redis, and answer once Redis has written it to its log.

        While Redis is unreachable, no frames are read: the outboxes keep their receipts. A stream
        that Redis refuses is left unanswered, so that its outbox sends it again later; the others
        continue.
        """
        marks: dict[OutboxEpoch, int] = {}
        answers: list[tuple[OutboxEpoch, FrameKind, bytes]] = []

        def commit(
            stream: OutboxEpoch, call: Callable[[], int], kind: FrameKind, payload: bytes = b""
        ) -> None:
            if (mark := self._settled(stream, call)) is not None:
                marks[stream] = mark
                answers.append((stream, kind, payload))

        for stream, receipts in batch.receipts.items():
            crash_point("relay.received")
            commit(stream, partial(self._settler.settle, *stream, receipts), FrameKind.ACK)
            crash_point("relay.committed")
        for stream, lost in batch.losses:
            commit(stream, partial(self._settler.lost, *stream, lost), FrameKind.ACK)
        for stream, nonce in batch.greetings.items():
            commit(stream, partial(self._settler.mark, *stream), FrameKind.MARK, to_msgpack(nonce))
        if self._redis is not None and marks:
            marks = self._written(self._redis, list(marks))
        for stream, kind, payload in answers:
            if stream in marks:
                self._send(
                    batch.peers[stream], frames.pack(kind, stream[2], marks[stream], payload)
                )

    def _written(self, client: "redis.Redis", streams: list[OutboxEpoch]) -> dict[OutboxEpoch, int]:
        """Return the streams' marks once Redis has written them to its log: a Redis killed earlier
        would have lost them.

        They are read again on the connection that confirms the write, because Redis may have
        restarted since, or another taken over. Empty if Redis is unreachable or cannot write: no
        outbox is answered then, and each asks again.
        """
        deadline = time.monotonic() + PATIENCE_S
        barrier = Barrier(self._settings.redis_replicas, self._settings.redis_allow_lossy)
        try:
            while True:
                with client.pipeline(transaction=False) as pipe:
                    pipe.mget([mark_key(*stream) for stream in streams])
                    barrier.ask(pipe)
                    result, *answers = pipe.execute()
                if barrier.passed(*answers):
                    return {
                        stream: int(mark or 0) for stream, mark in zip(streams, result, strict=True)
                    }
                if self._stopping or time.monotonic() >= deadline:
                    self._complain(
                        "written",
                        (
                            "Redis cannot write its log, or has too few replicas; receipts stay "
                            "unacknowledged"
                        ),
                    )
                    self._reopen()
                    return {}
                time.sleep(PAUSE_S)
        except (redis.RedisError, OSError) as error:
            self._complain("redis", "Redis is unreachable; receipts stay unacknowledged: %s", error)
            return {}

    def _settled(self, stream: OutboxEpoch, call: Callable[[], int]) -> int | None:
        """Return the mark from `call`, retried while Redis is unreachable; None if Redis refuses,
        or when stopping without Redis.
        """
        pause = RETRY_S
        while not self._gave_up:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError, NoScriptError, OSError) as error:
                if self._stopping:
                    self._gave_up = True
                    log.warning(
                        "stopping without Redis (%s): receipts stay in their outboxes", error
                    )
                    break
                self._complain(
                    "redis", "Redis is unreachable; receipts stay unacknowledged: %s", error
                )
                self._pause(pause)
                pause = min(2 * pause, MAX_RETRY_S)
            except redis.RedisError as error:
                self._reopen()
                self._complain(
                    f"{stream} redis",
                    "Redis rejects receipts of worker %s rank %d: %s",
                    *stream[:2],
                    error,
                )
                break
            except Exception:
                # One stream that cannot be settled must not stop the others; its outbox keeps the
                # receipts and asks again.
                log.exception("cannot settle receipts of worker %s rank %d", *stream[:2])
                break
        return None

    def _reopen(self) -> None:
        """Drop the connections, so that the next command connects again: the address may lead to
        another Redis now.
        """
        if self._redis is not None:
            self._redis.connection_pool.disconnect()

    def _pause(self, seconds: float) -> None:
        """Sleep until `stop` at most."""
        if not self._stopping:
            poller = zmq.Poller()
            poller.register(self._wake_read, zmq.POLLIN)
            poller.poll(int(seconds * 1000))

    def _send(self, identity: bytes, raw: bytes) -> None:
        try:
            self._socket.send_multipart([identity, raw], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # The peer is gone or not reading. Marks are cumulative and requested again, so an
            # answer may be dropped.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.debug("no answer to %r: %s", identity, error)

    # --- reporting

    def _beat(self) -> int:
        """Renew the heartbeat if it is due; return milliseconds until the next."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + RELAY_BEAT_S
            if self._redis is not None:
                beat = {
                    "url": self.endpoint,
                    "pid": os.getpid(),
                    "version": __version__,
                    "received": self.received,
                }
                try:
                    previous = cast("bytes | None", self._redis.get(RELAY_KEY))
                    since = json.loads(previous).get("since", 0.0) if previous else time.time()
                    beat["since"] = max(since, self._started)
                    self._redis.set(RELAY_KEY, json.dumps(beat), ex=RELAY_ALIVE_S)
                except (redis.RedisError, OSError) as error:
                    self._reopen()
                    self._complain("beat", "cannot write the heartbeat to Redis: %s", error)
        return max(1, int((self._next_beat - time.monotonic()) * 1000))

    def _complain(self, about: str, text: str, *values: object) -> None:
        if self._complaints.due(about):
            log.error(text, *values)


def bind_address(url: str, allow_remote: bool) -> str:
    """Return `url` as ZeroMQ binds it; raise SettingsError if it may not be bound."""
    if not url:
        return "tcp://127.0.0.1:*"
    if url.startswith("ipc://"):
        return url
    if "," in url:
        raise SettingsError(
            f"relay_url={url!r} lists several relays, as ranks take it: give each relay its "
            "own address"
        )
    with Translated(ValueError, lambda error: SettingsError(f"relay_url={url!r}: {error}")):
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = "*" if parts.netloc.endswith(":*") else parts.port or "*"
    if parts.scheme != "tcp" or not host:
        raise SettingsError(f"relay_url={url!r} is not an address such as tcp://127.0.0.1:5557")
    if host not in LOOPBACK and not allow_remote:
        raise SettingsError(
            f"relay_url={url!r} is not loopback, and the relay would accept receipts from "
            "anyone: give relay and workers keys "
            "(midstream create curve), bind 127.0.0.1, or set "
            "MIDSTREAM_RELAY_ALLOW_REMOTE=true on a trusted network"
        )
    if host == "localhost":
        host = "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect_redis(url: str) -> "redis.Redis":
    """Return a client that fails fast: the relay retries by its own rules."""
    return redis_open.client(
        url,
        socket_timeout=10,
        socket_connect_timeout=2,
        retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    )


def _readable(what: str) -> Translated[msgspec.DecodeError]:
    """Return a context in which a payload is decoded."""
    return Translated(
        msgspec.DecodeError,
        lambda error: FrameError(f"its {what} cannot be read by midstream {__version__}: {error}"),
    )


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; prints `relay ready <endpoint>` once it listens.

    Raises SettingsError.
    """
    if not settings.redis_url:
        raise SettingsError("redis_url (MIDSTREAM_REDIS_URL) is empty: the relay requires Redis")
    redis_durability.require(settings)
    faults.arm(settings.fault, settings.data_dir)
    gc.freeze()  # existing objects stay: collections need not search them
    gc.set_threshold(GC_OBJECTS)
    client = connect_redis(settings.redis_url)
    relay = Relay(Settler(client, settings), settings, client, server_keys(settings))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: relay.stop())
    logs.announce(f"relay ready {relay.endpoint}")
    relay.serve()
    log.info("relay stopped; receipts accepted: %d", relay.received)


def main() -> int:
    try:
        settings = load_settings()
        observability.start(settings, "relay")
        run(settings)
    except SettingsError as error:
        print(f"relay: {error}", file=sys.stderr)
        return 2
    return 0
