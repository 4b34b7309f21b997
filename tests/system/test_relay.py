"""Does every receipt reach the ledger, and count once, whichever process dies on the way?"""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import redis
import zmq
from mortal_redis import mortal
from ports import free_port
from receipt_rig import (
    LONG_S,
    Jobs,
    Peer,
    RelayProcess,
    SenderProcess,
    deliver,
    fill,
    once_each,
    receipt,
)
from wait_kit import wait_until, warn_if_late

from midstream import __version__
from midstream.broker.receipts import frames
from midstream.broker.receipts.frames import FrameKind
from midstream.broker.receipts.outbox import Outbox, OutboxError
from midstream.broker.receipts.relay import bind_address
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.jobs import State
from midstream.schemas.jobs.receipts import PROTOCOL, CapturedFile
from midstream.schemas.settings.settings import SettingsError


@contextmanager
def appended(
    outbox: Outbox, jobs: list[str], requests: Iterable[int], every_s: float
) -> Iterator[None]:
    """Meanwhile a thread appends one receipt per job and request, a request of all jobs at a time;
    the end waits for it.
    """

    def append() -> None:
        for request in requests:
            fill(outbox, jobs, [request])
            time.sleep(every_s)

    writer = threading.Thread(target=append)
    writer.start()
    yield
    writer.join()


# -- the plain way
# --------------------------------------------------------------------------------------------------


