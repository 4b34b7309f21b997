"""What a change of global steering waits for."""

import asyncio
from types import SimpleNamespace
from typing import Any

from midstream.api.operations.global_change import change
from midstream.broker.ledger.named.steering import Account
from midstream.schemas.base.records import now
from midstream.schemas.base.settings import Settings
from midstream.schemas.requests.steering import (
    GlobalSteering,
    Proposal,
    SteeringTemplate,
    WorkerSteering,
)


class Overtaken:
    """A ledger's steering in which another change follows the first at once, before anybody has
    looked.
    """

    def __init__(self) -> None:
        self.current = GlobalSteering()
        self.looks = 0

    async def standing(self, model: str, names: list[str]) -> tuple[dict[str, Any], GlobalSteering]:
        return {}, self.current

    async def propose(
        self, model: str, entries: list[SteeringTemplate], blobs: dict[str, bytes]
    ) -> Proposal:
        return Proposal(
            id="p1", steering=GlobalSteering(version=1, entries=entries), deadline=now() + 60
        )

    async def commit(self, model: str, proposal: str) -> GlobalSteering:
        self.current = GlobalSteering(version=2)
        return GlobalSteering(version=1)

    async def accounts(self, model: str) -> list[Account]:
        self.looks += 1
        version = self.current.version
        report = WorkerSteering(
            worker="w1",
            boot="b",
            model=model,
            state="serving",
            detail="",
            version=version,
            global_version=version,
            at=0.0,
            proposal="p1",
            prepared=True,
        )
        return [Account(SimpleNamespace(worker="w1"), report)]  # type: ignore[arg-type]


def test_a_change_that_another_replaced_is_not_waited_for() -> None:
    """The workers never report it: they have the later one."""
    steering = Overtaken()
    entries = [
        SteeringTemplate(
            layers=[0], hook="post_block", positions="all", family="add", tensors=["t"]
        )
    ]
    settings = Settings(steering_wait_s=3600.0)
    made = asyncio.run(
        asyncio.wait_for(change(steering, settings, SimpleNamespace(name="m"), entries, {}), 60)
    )  # type: ignore[arg-type]
    assert (made.version, steering.looks) == (1, 2)
