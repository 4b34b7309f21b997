"""Are the bytes between outbox and relay the agreed ones, and does anything else get a readable
answer?
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import __version__
from midstream.broker.receipts import frames
from midstream.broker.receipts.frames import FrameError, Kind, ProtocolMismatch
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


#: `RECEIPT` as the first version wrote it; receipts lie in outboxes over upgrades.
WRITTEN_BY_THE_FIRST_VERSION = bytes.fromhex(
    "dc0012"  # array of 18
    "a5302e312e30" "a177" "a162" "a56a6f625f31" "02" "01" "00" "01" "00" "00" "07" "03"
    "b030303030303030306465616462656566" "a26f6b" "a0" "05"
    "91" "96" "b1742f6a2f702e7361666574656e736f7273" "0a" "63" "04" "920102" "02"
    "a0"
)  # fmt: skip


def test_a_receipt_frame_has_exactly_these_bytes() -> None:
    assert frames.pack(Kind.RECEIPT, EPOCH, 258, b"\xc0\xff").hex() == (
        "01"  # version
        "03"  # kind
        "00112233445566778899aabbccddeeff"  # epoch
        "0000000000000102"  # seq, big endian
        "c0ff"  # payload
    )


def test_a_receipt_that_the_first_version_wrote_is_still_readable() -> None:
    assert receipt_decoder.decode(WRITTEN_BY_THE_FIRST_VERSION) == RECEIPT


def test_the_other_frames_have_exactly_these_bytes() -> None:
    assert frames.pack(
        Kind.HELLO, EPOCH, 1, to_msgpack(frames.Hello("0.1.0", 7, 3))
    ).hex() == "0101" + EPOCH + "0" * 15 + "1" + ("93a5302e312e300703")
    assert (
        frames.pack(Kind.MARK, EPOCH, 9, to_msgpack(5)).hex()
        == "0102" + EPOCH + "0" * 15 + "9" + "05"
    )
    assert frames.pack(Kind.ACK, EPOCH, 2**64 - 1).hex() == "0104" + EPOCH + "f" * 16
    assert frames.refuse(b"\x07\x01", "protocol", "x")[:2] == bytes([PROTOCOL, 6])


@given(
    kind=st.sampled_from(Kind),
    epoch=st.uuids(),
    seq=st.integers(0, frames.MAX_SEQ),
    payload=st.binary(max_size=200),
)
def test_frames_round_trip(kind: Kind, epoch: object, seq: int, payload: bytes) -> None:
    hexed = epoch.hex  # type: ignore[attr-defined]
    assert frames.unpack(frames.pack(kind, hexed, seq, payload)) == (kind, hexed, seq, payload)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_frame_error(raw: bytes) -> None:
    try:
        assert isinstance(frames.unpack(raw).kind, Kind)
    except FrameError:
        assert frames.unpack(frames.refuse(raw, "malformed", "why")).kind is Kind.REFUSED


# field case 43
@pytest.mark.parametrize("theirs", [0, 2, 255])
def test_a_frame_of_another_version_names_both_versions(theirs: int) -> None:
    raw = bytes([theirs]) + frames.pack(Kind.RECEIPT, EPOCH, 1, b"anything")[1:]
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
    assert (told.protocol, told.peer_protocol, told.version) == (PROTOCOL, 9, __version__)
    assert (
        f"uses protocol {PROTOCOL} (midstream {__version__}), but the sender uses 9" in told.detail
    )


# field case 43
def test_a_refusal_of_a_later_version_is_still_readable() -> None:
    ours = frames.refuse(b"\x01\x03", "protocol", "too old")
    with pytest.raises(ProtocolMismatch) as caught:
        frames.unpack(b"\x02" + ours[1:])
    assert caught.value.refusal is not None
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
