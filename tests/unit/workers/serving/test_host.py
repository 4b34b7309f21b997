"""A worker that starts can be stopped, and no job begins while a rank writes nothing."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.schemas.settings.settings import Settings
from midstream.workers.serving import host
from midstream.workers.serving.host import EngineHost


async def nothing(*_: Any) -> None:
    """In place of calls of Redis and looks at disks."""


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> EngineHost:
    made = EngineHost(Settings(redis_url="redis://127.0.0.1:1/0"), lambda _: None)
    monkeypatch.setattr(made._ledger, "ping", nothing)
    for before in ("_release_former_boots", "_await_disks"):
        monkeypatch.setattr(made, before, nothing)
    return made


def test_a_download_of_the_configuration_does_not_hold_the_loop(
    starting: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloading = threading.Event()
    go = threading.Event()

    def make(_: Settings) -> None:
        downloading.set()
        go.wait()

    def stopped() -> None:
        downloading.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "make_engine", make)
    with pytest.raises(KeyboardInterrupt):
        starting.start(stopped)
    ended = not starting._thread.is_alive()
    go.set()
    assert ended


def test_an_engine_that_holds_the_loop_does_not_hold_the_stop(
    starting: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "DEATH_GRACE_S", 0.05)
    loading = threading.Event()
    go = threading.Event()

    class Engine:
        async def start(self) -> None:
            loading.set()
            go.wait()

    def stopped() -> None:
        loading.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "make_engine", lambda _: Engine())
    with pytest.raises(KeyboardInterrupt):
        starting.start(stopped)
    assert starting._thread.is_alive(), "the loop is still held, and the process may end"
    go.set()


def test_no_job_begins_while_a_rank_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EngineHost(Settings(redis_url="redis://127.0.0.1:1/0"), lambda _: None)
    engine = SimpleNamespace(trouble="has not answered for 7 s")
    monkeypatch.setattr(made, "_parts", SimpleNamespace(engine=engine))
    assert made._trouble == "has not answered for 7 s"
