"""Sender of committed receipts from an outbox to the relay: at least once, in order, across crashes
of either side.

One thread with one DEALER socket, connected to one relay. Without a connection it tries the next
relay that it knows: relays are stateless, so any of them continues where another one ended. After
every (re)connection it asks the relay for its mark, the number of the last receipt before the first
gap, and continues from there with at most `WINDOW` receipts under way; acknowledgements are
cumulative. Without progress it asks again. For receipts that the outbox no longer has, it sends a
frame LOST, and sends later receipts only after the relay has acknowledged that frame.
"""

import contextlib
import logging
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

import zmq

from ...schemas.base.records import to_msgpack
from ...schemas.base.version import __version__
from ...schemas.jobs.receipts import PROTOCOL, LostRange
from ...schemas.settings.faults import crash_point
from ..telemetry.logs import Complaints
from . import frames
from .curve import ClientKeys
from .frames import Frame, FrameError, FrameKind, ProtocolMismatch
from .outbox_store import OutboxError, PastEpoch, Store, unique_jobs

log = logging.getLogger(__name__)

#: Maximum number of receipts sent and not yet acknowledged.
WINDOW = 1024
#: Rows read from the database per query.
READ_ROWS = 256
#: Seconds without progress after which the relay is asked again; doubled each time.
PATIENCE_S = 2.0
#: The most of these seconds.
MAX_PATIENCE_S = 16.0
#: Seconds after a refusal until the next greeting: the relay may have been upgraded.
REFUSED_PAUSE_S = 30.0
#: Milliseconds between heartbeats.
HEARTBEAT_MS = 5_000
#: Milliseconds after which a connection without them counts as dead.
HEARTBEAT_TIMEOUT_MS = 15_000
#: Options of the sockets of sender and relay.
EITHER_SIDE = (
    (zmq.MAXMSGSIZE, frames.MAX_FRAME),
    (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
    (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
    (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
)
RECONNECT_MS = 50
RECONNECT_MAX_MS = 2_000
#: Seconds without a connection after which the next relay is tried, where several are known.
NEXT_RELAY_S = 2.0
#: Seconds between a failed handshake and the next: after some failures libzmq gives up, after
#: others it retries without a pause.
HANDSHAKE_PAUSE_S = 2.0
#: Seconds between two log lines with the same complaint about the handshake.
COMPLAIN_EVERY_S = 30.0

#: Event of a failed handshake → reason.
_FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (
        "it does not know this worker's public CURVE key {public} (curve_clients_dir of the relay)"
    ),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (
        "one side has CURVE keys and the other has none, or no relay is listening there{keyless}"
    ),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "it closed the connection during the handshake: curve_server_key may not be its public key"
    ),
}
#: Added to the message where this side has no keys.
_KEYLESS = (
    ". This worker has no key: set MIDSTREAM_CURVE_DIR to the relay's curve_dir "
    "(for `midstream up`: secrets/curve in its data directory), "
    "or create keys (midstream create curve)"
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
for _event in _FAILED:
    _EVENTS |= _event


class Phase(Enum):
    OFF = auto()  # no connection
    GREET = auto()  # a HELLO must be sent
    AWAIT_MARK = auto()  # HELLO was sent
    STREAM = auto()  # receipts are sent
    AWAIT_LOST = auto()  # LOST was sent, its ACK is awaited
    RENUMBER = auto()  # the writer is starting a new epoch
    REFUSED = auto()  # the relay rejects this sender's frames


class ReceiptSender(threading.Thread):
    """Sends what `store` holds up to the number last given to `committed`.

    It calls `acked(n)` when the relay has everything up to n; `forget(epoch)` when the relay knows
    the losses of an earlier epoch; `renumber()` to request `store.restart_epoch`, after which the
    caller calls `renumbered()`; `fatal(error)` when receipts cannot be delivered without help.
    """

    def __init__(
        self,
        store: Store,
        urls: Sequence[str],
        *,
        acked: Callable[[int], None],
        forget: Callable[[str], None],
        renumber: Callable[[], None],
        fatal: Callable[[Exception], None],
        curve: ClientKeys | None = None,
    ):
        super().__init__(name=f"receipts-{store.worker}-{store.rank}", daemon=True)
        self._store = store
        self._urls = urls
        self._place = 0  # index in `urls` of the current relay
        self._report_acked = acked
        self._forget = forget
        self._renumber = renumber
        self._fatal = fatal
        self._curve = curve
        self._identity = frames.routing_id(store.worker, store.rank, secrets.token_hex(4))
        self.past_epochs: list[PastEpoch] = store.past_epochs()
        self.connected = False
        self._phase = Phase.OFF
        self._committed = store.last
        self._acked = store.acked
        self._sent = store.acked
        # the highest number of this epoch that this process, or an earlier one, may have sent
        self._highest_sent = store.opened_at
        self._lost = LostRange(0, 0)  # last reported
        self._nonce = secrets.randbits(32)
        self._patience = PATIENCE_S
        self._deadline = math.inf
        self._retry_at = math.inf
        self._next_at = math.inf
        self._complaints = Complaints(COMPLAIN_EVERY_S)
        self._blocked = False
        self._stopping = False
        self._has_new_epoch = False
        self._refusals: set[str] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking = False

    # --- called by other threads

    def committed(self, last: int) -> None:
        """Allow sending everything up to `last`, which is durable."""
        self._committed = last
        self._wake()

    def renumbered(self, last: int) -> None:
        """Continue with the store's new epoch, whose last number is `last`."""
        self._committed = last
        self._has_new_epoch = True
        self._wake()

    def stop(self) -> None:
        """End the thread; receipts that are not acknowledged stay in the store."""
        self._stopping = True
        self._wake()
        if self.is_alive():
            self.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
                os.write(self._wake_write, b"w")

    # --- the thread

    @property
    def _url(self) -> str:
        return self._urls[self._place]

    def run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopping:
                self._try_relay(context)
                self._place = (self._place + 1) % len(self._urls)
        except Exception as error:
            log.exception("outbox %s: sending has stopped; receipts stay on disk", self._store.path)
            self._fatal(error)
        finally:
            context.term()

    def _try_relay(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Send to the current relay, until the next one should be tried."""
        socket = context.socket(zmq.DEALER)
        monitor = None
        try:
            for option, value in (
                (zmq.ROUTING_ID, self._identity),
                (zmq.IMMEDIATE, 1),
                (zmq.LINGER, 0),
                (zmq.SNDHWM, WINDOW),
                (zmq.RCVHWM, WINDOW),
                *EITHER_SIDE,
                (zmq.RECONNECT_IVL, RECONNECT_MS),
                (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            ):
                socket.setsockopt(option, value)
            if self._curve is not None:
                self._curve.apply(socket)
            monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(self._url)
            self._note_connection(False)
            self._serve(socket, monitor)
        finally:
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(linger=0)
            socket.close(linger=0)
            self._retry_at = float("inf")
            self._note_connection(False)
            self._enter(Phase.OFF)

    def _note_connection(self, connected: bool) -> None:
        """Record whether there is a connection; without one, the next relay is tried after
        `NEXT_RELAY_S`.
        """
        self.connected = connected
        if connected or len(self._urls) == 1:
            self._next_at = float("inf")
        elif self._next_at == float("inf"):
            self._next_at = time.monotonic() + NEXT_RELAY_S

    def _serve(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._stopping:
            self._blocked = False
            self._advance(socket)
            # Without a connection there is no pipe, so POLLOUT does not spin.
            poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if self._blocked else 0))
            wait = min(self._deadline, self._retry_at, self._next_at) - time.monotonic()
            ready = dict(
                poller.poll(None if wait == float("inf") else max(0, int(wait * 1000) + 1))
            )
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._waking = False  # before the state is read: a later change wakes again
            if monitor in ready:
                self._watch_connection(socket, monitor)
            if ready.get(socket, 0) & zmq.POLLIN:
                self._receive(socket)
            if time.monotonic() >= self._deadline:
                self._ask_again()
            if time.monotonic() >= self._next_at:
                self._next_at = float("inf")
                if self._complaints.due("next"):
                    log.warning(
                        "outbox %s: no connection to the relay at %s; trying the next one",
                        self._store.path,
                        self._url,
                    )
                return
            if time.monotonic() >= self._retry_at:
                self._retry_at = float("inf")
                socket.connect(self._url)

    def _watch_connection(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                message = monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event: int = struct.unpack("=HI", message[0])[0]
            self._note_connection(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            if self.connected:
                self._patience = PATIENCE_S
                self._enter(Phase.GREET)
            elif event in _FAILED:
                self._on_failed_handshake(socket, event)
            elif self._phase is not Phase.OFF:
                log.warning(
                    "outbox %s: connection to the relay at %s lost; receipts waiting: %d",
                    self._store.path,
                    self._url,
                    self._committed - self._acked,
                )
                self._enter(Phase.OFF)

    def _on_failed_handshake(self, socket: "zmq.Socket[bytes]", event: int) -> None:
        """Log that the peer answers but the handshake fails, and retry later: the cause may have
        been fixed.
        """
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._curve is None:
            # the peer noticed first that only one side has keys
            event = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        if self._complaints.due(event):
            public, keyless = (self._curve.public, "") if self._curve else ("", _KEYLESS)
            why = _FAILED[event].format(public=public, keyless=keyless)
            log.error(
                "outbox %s: rejected by the relay at %s (receipts waiting: %d): %s",
                self._store.path,
                self._url,
                self._committed - self._acked,
                why,
            )
        if self._retry_at == float("inf"):
            with contextlib.suppress(zmq.ZMQError):  # libzmq has forgotten the address already
                socket.disconnect(self._url)
            self._retry_at = time.monotonic() + HANDSHAKE_PAUSE_S
        if self._phase is not Phase.OFF:
            self._enter(Phase.OFF)

    def _enter(self, phase: Phase) -> None:
        if self._phase is Phase.RENUMBER and not self._has_new_epoch:
            return  # the writer is changing the epoch; the connection is checked afterwards
        self._phase = phase
        waits = phase in (Phase.AWAIT_MARK, Phase.AWAIT_LOST) or (
            phase is Phase.STREAM and self._sent > self._acked
        )
        if phase is Phase.REFUSED:
            self._deadline = time.monotonic() + REFUSED_PAUSE_S
        else:
            self._deadline = time.monotonic() + self._patience if waits else float("inf")

    def _ask_again(self) -> None:
        """Greet again, since there is no progress: frames or the relay may be lost, or its Redis
        unreachable.
        """
        self._patience = min(2 * self._patience, MAX_PATIENCE_S)
        self._enter(Phase.GREET)

    # --- sending

    @property
    def _epoch(self) -> str:
        """The epoch that is being sent: past ones first."""
        return self.past_epochs[0].epoch if self.past_epochs else self._store.epoch

    def _advance(self, socket: "zmq.Socket[bytes]") -> None:
        if self._phase is Phase.RENUMBER and self._has_new_epoch:
            self._acked = self._sent = self._highest_sent = 0
            self._enter(Phase.GREET if self.connected else Phase.OFF)
        if self._phase is Phase.GREET:
            self._nonce = (self._nonce + 1) % 2**32
            hello = frames.Hello(__version__, os.getpid(), self._committed - self._acked)
            if self._send(socket, FrameKind.HELLO, self._nonce, to_msgpack(hello)):
                self._enter(Phase.AWAIT_MARK)
        elif self._phase is Phase.STREAM:
            self._stream(socket)

    def _stream(self, socket: "zmq.Socket[bytes]") -> None:
        idle = self._sent == self._acked
        while self._sent < self._committed and (room := WINDOW - (self._sent - self._acked)) > 0:
            if not (rows := self._store.read(self._sent, min(room, READ_ROWS))):
                self._report_missing(socket, self._committed)
                return
            for row in rows:
                if row.seq != self._sent + 1:
                    self._report_missing(socket, row.seq - 1)
                    return
                if row.payload is None:
                    self._report_missing(socket, row.seq)
                    return
                if not self._send(socket, FrameKind.RECEIPT, row.seq, row.payload):
                    return
                crash_point("receipt.sent")
                self._sent = row.seq
                self._highest_sent = max(self._highest_sent, row.seq)
                if idle:
                    idle = False
                    self._enter(Phase.STREAM)  # starts the clock: a receipt is under way

    def _report_missing(self, socket: "zmq.Socket[bytes]", last: int) -> None:
        """Report `sent + 1 … last` as lost, once everything before them is acknowledged."""
        # The relay ignores a range beyond a gap, which receipts under way may still leave.
        if self._acked == self._sent:
            first = self._sent + 1
            jobs = self._store.jobs_of(first, last)
            self._report_lost(
                socket,
                LostRange(
                    first,
                    last,
                    jobs,
                    f"receipts {first} to {last} are missing from {self._store.path}",
                ),
            )

    def _report_lost(self, socket: "zmq.Socket[bytes]", lost: LostRange) -> None:
        if self._send(socket, FrameKind.LOST, lost.last, to_msgpack(lost)):
            log.error(
                "outbox %s: receipts lost: %d (jobs %s): %s",
                self._store.path,
                lost.last - lost.first + 1,
                lost.jobs,
                lost.message,
            )
            self._lost = lost
            self._enter(Phase.AWAIT_LOST)

    def _send(self, socket: "zmq.Socket[bytes]", kind: FrameKind, seq: int, payload: bytes) -> bool:
        try:
            socket.send(frames.pack(kind, self._epoch, seq, payload), zmq.DONTWAIT)
        except zmq.Again:
            self._blocked = True
            return False
        return True

    # --- receiving

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                raw = socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                frame = frames.unpack(raw)
                if frame.kind is FrameKind.REFUSED:
                    self._refused(frames.refusal(frame).reason, frames.refusal(frame).detail)
                elif frame.epoch != self._epoch:
                    continue  # a late answer about another epoch
                elif frame.kind is FrameKind.MARK:
                    self._on_mark(socket, frame)
                elif frame.kind is FrameKind.ACK:
                    self._on_ack(frame)
            except ProtocolMismatch as error:
                self._refused("protocol", error.refusal.detail if error.refusal else str(error))
            except FrameError as error:
                self._refused(
                    "malformed", f"cannot read the response from the relay at {self._url}: {error}"
                )

    def _on_mark(self, socket: "zmq.Socket[bytes]", frame: Frame) -> None:
        # The nonce tells a late answer from this one: it must not rewind the stream.
        if self._phase is not Phase.AWAIT_MARK or frame.payload != to_msgpack(self._nonce):
            return
        mark = frame.seq
        if self.past_epochs:
            past = self.past_epochs[0]
            if mark >= past.last:
                self._close_past_epoch()
                return
            jobs = unique_jobs(past.jobs, mark + 1, past.last)
            self._report_lost(
                socket,
                LostRange(
                    mark + 1,
                    past.last,
                    jobs,
                    f"the outbox of rank {self._store.rank} was damaged",
                ),
            )
        elif mark > self._highest_sent:
            log.error(
                (
                    "outbox %s was restored to an older state: the relay has receipts up to %d, "
                    "but the outbox ends at %d; a new epoch starts"
                ),
                self._store.path,
                mark,
                self._highest_sent,
            )
            self._has_new_epoch = False
            self._enter(Phase.RENUMBER)
            self._renumber()
        else:
            self._sent = mark
            self._progress(mark)
            self._enter(Phase.STREAM)

    def _on_ack(self, frame: Frame) -> None:
        if self._phase is Phase.AWAIT_LOST and frame.seq >= self._lost.last:
            if self.past_epochs:
                self._close_past_epoch()
                return
            self._sent = frame.seq
            self._highest_sent = max(self._highest_sent, frame.seq)
            self._progress(frame.seq)
            self._enter(Phase.STREAM)
        elif self._phase is Phase.STREAM and self._acked < frame.seq <= self._sent:
            self._progress(frame.seq)
            self._enter(Phase.STREAM)

    def _progress(self, acked: int) -> None:
        self._patience = PATIENCE_S
        self._acked = acked
        self._report_acked(acked)

    def _close_past_epoch(self) -> None:
        self._forget(self.past_epochs.pop(0).epoch)
        self._report_acked(self._acked)
        self._enter(Phase.GREET)

    def _refused(self, reason: str, detail: str) -> None:
        if reason not in self._refusals:
            self._refusals.add(reason)
            log.error(
                "outbox %s (relay protocol %d, midstream %s): rejected by the relay: %s",
                self._store.path,
                PROTOCOL,
                __version__,
                detail,
            )
            self._fatal(
                OutboxError("internal", f"the relay at {self._url} rejects receipts: {detail}")
            )
        self._enter(Phase.REFUSED)
