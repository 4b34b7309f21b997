"""The ranks of a further machine end with rank 0."""

import socket
import threading

import pytest

from midstream.workers.engine.headless import HeadlessRanks

LONG_S = 10.0


class Process:
    """What the ranks, and the process that starts them, are told."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self.ended = threading.Event()
        self.ranks = HeadlessRanks(self.left.set)

    def start(self) -> None:
        self.ranks.started(self.ended.set)

    def follow(self, first: tuple[str, int]) -> None:
        threading.Thread(target=self.ranks.end_with, args=(first,), daemon=True).start()


@pytest.fixture
def process() -> Process:
    return Process()


def test_ranks_run_while_rank_0_does(process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process.follow(server.getsockname())
        link, _ = server.accept()
        with link:
            process.start()
            assert not process.ended.wait(0.2)


def test_ranks_end_with_rank_0(process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process.follow(server.getsockname())
        link, _ = server.accept()
        process.start()
        link.close()
        assert process.ended.wait(LONG_S)
    assert not process.left.is_set()


def test_ranks_end_that_cannot_reach_rank_0(process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    process.start()
    process.ranks.end_with(place)
    assert process.ended.is_set()


def test_the_process_ends_if_rank_0_does_while_the_ranks_start(process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process.follow(server.getsockname())
        server.accept()[0].close()
        assert process.left.wait(LONG_S)


def test_ranks_that_start_wait_for_rank_0_to_listen(process: Process) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    process.follow(place)
    assert not process.left.wait(0.2)
    with socket.create_server(place) as server:
        server.accept()[0].close()
        assert process.left.wait(LONG_S)
