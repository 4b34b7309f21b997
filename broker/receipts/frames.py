"""Frames of the protocol between a rank's outbox and the relay, byte for byte.

One ZeroMQ message is one frame, laid out as `[version u8, kind u8, epoch 16 bytes, seq u64be,
payload]`; the payload is MessagePack. The sender's routing id names its worker and rank, so the
relay keeps no state about peers.

| kind | from | seq | payload |
|---|---|---|---|
| HELLO | outbox | a nonce | `Hello` |
| MARK | relay | last contiguous seq committed | the nonce that it answers |
| RECEIPT | outbox | its number, from 1, without gaps | `schemas.jobs.receipts.Receipt` |
| LOST | outbox | last of the range | `schemas.jobs.receipts.LostRange` |
| ACK | relay | last contiguous seq committed | empty |
| REFUSED | relay | seq of the frame refused | `Refusal` |

Frozen in every version: byte 0 is the version, byte 1 the kind, REFUSED is 6, and its payload
starts at byte 26. So two sides that share nothing else can still exchange their versions.
"""

import uuid
from enum import IntEnum
from typing import NamedTuple

import msgspec

from ...schemas.base.errors import Translated
from ...schemas.base.records import Wire, from_msgpack, to_msgpack
from ...schemas.base.version import __version__
from ...schemas.jobs.receipts import PROTOCOL

EPOCH_BYTES = 16
HEADER_BYTES = 2 + EPOCH_BYTES + 8
NO_EPOCH = "0" * 32

#: The largest frame that is accepted, in bytes: a receipt with all rows that `memory_limit_kib`
#: allows, and lists of dropped positions. ZeroMQ closes a connection that announces a larger frame
#: before it reserves memory for the frame.
MAX_FRAME = 64 << 20

#: ZeroMQ allows 255 bytes in a routing id; this leaves room for the rank and the instance.
MAX_WORKER_BYTES = 200


class FrameKind(IntEnum):
    HELLO = 1  # "where do I continue from?"
    MARK = 2  # the answer
    RECEIPT = 3
    ACK = 4  # cumulative: everything up to seq is committed
    LOST = 5  # "I no longer have these"
    REFUSED = 6  # "I cannot take this, because"; never renumbered


class Hello(Wire):
    """Greeting of a sender, for the relay's log."""

    version: str  # Midstream's
    pid: int
    held: int  # number of receipts that wait in the outbox


class Refusal(Wire):
    """Reason why the relay refused a frame.

    New fields go at the end; every version decodes what it knows.
    """

    reason: str  # protocol | malformed | identity
    detail: str
    protocol: int  # the relay's
    version: str  # Midstream's, on the relay
    peer_protocol: int  # as the relay read it


class Frame(NamedTuple):
    kind: FrameKind
    epoch: str  # 32 hex digits
    seq: int
    payload: bytes


class FrameError(ValueError):
    """The bytes are not a valid frame."""


class ProtocolMismatch(FrameError):
    """The other side speaks another version of the protocol."""

    def __init__(self, foreign: int, refusal: Refusal | None = None):
        super().__init__(
            f"the peer uses relay protocol {foreign}, but this side uses {PROTOCOL} "
            f"(midstream {__version__})"
        )
        self.refusal = refusal  # if the frame was one


# One message is one frame, since several parts would take more objects for each receipt on both
# sides.
_PREFIX = {kind: bytes([PROTOCOL, kind]) for kind in FrameKind}


def pack(kind: FrameKind, epoch: str, seq: int, payload: bytes = b"") -> bytes:
    """Return one frame. `epoch`: 32 hex digits; `seq`: 0 to 2**64 − 1."""
    return _PREFIX[kind] + bytes.fromhex(epoch) + seq.to_bytes(8, "big") + payload


def unpack(raw: bytes) -> Frame:
    """Return the frame in `raw`.

    Raises `ProtocolMismatch` for a frame of another version (with its `Refusal`, if it is one),
    `FrameError` for anything else that is not a frame.
    """
    if len(raw) >= 2 and raw[0] != PROTOCOL:
        raise ProtocolMismatch(raw[0], _refusal_of_any_version(raw))
    if len(raw) < HEADER_BYTES:
        raise FrameError(
            f"{len(raw)} bytes are too few for a frame, whose header has {HEADER_BYTES}"
        )
    try:
        kind = FrameKind(raw[1])
    except ValueError:
        raise FrameError(
            f"unknown kind {raw[1]}; valid: {', '.join(f'{k.value} {k.name}' for k in FrameKind)}"
        ) from None
    return Frame(
        kind,
        raw[2 : 2 + EPOCH_BYTES].hex(),
        int.from_bytes(raw[2 + EPOCH_BYTES : HEADER_BYTES], "big"),
        raw[HEADER_BYTES:],
    )


def refuse(raw: bytes, reason: str, detail: str) -> bytes:
    """Return a REFUSED frame that answers `raw`, which may be any bytes."""
    peer = raw[0] if raw else 0
    if reason == "protocol":
        detail = (
            f"the relay uses protocol {PROTOCOL} (midstream {__version__}), but the sender "
            f"uses {peer}: {detail}"
        )
    seq = (
        int.from_bytes(raw[2 + EPOCH_BYTES : HEADER_BYTES], "big")
        if len(raw) >= HEADER_BYTES
        else 0
    )
    refusal = Refusal(reason, detail, PROTOCOL, __version__, peer)
    return pack(FrameKind.REFUSED, NO_EPOCH, seq, to_msgpack(refusal))


def refusal(frame: Frame) -> Refusal:
    """Return the content of a REFUSED frame; raises `FrameError` when it cannot be read."""
    with Translated(
        msgspec.DecodeError,
        lambda error: FrameError(f"the relay sent a refusal whose reason cannot be read: {error}"),
    ):
        return from_msgpack(frame.payload, Refusal)


def _refusal_of_any_version(raw: bytes) -> Refusal | None:
    if raw[1] != FrameKind.REFUSED:
        return None
    try:
        return from_msgpack(raw[HEADER_BYTES:], Refusal)
    except msgspec.DecodeError:
        return None  # the version byte alone is enough to name both versions


def new_epoch() -> str:
    """Return 32 hex digits, never used before."""
    return uuid.uuid4().hex


def routing_id(worker: str, rank: int, instance: str) -> bytes:
    """Return the ZeroMQ routing id of an outbox: `worker/rank/instance`, where `instance` differs
    for every opening of an outbox.

    Raises ValueError when the worker's name is too long for it.
    """
    if not worker or len(worker.encode()) > MAX_WORKER_BYTES:
        raise ValueError(
            f"worker {worker!r}: a worker's name must have 1 to {MAX_WORKER_BYTES} bytes"
        )
    return f"{worker}/{rank}/{instance}".encode()


def peer_of(identity: bytes) -> tuple[str, int]:
    """Return `(worker, rank)` of a routing id; raise `FrameError` if it has another form."""
    # UnicodeDecodeError is one
    with Translated(
        ValueError, lambda _: FrameError(f"routing id {identity!r} is not worker/rank/instance")
    ):
        worker, rank, _instance = identity.decode().rsplit("/", 2)
        return worker, int(rank)
