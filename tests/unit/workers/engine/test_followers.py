"""Does a worker notice that a machine of its engine is gone, and the machine that the worker is out
of reach?
"""

import socket
from typing import Any, NamedTuple

import pytest
import redis

from midstream.schemas.base import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine import nodes

LEASE_S = 8.0
KEY = "ms:node-alive:w:1"


class Start(NamedTuple):
    """As much of a start as is asked here."""

    boot: str
    worker: str = "w"
    identity: str = ""


class Store:
    """As much of Redis as is asked here."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.away = False

    def mget(self, names: list[str]) -> list[bytes | None]:
        if self.away:
            raise redis.ConnectionError("away")
        return [self.values.get(name) for name in names]

    def set(self, name: str, value: str, px: int) -> None:
        assert px == LEASE_S * 1000
        self.values[name] = value.encode()


def settings(**changed: Any) -> Settings:
    given: dict[str, Any] = {
        "redis_url": "redis://127.0.0.1:1/0",
        "worker_id": "w",
        "lease_s": LEASE_S,
        "nodes": 2,
        **changed,
    }
    return Settings(**given)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(nodes, "_connect", lambda _: made)
    return made


@pytest.fixture
def followers() -> nodes.Followers:
    """The worker's view; the thread that looks is stopped, and the test looks."""
    found = nodes.Followers(settings(), "boot", lambda _: None)
    found.stop()
    return found


def test_a_follower_whose_sign_is_gone_is_lost(followers: nodes.Followers, store: Store) -> None:
    assert followers.lost(-1000.0) is None, "it never came"
    store.values[KEY] = b"boot:a"
    assert followers.lost(0.0) is None
    del store.values[KEY]
    assert followers.lost(0.5) is None, "not at once"
    assert followers.lost(2.0) == 1


def test_a_follower_that_was_started_again_is_lost(
    followers: nodes.Followers, store: Store
) -> None:
    """Its supervisor is quick: the sign is there, and the ranks are new ones."""
    store.values[KEY] = b"boot:a"
    assert followers.lost(0.0) is None
    store.values[KEY] = b"boot:b"
    assert followers.lost(0.5) == 1


def test_while_redis_is_away_nobody_is_lost(followers: nodes.Followers, store: Store) -> None:
    store.values[KEY] = b"boot:a"
    assert followers.lost(0.0) is None
    store.away = True
    assert followers.lost(100.0) is None
    store.away = False
    del store.values[KEY]  # it has expired meanwhile
    assert followers.lost(100.0 + LEASE_S) is None
    assert followers.lost(101.0 + LEASE_S) == 1


def test_a_follower_stays_while_it_reaches_the_worker(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        worker = nodes.Worker(settings(node_rank=1, node_master=place))
        assert worker.renew("boot")
        assert store.values[KEY].startswith(b"boot:")
    now[0] += LEASE_S / 2
    assert worker.renew("boot"), "an interruption"
    now[0] += LEASE_S
    assert not worker.renew("boot")


def test_a_follower_may_wait_for_its_worker() -> None:
    worker = nodes.Worker(settings(node_rank=1, node_master="127.0.0.1:1"))
    assert worker.renew("boot"), "its ranks have not met yet"


def test_a_follower_waits_for_a_redis_that_loads_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            redis.exceptions.BusyLoadingError("LOADING"),
            redis.ConnectionError("refused"),
            Start("boot"),
        ]
    )

    def start(_: nodes.Worker) -> Start:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nodes, "POLL_S", 0.0)
    monkeypatch.setattr(nodes.Worker, "start", start)
    worker = nodes.Worker(settings())
    assert worker.await_start(after="") == Start("boot")
    answers = iter([redis.ResponseError("NOPERM this user has no permissions")])
    with pytest.raises(redis.ResponseError, match="NOPERM"):
        worker.await_start(after="")


def test_a_machine_with_another_checkpoint_does_not_join() -> None:
    plane = Start("boot")._replace(identity="a" * 64)
    nodes.check_identity(plane, "a" * 64)  # type: ignore[arg-type]
    with pytest.raises(
        MidstreamError,
        match=(
            "the model on this machine has the identity bbbbbbbbbbbb, but the model of "
            "worker 'w' has aaaaaaaaaaaa"
        ),
    ):
        nodes.check_identity(plane, "b" * 64)  # type: ignore[arg-type]
