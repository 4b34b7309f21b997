"""How often is it asked whether the keys of held calls still count?"""

import asyncio
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import pytest
from refusal_kit import refuses
from wait_kit import holding

from midstream.api.web import auth
from midstream.api.web.key_watch import KeyWatch
from midstream.schemas.access.keys import EVERYBODY, Caller
from midstream.schemas.base.errors import MidstreamError


class Stored:
    """Keys (or sessions) that are there until `gone`, and away as often as `away` says; notes what
    it was asked.
    """

    def __init__(self) -> None:
        self.asked: list[set[str]] = []
        self.gone: set[str] = set()
        self.away = 0

    async def valid(self, key_ids: Iterable[str]) -> set[str]:
        self.asked.append(set(key_ids))
        if self.away:
            self.away -= 1
            raise MidstreamError("unavailable", "redis is away")
        return set(key_ids) - self.gone


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(auth, "KNOWN_S", 0.001)
    return Stored()


async def test_one_check_covers_all_held_calls_and_ends_revoked_ones(stored: Any) -> None:
    key_watch = KeyWatch(stored, Stored())
    with ExitStack() as held:
        first = [held.enter_context(key_watch.of(Caller(key="one"))) for _ in range(50)]
        second = held.enter_context(key_watch.of(Caller(key="two")))
        stored.gone = {"one"}
        stored.away = 2
        await asyncio.wait_for(asyncio.gather(*(end for stay in first for end in stay.ends)), 60)
        assert stored.asked == [{"one", "two"}] * 3, "twice in vain, because Redis was away"
        for stay in first:
            with refuses(kind="unauthorized"):
                stay.check()
        second.check()


async def test_calls_without_a_revocable_key_are_not_checked(stored: Any) -> None:
    before = asyncio.all_tasks()
    key_watch = KeyWatch(stored, Stored(), always="admin")
    with key_watch.of(EVERYBODY) as one, key_watch.of(Caller(key="admin")) as other:
        assert one.ends == other.ends == ()
        assert asyncio.all_tasks() == before


async def test_no_check_runs_without_held_calls(stored: Any) -> None:
    before = asyncio.all_tasks()
    key_watch = KeyWatch(stored, Stored())
    with key_watch.of(Caller(key="one")):
        (task,) = asyncio.all_tasks() - before
    await task
    assert stored.asked == []
    with key_watch.of(Caller(key="two")):
        await holding(lambda: stored.asked)
    assert stored.asked[0] == {"two"}


async def test_a_session_that_ended_elsewhere_ends_its_calls_and_no_others(stored: Any) -> None:
    sessions = Stored()

    key_watch = KeyWatch(stored, sessions, always="admin")  # type: ignore[arg-type]
    with ExitStack() as held:
        ended, other, plain = (
            held.enter_context(key_watch.of(Caller(key=key, session=session)))
            for key, session in (("admin", "s1"), ("one", "s2"), ("one", ""))
        )
        sessions.gone = {"s1"}
        await asyncio.wait_for(asyncio.gather(*ended.ends), 60)
        with refuses("logged out"):
            ended.check()
        other.check()
        plain.check()
        assert stored.asked[0] == {"one"}, "the key of the settings cannot be revoked"


async def test_a_logout_ends_the_calls_of_its_session_immediately(stored: Any) -> None:
    key_watch = KeyWatch(stored, Stored())  # type: ignore[arg-type]
    with (
        key_watch.of(Caller(key="one", session="s1")) as ended,
        key_watch.of(Caller(key="one", session="s2")) as other,
    ):
        key_watch.end("s1")
        assert [stay.lost is not None and stay.lost.done() for stay in (ended, other)] == [
            True,
            False,
        ]
        key_watch.end("no session")
