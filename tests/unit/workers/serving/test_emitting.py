"""Does every event of an attempt arrive, and once, when many are told at the same time and answers
are lost?
"""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from midstream.broker.ledger.core.reachable import Unreachable
from midstream.schemas.jobs.jobs import Event
from midstream.workers.serving.attempt import Attempt


class Uneven:
    """A ledger that takes what has a higher number than the last, as the script does; some calls
    take longer, some answers are lost.
    """

    def __init__(self) -> None:
        self.said = 0
        self.kept = list[int]()
        self._random = random.Random(1)

    async def emit(self, job_id: str, attempt: int, number: int, event: Event) -> bool:
        await asyncio.sleep(self._random.random() / 500)
        if number > self.said:
            self.said = number
            self.kept.append(event.data["index"])
        if self._random.random() < 0.1:
            raise Unreachable("the answer was lost")
        return True


async def test_concurrent_prompt_events_are_published_once_each() -> None:
    ledger: Any = Uneven()
    nothing: Any = None
    job: Any = SimpleNamespace(id="job_a")
    run = Attempt(job, 1, nothing, nothing, nothing, nothing)
    await asyncio.gather(
        *(
            run.emit(ledger, Event(event="output", data={"index": index}, attempt=1))
            for index in range(100)
        )
    )
    assert sorted(ledger.kept) == list(range(100))
