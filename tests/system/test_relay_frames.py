"""Which frames does the relay accept, and how does it refuse invalid ones and those of other
protocols?
"""

import os
from pathlib import Path

import msgspec
import pytest
import zmq
from receipt_rig import Jobs, Peer, RelayProcess, once_each, receipt
from wait_kit import wait_until

from midstream import __version__
from midstream.broker.receipts import frames
from midstream.broker.receipts.frames import FrameKind
from midstream.broker.receipts.outbox import Outbox, OutboxError
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.receipts import PROTOCOL, CapturedFile

#: Time limit against hangs.
LONG_S = 60.0


# -- odd traffic
# --------------------------------------------------------------------------------------------------


def test_the_answer_to_hello_is_the_mark_and_the_nonce(relay: RelayProcess, jobs: Jobs) -> None:
    (job,) = jobs.claim(1, 3)
    with Peer(relay.url) as peer:
        hello = to_msgpack(frames.Hello(__version__, os.getpid(), 0))
        assert peer.ask(FrameKind.HELLO, 77, hello) == (
            FrameKind.MARK,
            peer.epoch,
            0,
            to_msgpack(77),
        )
        assert peer.ask(FrameKind.RECEIPT, 1, to_msgpack(receipt(job, 0))) == (
            FrameKind.ACK,
            peer.epoch,
            1,
            b"",
        )
        assert peer.ask(FrameKind.HELLO, 78, hello) == (
            FrameKind.MARK,
            peer.epoch,
            1,
            to_msgpack(78),
        )


def test_invalid_identities_and_frames_are_refused_without_effect(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    (job,) = jobs.claim(1, 1)
    good = frames.pack(FrameKind.RECEIPT, frames.new_epoch(), 1, to_msgpack(receipt(job, 0)))

    def names(path: str) -> bytes:
        naming = msgspec.structs.replace(receipt(job, 0), files=[CapturedFile(path, 1, 0, 1)])
        return frames.pack(FrameKind.RECEIPT, frames.new_epoch(), 1, to_msgpack(naming))

    cases = [
        (b"w/0/a", b"", "too few"),
        (b"w/0/b", bytes([PROTOCOL, 99]) + bytes(24), "unknown kind 99"),
        (
            b"w/0/c",
            frames.pack(FrameKind.RECEIPT, frames.new_epoch(), 1, b"\xc1"),
            "receipt cannot be read",
        ),
        (b"w/0/d", frames.pack(FrameKind.ACK, frames.new_epoch(), 1), "only the relay sends"),
        (b"someone else", good, "worker/rank/instance"),
        (b"v/0/e", good, "which is not its sender"),
        (b"w/0/f", names("../secret"), "not a capture file of job"),
        (b"w/0/g", names(f"/{job}/x"), "not a capture file of job"),
        (b"w/0/h", names(f"{job}/../x"), "not a capture file of job"),
        (b"w/0/i", names("tag/job_another/x.safetensors"), "not a capture file of job"),
    ]
    for identity, raw, reason in cases:
        with Peer(relay.url, identity) as peer:
            peer.socket.send(raw)
            answer = peer.answer()
            assert answer.kind is FrameKind.REFUSED
            assert reason in frames.refusal(answer).detail
    assert jobs.arrived(job) == {}
    with Peer(relay.url) as peer:
        assert peer.ask(FrameKind.RECEIPT, 1, to_msgpack(receipt(job, 0))).seq == 1


def test_an_oversized_frame_closes_only_its_connection(relay: RelayProcess, jobs: Jobs) -> None:
    (job,) = jobs.claim(1, 1)
    with Peer(relay.url) as peer, Peer(relay.url, b"w/1/test") as oversized:
        oversized.ask(FrameKind.HELLO, 1, to_msgpack(frames.Hello(__version__, 1, 0)))
        monitor = oversized.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        oversized.socket.send(bytes(frames.MAX_FRAME + 1))
        assert monitor.poll(LONG_S * 1000), "the relay has taken it"
        oversized.socket.disable_monitor()
        monitor.close()
        assert peer.ask(FrameKind.RECEIPT, 1, to_msgpack(receipt(job, 0))).seq == 1


# -- versions
# --------------------------------------------------------------------------------------------------


# field case 43
def test_a_sender_of_another_protocol_is_refused_with_both_versions(relay: RelayProcess) -> None:
    with Peer(relay.url) as peer:
        peer.socket.send(bytes([PROTOCOL + 1]) + b"\x01some other layout")
        refusal = frames.refusal(peer.answer())
    named = (
        f"the relay uses protocol {PROTOCOL} (midstream {__version__}), but the sender "
        f"uses {PROTOCOL + 1}"
    )
    assert (refusal.reason, named in refusal.detail) == ("protocol", True)
    wait_until(lambda: named in relay.log.read_text())


# field case 43
def test_a_rank_reports_both_protocol_versions_and_keeps_its_receipts(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (job,) = jobs.claim(1, 1)
    relay.kill()
    context = zmq.Context()
    other = context.socket(zmq.ROUTER)
    other.linger = 0
    other.bind(relay.url)
    errors: list[Exception] = []
    with Outbox(tmp_path, "w", 0, relay.url, errors.append) as outbox:
        outbox.append(receipt(job, 0))
        identity, _hello = other.recv_multipart()
        other.send_multipart([identity, bytes([PROTOCOL + 1]) + b"\x02" + bytes(24) + b"\xc1"])
        wait_until(lambda: bool(errors))
        assert isinstance(errors[0], OutboxError)
        for text in (str(errors[0]), caplog.text):
            assert f"relay protocol {PROTOCOL + 1}" in text
            assert f"this side uses {PROTOCOL} (midstream {__version__})" in text
        assert outbox.depth() == 1
        other.close()
        context.term()
        relay.start()  # the upgrade
        assert outbox.flush(LONG_S)
    assert (len(errors), jobs.arrived(job)) == (1, once_each(1))
