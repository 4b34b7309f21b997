"""Checks of formats: what is known waits for nobody, tenants have turns, and jobs that wait do not
take all of a worker.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from wait_kit import settled

from midstream.schemas.base.errors import MidstreamError
from midstream.workers.engine.prompts import format_check
from midstream.workers.engine.prompts.format_check import FormatChecker, FormatsBusy


class Checker(FormatChecker):
    """Without its process: a check ends when the test lets it, and refuses what begins with
    `bad`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("model", 8, 1.0, **options)
        self.asked: list[str] = []
        self.let = asyncio.Semaphore(0)

    async def _ask(self, raw: bytes) -> str:
        regex = raw.decode().split('"')[3]
        self.asked.append(regex)
        await self.let.acquire()
        return "is refused" if regex.startswith("bad") else ""

    def of(self, regex: str, tenant: str = "a", job: str = "") -> "asyncio.Task[None]":
        params = SimpleNamespace(structured_outputs=SimpleNamespace(regex=regex))
        return asyncio.create_task(self.check(params, tenant, job or regex))


async def test_formats_that_are_known_do_not_wait_for_one_that_is_being_checked() -> None:
    checker = Checker()
    checker.let = asyncio.Semaphore(2)
    await checker.of("good")
    with pytest.raises(MidstreamError, match="is refused"):
        await checker.of("bad")
    slow = checker.of("slow")
    await settled()
    await checker.of("good", "b")
    with pytest.raises(MidstreamError, match="is refused"):
        await checker.of("bad", "b")
    assert checker.asked == ["good", "bad", "slow"], "a refusal is remembered too"
    assert not slow.done()
    checker.let.release()
    await slow


async def test_requests_of_one_format_are_one_check() -> None:
    checker = Checker()
    tasks = [checker.of("same", job="job") for _ in range(200)]
    await settled()
    checker.let.release()
    await asyncio.gather(*tasks)
    assert checker.asked == ["same"]


async def test_tenants_have_turns() -> None:
    checker = Checker()
    tasks = [checker.of(f"a{number}") for number in range(6)]
    await settled()
    tasks += [checker.of("b0", "b"), checker.of("c0", "c")]
    await settled()
    for _ in tasks:
        checker.let.release()
    await asyncio.gather(*tasks)
    assert checker.asked == ["a0", "b0", "c0", "a1", "a2", "a3", "a4", "a5"]


async def test_jobs_that_wait_beyond_their_share_hold_no_place() -> None:
    """A tenant's own share first; then all tenants'."""
    checker = Checker(jobs=4)
    tasks = [checker.of("a0"), checker.of("a1")]
    await settled()
    with pytest.raises(FormatsBusy, match="2 jobs of the tenant wait"):
        await checker.of("a2")
    again = checker.of("other", job="a0")  # of a job that waits already
    tasks += [again, checker.of("b0", "b"), checker.of("c0", "c")]
    await settled()
    with pytest.raises(FormatsBusy, match=r"0 jobs of the tenant wait .* and 4 in all"):
        await checker.of("d0", "d")
    for _ in tasks:
        checker.let.release()
    await asyncio.gather(*tasks)
    checker.let.release()
    await checker.of("a2")


async def test_a_request_that_is_cancelled_leaves_the_queue() -> None:
    checker = Checker()
    running, waiting, last = (checker.of(name) for name in ("one", "two", "three"))
    await settled()
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    await settled()
    checker.let.release()
    await last
    assert checker.asked == ["one", "three"]


async def test_so_many_formats_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_check, "KEPT", 2)
    checker = Checker()
    checker.let = asyncio.Semaphore(9)
    for regex in ("x", "y", "x", "z", "x", "y"):
        await checker.of(regex)
    assert checker.asked == ["x", "y", "z", "y"]