# field case 17
def test_a_single_receipt_is_delivered_immediately(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # asking again would not help here
    monkeypatch.setattr("midstream.broker.receipts.sender.PATIENCE_S", 60.0)
    (job,) = jobs.claim(1, 4)
    took = []
    with Outbox(tmp_path, "w", 0, relay.url) as outbox:
        deliver(outbox, [job], [0])
        for request in (1, 2, 3):
            if min(took, default=3.0) >= 3.0:  # again, where the machine stood still
                time.sleep(1.0)  # everything is asleep now
            start = time.monotonic()
            deliver(outbox, [job], [request])
            took.append(time.monotonic() - start)
    warn_if_late(min(took), 3, "a receipt wakes the sender")
    assert jobs.arrived(job) == once_each(4)


# field case 20
def test_a_receipt_does_not_wait_for_a_rank_that_never_stops_writing(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    (noise,) = jobs.claim(1, 4000, ranks=2)
    (job,) = jobs.claim(1, 1, ranks=2)
    stop = threading.Event()

    def never_idle(outbox: Outbox) -> None:
        number = 0
        while not stop.is_set():
            outbox.append(receipt(noise, number % 4000, rank=1, world=2))
            number += 1
            time.sleep(0.0005)

    with Outbox(tmp_path, "w", 0, relay.url) as quiet, Outbox(tmp_path, "w", 1, relay.url) as busy:
        writer = threading.Thread(target=never_idle, args=(busy,))
        writer.start()
        try:
            time.sleep(0.3)
            busy.append(receipt(job, 0, rank=1, world=2))
            quiet.append(receipt(job, 0, world=2))
            assert busy.flush(LONG_S)
            assert quiet.flush(LONG_S)
            assert jobs.view(job).receipts == 2
            assert writer.is_alive(), "it writes all the while"
        finally:
            stop.set()
            writer.join()


def test_receipts_are_settled_in_groups(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path, redis_url: str
) -> None:
    made = jobs.claim(5, 400)
    with redis.Redis.from_url(redis_url) as client, Outbox(tmp_path, "w", 0, relay.url) as outbox:
        before = client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        deliver(outbox, made, range(400))
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        assert outbox.store.transactions <= 100
    assert calls <= 200  # for 2000 receipts
    assert [jobs.arrived(job) for job in made] == [once_each(400)] * 5


# -- one side dies
# --------------------------------------------------------------------------------------------------


# field case 17, 38
def test_kills_of_the_relay_under_load_lose_and_double_nothing(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    made = jobs.claim(10, 100)
    with Outbox(tmp_path, "w", 0, relay.url) as outbox:
        with appended(outbox, made, range(100), every_s=0.02):
            for kill in (1, 2):
                wait_until(lambda kill=kill: jobs.mark(outbox.store.epoch) >= 200 * kill)
                relay.kill()
                relay.start()
        assert outbox.flush(LONG_S)
        assert jobs.mark(outbox.store.epoch) == 1000
    assert [jobs.arrived(job) for job in made] == [once_each(100)] * 10


# field case 37
def test_kills_of_the_sending_process_lose_and_double_nothing_that_was_durable(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    made = jobs.claim(5, 200)
    durable = 0
    for _ in range(2):
        # the kill may come late
        sender = SenderProcess(tmp_path / "outbox", relay.url, made, 200, durable, most=450)
        durable += sender.durable(200)
        durable += sender.kill()
    assert 0 < durable < 1000, "the kills must fall into the work"
    sender = SenderProcess(tmp_path / "outbox", relay.url, made, 200, durable)
    try:
        assert sender.process.wait(60) == 0
    finally:
        sender.kill()
    assert [jobs.arrived(job) for job in made] == [once_each(200)] * 5


# field case 37
def test_a_kill_of_redis_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with mortal(tmp_path / "redis") as server, ExitStack() as ends:
        jobs = Jobs(server.url)
        relay = RelayProcess(server.url, tmp_path / "relay.log", "tcp://127.0.0.1:0")
        ends.callback(relay.kill)
        made = jobs.claim(5, 100)
        with Outbox(tmp_path, "w", 0, relay.endpoint) as outbox:
            with appended(outbox, made, range(100), every_s=0.02):
                wait_until(lambda: jobs.mark(outbox.store.epoch) >= 100)
                server.kill()
                wait_until(lambda: "Redis is unreachable" in relay.log.read_text())
                server.start()
            assert outbox.flush(LONG_S)
        assert relay.stop() == 0, "the relay waited for Redis and did not die"
        assert [jobs.arrived(job) for job in made] == [once_each(100)] * 5


def test_a_full_redis_refuses_receipts_and_gets_them_once_there_is_room(
    relay: RelayProcess, jobs: Jobs, redis_url: str, tmp_path: Path
) -> None:
    (job,) = jobs.claim(1, 100)
    with redis.Redis.from_url(redis_url) as client, Outbox(tmp_path, "w", 0, relay.url) as outbox:
        wait_until(lambda: outbox._sender.connected)
        client.config_set("maxmemory", "1mb")
        try:
            fill(outbox, [job], range(100))
            assert not outbox.flush(1.0)
        finally:
            client.config_set("maxmemory", "0")
        assert outbox.flush(LONG_S)
    assert jobs.arrived(job) == once_each(100)


def test_sigterm_commits_what_had_arrived_and_exits_with_zero(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    (job,) = jobs.claim(1, 1000)
    with Outbox(tmp_path, "w", 0, relay.url) as outbox:
        fill(outbox, [job], range(1000))
        assert relay.stop() == 0
        held = outbox.depth()
        assert len(jobs.arrived(job)) >= 1000 - held
        relay.start()
        assert outbox.flush(LONG_S)
    assert jobs.arrived(job) == once_each(1000)


def test_sigterm_without_redis_exits_with_zero_and_in_time(tmp_path: Path) -> None:
    relay = RelayProcess(f"redis://127.0.0.1:{free_port()}/0", tmp_path / "relay.log")
    with Outbox(tmp_path, "w", 0, relay.url) as outbox:
        outbox.append(receipt("job_x", 0))
        wait_until(lambda: "Redis is unreachable" in relay.log.read_text())
        start = time.monotonic()
        assert relay.stop() == 0
        warn_if_late(time.monotonic() - start, 8, "it waits for Redis")
        assert outbox.depth() == 1


# -- disks that lie
# --------------------------------------------------------------------------------------------------


def unsent(
    relay: RelayProcess, jobs: Jobs, directory: Path, count: int
) -> tuple[list[str], Outbox]:
    """`count` jobs, each with one receipt in an outbox that is closed again before any was sent;
    the relay is gone.
    """
    relay.kill()
    made = jobs.claim(count, 1)
    with Outbox(directory, "w", 0, relay.url) as outbox:
        fill(outbox, made, [0])
    return made, outbox


def test_receipts_take_another_relay_when_theirs_is_away(
    relay: RelayProcess, jobs: Jobs, redis_url: str, tmp_path: Path
) -> None:
    (job,) = jobs.claim(1, 20)
    other = RelayProcess(redis_url, tmp_path / "relay.log")
    relay.kill()
    try:
        with Outbox(tmp_path, "w", 0, f"{relay.url}, {other.url}") as outbox:
            deliver(outbox, [job], range(10), "the first relay never answered")
            relay.start()
            with appended(outbox, [job], range(10, 20), 0.005):
                other.kill()
            assert outbox.flush(LONG_S), "the relay was killed in the middle of the stream"
    finally:
        other.kill()
    assert jobs.arrived(job) == once_each(20)


def test_a_damaged_outbox_fails_the_jobs_it_lost_and_goes_on(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    made, outbox = unsent(relay, jobs, tmp_path, 3)
    outbox.store.path.write_bytes(b"this is not a database" * 1000)
    relay.start()
    (fresh,) = jobs.claim(1, 1)
    with Outbox(tmp_path, "w", 0, relay.url) as again:
        deliver(again, [fresh], [0])
        assert again.store.epoch != outbox.store.epoch
    for job in made:
        view = jobs.view(job)
        assert view.state == State.FAILED
        assert "damaged" in view.error.detail
    assert jobs.arrived(fresh) == once_each(1)
    assert jobs.mark(outbox.store.epoch) == 3
    with Outbox(tmp_path, "w", 0, relay.url) as third:
        assert third.flush(LONG_S), "lost receipts are reported once"


def test_a_damaged_outbox_fails_only_jobs_whose_receipts_had_not_arrived(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    (arrived,) = jobs.claim(1, 2)
    with Outbox(tmp_path, "w", 0, relay.url) as outbox:
        deliver(outbox, [arrived], [0])
    outbox.store.path.unlink()
    with Outbox(tmp_path, "w", 0, relay.url) as again:
        deliver(again, [arrived], [1])
    assert jobs.view(arrived).state is State.RUNNING
    assert jobs.arrived(arrived) == once_each(2)


def test_single_damaged_and_missing_receipts_fail_their_jobs_and_no_others(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    made, outbox = unsent(relay, jobs, tmp_path, 7)
    with sqlite3.connect(outbox.store.path) as database:
        database.execute("UPDATE receipts SET payload = x'c0' WHERE seq = 2")
        database.execute("DELETE FROM receipts WHERE seq IN (4, 5)")
    database.close()
    relay.start()
    with Outbox(tmp_path, "w", 0, relay.url) as again:
        assert again.flush(LONG_S)
    failed = [seq for seq, job in enumerate(made, 1) if jobs.view(job).state is State.FAILED]
    assert failed == [2, 4, 5]
    assert [jobs.arrived(made[seq - 1]) for seq in (1, 3, 6, 7)] == [once_each(1)] * 4


def test_an_outbox_put_back_to_an_older_state_does_not_lose_its_new_receipts(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path
) -> None:
    (job,) = jobs.claim(1, 8)
    with Outbox(tmp_path / "live", "w", 0, relay.url) as outbox:
        deliver(outbox, [job], range(2))
    shutil.copytree(tmp_path / "live", tmp_path / "backup")
    with Outbox(tmp_path / "live", "w", 0, relay.url) as outbox:
        deliver(outbox, [job], range(2, 5))
    with Outbox(tmp_path / "backup", "w", 0, relay.url) as restored:
        # numbers 3 to 5 of the old epoch, which the relay has already
        deliver(restored, [job], range(5, 8))
        assert restored.store.epoch != outbox.store.epoch
    assert jobs.arrived(job) == once_each(8)


def test_receipts_lost_by_redis_are_sent_again(
    relay: RelayProcess, jobs: Jobs, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a relay may take its time to start
    monkeypatch.setattr("midstream.broker.receipts.outbox.KEEP_ACKED_S", 600.0)
    (job,) = jobs.claim(1, 10)
    with Outbox(tmp_path, "w", 0, relay.url) as outbox, redis.Redis.from_url(redis_url) as client:
        deliver(outbox, [job], range(10))
        relay.kill()
        client.set(f"ms:mark:w:0:{outbox.store.epoch}", 7)
        client.hdel(f"ms:ticket:{job}", "7/0", "8/0", "9/0")
        client.hset(f"ms:job:{job}", "receipts", 7)
        relay.start()
        wait_until(lambda: jobs.view(job).receipts == 10)
        assert jobs.mark(outbox.store.epoch) == 10


def test_acknowledged_receipts_are_deleted_without_further_traffic(
    relay: RelayProcess, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.broker.receipts.outbox.KEEP_ACKED_S", 0.3)
    (job,) = jobs.claim(1, 20)
    with (
        Outbox(tmp_path, "w", 0, relay.url) as outbox,
        sqlite3.connect(outbox.store.path) as database,
    ):
        began = time.monotonic()
        deliver(outbox, [job], range(20))
        wait_until(lambda: database.execute("SELECT count(*) FROM receipts").fetchone() == (0,))
        assert time.monotonic() - began >= 0.3
        assert database.execute("SELECT acked FROM outbox").fetchone() == (20,)
    database.close()


# -- the process
# --------------------------------------------------------------------------------------------------


def test_the_relay_keeps_a_heartbeat_in_redis(relay: RelayProcess, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.exists("ms:relay") == 1)
        assert relay.url.encode() in client.get("ms:relay")
        assert 0 < client.ttl("ms:relay") <= 15


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("tcp://0.0.0.0:5557", "MIDSTREAM_RELAY_ALLOW_REMOTE"),
        ("tcp://*:5557", "is not loopback"),
        ("tcp://127.0.0.2:5557", "midstream create curve"),
        ("127.0.0.1:5557", "not an address"),
        ("tcp://127.0.0.1:notaport", "relay_url"),
        ("tcp://127.0.0.1:5557,tcp://127.0.0.1:5558", "its own address"),
    ],
)
def test_an_address_that_no_relay_may_have_is_refused(url: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        bind_address(url, allow_remote=False)


def test_a_relay_that_cannot_start_says_why_in_one_line(
    relay: RelayProcess, redis_url: str
) -> None:
    command = [sys.executable, "-m", "midstream.broker.relay"]
    for url, said in (("", "MIDSTREAM_REDIS_URL"), (redis_url, "in use")):
        environment = {"MIDSTREAM_REDIS_URL": url, "MIDSTREAM_RELAY_URL": relay.url}
        ended = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=LONG_S
        )
        assert ended.returncode == 2
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


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
    assert refusal.reason == "protocol"
    assert named in refusal.detail
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
    assert len(errors) == 1
    assert jobs.arrived(job) == once_each(1)
