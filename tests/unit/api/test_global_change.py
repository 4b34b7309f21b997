"""What does a change of global steering wait for, and what prevents it?"""

from typing import Any

import pytest
from refusal_kit import refuses

from midstream.api.operations.global_change import change
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate

ENTRIES = [
    SteeringTemplate(layers=[0], hook="post_block", positions="all", family="add", tensors=["t"])
]


class Ledger:
    """A ledger's steering with live workers, which answer a check as given: the n-th look finds the
    n-th answers.
    """

    def __init__(self, *answers: dict[str, str | None]) -> None:
        self.held = GlobalSteering()
        self.coming = list(answers)
        self.done: list[str] = []

    async def current(self, model: str) -> GlobalSteering:
        return self.held

    async def open_check(self, *_: Any) -> str:
        self.done.append("open")
        return "c1"

    async def answers(self, model: str, check: str) -> dict[str, str | None]:
        return self.coming.pop(0) if len(self.coming) > 1 else self.coming[0]

    async def set_global(self, model: str, check: str, entries: Any) -> GlobalSteering:
        self.done.append("set")
        self.held = GlobalSteering(version=self.held.version + 1, entries=entries)
        return self.held

    async def close_check(self, model: str, check: str) -> None:
        self.done.append("close")
        raise MidstreamError("unavailable", "Redis is away")  # it expires

    async def change(self, entries: list[SteeringTemplate], seconds: float = 60) -> GlobalSteering:
        return await change(self, seconds, "m", entries, {})  # type: ignore[arg-type]


async def test_a_change_waits_for_every_live_worker() -> None:
    ledger = Ledger({"w1": None, "w2": None}, {"w1": "", "w2": None}, {"w1": "", "w2": ""})
    assert (await ledger.change(ENTRIES)).version == 1
    assert ledger.done == ["open", "set", "close"]
    assert len(ledger.coming) == 1
    assert (await ledger.change(ENTRIES)).version == 1, "the same again is no change"
    assert ledger.done == ["open", "set", "close"]


async def test_a_refusal_or_a_silent_worker_leaves_everything_as_it_was() -> None:
    for answers, kind, words in (
        ({"w1": None, "w2": "rank 1: no"}, "conflict", "worker w2 .*rank 1: no"),
        (
            {"w1": "", "w2": None},
            "unavailable",
            r"within 0.01 s \(missing: w2\); nothing was changed",
        ),
    ):
        ledger = Ledger(answers)
        with refuses(match=words, kind=kind):  # type: ignore[arg-type]
            await ledger.change(ENTRIES, 0.01)
        assert ledger.done == ["open", "close"]


@pytest.mark.parametrize("answer", [None, "rank 1: no"])
async def test_steering_is_taken_away_whatever_workers_say(answer: str | None) -> None:
    ledger = Ledger({"w1": answer})
    ledger.held = GlobalSteering(version=1, entries=ENTRIES)
    assert await ledger.change([], 0.01) == GlobalSteering(version=2)
