"""The ranks of a further machine end with rank 0."""

import socket
import threading

import pytest

from midstream.workers.engine.headless import end_with

LONG_S = 10.0


class Executor:
    """As much of vLLM's executor as is asked here."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def shutdown(self) -> None:
        self.ended.set()


@pytest.fixture
def executor() -> Executor:
    return Executor()


def test_ranks_run_while_rank_0_does(executor: Executor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=end_with, args=(server.getsockname(), executor), daemon=True
        ).start()
        link, _ = server.accept()
        with link:
            assert not executor.ended.wait(0.2)


def test_ranks_end_with_rank_0(executor: Executor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=end_with, args=(server.getsockname(), executor), daemon=True
        ).start()
        server.accept()[0].close()
        assert executor.ended.wait(LONG_S)


def test_ranks_end_that_cannot_reach_rank_0(executor: Executor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    end_with(place, executor)
    assert executor.ended.is_set()
