"""Does the relay take receipts from known workers only, each in its own name, and does whoever is
refused hear of it?
"""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from receipt_rig import Jobs, Peer, RelayProcess, free_port, once_each, receipt
from wait_kit import wait_until

from midstream.broker.receipts import frames
from midstream.broker.receipts.curve import ClientKeys, client_keys, new_keys
from midstream.broker.receipts.frames import FrameKind
from midstream.broker.receipts.outbox import Outbox
from midstream.schemas.base.records import to_msgpack
from midstream_ops.redis_server import RedisServer


class Keys:
    """A folder of keys, and what a worker of a name shows."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clients = folder / "clients"
        self.server = new_keys("relay", "relay", folder)[1].read_text().strip()
        self.clients.mkdir()

    def worker(self, name: str, known: bool = True) -> ClientKeys:
        private, public = new_keys("worker", name, self.folder)
        if not known:
            public.rename(self.folder / public.name)
        keys = client_keys(str(private), self.server)
        assert keys is not None
        return keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "curve")


@pytest.fixture(scope="module")
def served(redis_session: RedisServer, keys: Keys) -> Iterator[RelayProcess]:
    # 127.0.0.2 is not among what counts as loopback: with keys the relay may listen there.
    process = RelayProcess(
        redis_session.url,
        keys.folder / "relay.log",
        f"tcp://127.0.0.2:{free_port()}",
        curve_secret_file=str(keys.folder / "relay.key"),
        curve_clients_dir=str(keys.clients),
    )
    yield process
    process.kill()


@pytest.fixture
def relay(served: RelayProcess, redis_url: str) -> RelayProcess:
    return served


def test_receipts_of_a_known_worker_arrive_over_the_restart_of_the_relay(
    relay: RelayProcess, keys: Keys, jobs: Jobs, tmp_path: Path
) -> None:
    [job] = jobs.claim(1, 20, worker="known")
    with Outbox(tmp_path, "known", 0, relay.url, curve=keys.worker("known")) as outbox:
        for request in range(20):
            outbox.append(receipt(job, request, worker="known"))
            if request == 10:
                relay.kill()
                relay.start()
        assert outbox.flush(60)
    assert jobs.arrived(job) == once_each(20)


def test_a_worker_unknown_to_the_relay_is_refused_until_its_key_is_added(
    relay: RelayProcess, keys: Keys, jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = keys.worker("new", known=False)
    [job] = jobs.claim(1, 1, worker="new")
    with (
        caplog.at_level(logging.ERROR),
        Outbox(tmp_path, "new", 0, relay.url, curve=mine) as outbox,
    ):
        outbox.append(receipt(job, 0, worker="new"))
        wait_until(lambda: "rejected by the relay" in caplog.text)
        assert f"it does not know this worker's public CURVE key {mine.public}" in caplog.text
        assert f"public key {mine.public} is not among the" in relay.log.read_text()
        assert jobs.arrived(job) == {}
        (keys.folder / "new.pub").rename(keys.clients / "new.pub")
        assert outbox.flush(60)
    assert jobs.arrived(job) == once_each(1)


def test_receipts_for_another_workers_id_are_refused(
    relay: RelayProcess, keys: Keys, jobs: Jobs
) -> None:
    keys.worker("w")
    other = keys.worker("other")
    [job] = jobs.claim(1, 1)
    with Peer(relay.url, b"w/0/x", other) as impostor:
        for kind, payload in (
            (FrameKind.HELLO, b""),
            (FrameKind.RECEIPT, to_msgpack(receipt(job, 0))),
            (FrameKind.LOST, b""),
        ):
            answer = impostor.ask(kind, 1, payload)
            assert answer.kind is FrameKind.REFUSED
            refusal = frames.refusal(answer)
            assert refusal.reason == "identity"
            assert (
                f"the sender with CURVE key {other.public} identifies as worker 'w', which has "
                "a different key"
            ) in refusal.detail
    assert jobs.arrived(job) == {}
    assert "identifies as worker 'w'" in relay.log.read_text()
    with Peer(relay.url, b"other/0/x", other) as itself:
        assert itself.ask(FrameKind.HELLO, 1).kind is FrameKind.MARK
        (keys.clients / "other.pub").unlink()
        wait_until(lambda: itself.ask(FrameKind.HELLO, 2).kind is FrameKind.REFUSED)
        assert "has no key here" in frames.refusal(itself.ask(FrameKind.HELLO, 3)).detail


def test_a_sender_with_missing_or_wrong_curve_keys_logs_why(
    relay: RelayProcess, keys: Keys, jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = keys.worker("mistaken")._replace(server=keys.worker("another").public)
    [job] = jobs.claim(1, 2)
    with (
        caplog.at_level(logging.ERROR),
        Outbox(tmp_path / "plain", "w", 0, relay.url) as plain,
        Outbox(tmp_path / "wrong", "w", 0, relay.url, curve=mine) as wrong,
    ):
        plain.append(receipt(job, 0))
        wrong.append(receipt(job, 1))
        wait_until(lambda: "curve_server_key may not be its public key" in caplog.text)
        wait_until(lambda: "one side has CURVE keys and the other has none" in caplog.text)
        assert "This worker has no key: set MIDSTREAM_CURVE_DIR" in caplog.text
        assert plain.depth() == 1
        assert wrong.depth() == 1
    assert jobs.arrived(job) == {}


def test_a_sender_without_keys_logs_it_when_disconnected_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides see in the other's greeting that only one has keys; here the other one is always
    first.
    """
    with (
        caplog.at_level(logging.ERROR),
        socket.create_server(("127.0.0.1", 0)) as listener,
        Outbox(tmp_path, "w", 0, f"tcp://127.0.0.1:{listener.getsockname()[1]}"),
    ):
        visitor, _ = listener.accept()
        visitor.recv(10)  # the part of a greeting that both wait for
        visitor.sendall(b"\xff" + bytes(8) + b"\x7f")
        visitor.close()
        wait_until(lambda: "one side has CURVE keys and the other has none" in caplog.text)
    assert "curve_server_key" not in caplog.text
