"""Does what is no frame between outbox and relay, or one of another version, get a readable answer?

test_wire_golden.py holds the bytes of each kind.
"""

import msgspec
import pytest
from hypothesis import given, strategies as st

from midstream import __version__
from midstream.broker.receipts import frames
from midstream.broker.receipts.frames import FrameError, FrameKind, ProtocolMismatch
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.receipts import PROTOCOL, CapturedFile, Receipt, receipt_decoder

EPOCH = "00112233445566778899aabbccddeeff"
RECEIPT = Receipt(
    "0.1.0",
    "w",
    "b",
    "job_1",
    request=2,
    attempt=1,
    rank=0,
    world=1,
    tp=0,
    pp=0,
    step=7,
    actions=3,
    checksum="00000000deadbeef",
    status="ok",
    applied=5,
    files=[CapturedFile("t/j/p.safetensors", 10, 99, rows=4, layers=[1, 2], positions=2)],
)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_frame_error(raw: bytes) -> None:
    try:
        assert isinstance(frames.unpack(raw).kind, FrameKind)
    except FrameError:
        assert frames.unpack(frames.refuse(raw, "malformed", "why")).kind is FrameKind.REFUSED


# field case 43
@pytest.mark.parametrize("theirs", [0, 2, 255])
def test_a_frame_of_another_version_names_both_versions(theirs: int) -> None:
    raw = bytes([theirs]) + frames.pack(FrameKind.RECEIPT, EPOCH, 1, b"anything")[1:]
    with pytest.raises(
        ProtocolMismatch,
        match=rf"protocol {theirs}\b.* this side uses {PROTOCOL} \(midstream {__version__}\)",
    ):
        frames.unpack(raw)


# field case 43
def test_a_refusal_names_both_versions() -> None:
    told = frames.refusal(
        frames.unpack(
            frames.refuse(b"\x09\x03rest in an unknown layout", "protocol", "upgrade the older one")
        )
    )
    assert told.protocol == PROTOCOL
    assert told.peer_protocol == 9
    assert told.version == __version__
    assert (
        f"uses protocol {PROTOCOL} (midstream {__version__}), but the sender uses 9" in told.detail
    )


# field case 43
def test_a_refusal_of_a_later_version_is_still_readable() -> None:
    ours = frames.refuse(b"\x01\x03", "protocol", "too old")
    with pytest.raises(ProtocolMismatch) as caught:
        frames.unpack(b"\x02" + ours[1:])
    assert caught.value.refusal.detail.endswith("too old")


def test_a_receipt_of_a_later_version_with_more_fields_is_still_readable() -> None:
    fields = [*msgspec.structs.astuple(RECEIPT), "a field of tomorrow"]
    assert receipt_decoder.decode(to_msgpack(fields)) == RECEIPT


def test_routing_ids_encode_any_worker_name_and_rank() -> None:
    for worker in ("w", "host/model", "größe", "a/1/b"):
        assert frames.peer_of(frames.routing_id(worker, 3, "abcd")) == (worker, 3)
    with pytest.raises(ValueError, match="200 bytes"):
        frames.routing_id("x" * 201, 0, "abcd")
    with pytest.raises(FrameError, match="worker/rank/instance"):
        frames.peer_of(b"\x00\x80\x00\x41\xa7")  # what a ROUTER makes up for a stranger
