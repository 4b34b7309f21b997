"""Where requests end reaches the engine core once for each turn of the loop, and the ranks with a
step, of which there is one.
"""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.schemas.base.records import to_msgpack
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import RankSpec, StoredSteering
from midstream.workers.engine.ranks.request_ends import Ends
from midstream.workers.runner.base import process
from midstream.workers.runner.base.packed_spec import pack


async def test_ends_of_one_turn_are_one_message_and_a_cancelled_sender_still_sends() -> None:
    sent: list[list[tuple[str, int]]] = []

    answered = asyncio.Event()

    async def send(ends: list[tuple[str, int]]) -> None:
        sent.append(ends)
        await answered.wait()

    ends = Ends(send)

    async def request(number: int) -> None:
        await ends.notify(f"j{number}", number)

    waiting = [asyncio.create_task(request(number)) for number in (7, 8, 9)]
    await asyncio.sleep(0)
    waiting[1].cancel()  # before anything was sent
    ends.notify("cancelled", -1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent == [[("j7", 7), ("j8", 8), ("j9", 9), ("cancelled", -1)]]
    # the answer has not come: this one does not wait for it
    later = asyncio.create_task(request(10))
    await asyncio.sleep(0.01)
    assert sent[1:] == [[("j10", 10)]]
    assert [task.done() for task in (*waiting, later)] == [False, True, False, False]
    answered.set()
    await asyncio.gather(*waiting, later, return_exceptions=True)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours over one that never has anything to do."""
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    from midstream.workers.runner.vllm import scheduler

    class Idle:
        waiting: list[Any] = []
        scheduled: dict[str, int] = {}
        kv_cache_manager = SimpleNamespace(usage=0.0)

        def has_finished_requests(self) -> bool:
            return False

        def get_request_counts(self) -> tuple[int, int]:
            return 0, 0

        def schedule(self) -> Any:
            return SimpleNamespace(
                total_num_scheduled_tokens=0,
                finished_req_ids=set(),
                num_scheduled_tokens=self.scheduled,
            )

        def add_request(self, request: Any) -> None:
            pass

    made = object.__new__(type("Made", (scheduler._Midstream, Idle), {}))
    made._midstream_blocks = SimpleNamespace(make_room=lambda stuck: None)
    made._midstream_rows = SimpleNamespace(pending=False)
    made._midstream_ring, made.running, made.max_num_active_reqs = (
        SimpleNamespace(begin=lambda *_: None),
        [],
        8,
    )
    made._midstream_cells = SimpleNamespace(composing=lambda *_: nullcontext())
    (
        made._midstream_finished,
        made._midstream_capturing,
        made._midstream_ends,
        made._midstream_arrived,
    ) = {}, {}, [], {}
    return made


def test_an_idle_engine_has_a_step_that_carries_the_ends_once(scheduler: Any) -> None:
    from vllm.v1.engine.core import EngineCore

    from midstream.workers.runner.vllm.scheduler import _accept_ends, ends

    assert not scheduler.has_finished_requests()
    _accept_ends()
    core = object.__new__(EngineCore)
    core.scheduler = scheduler
    core.midstream_end([["j1.0.1", 7]])  # type: ignore[attr-defined] # as it is decoded
    core.midstream_end([["j2.0.1", -1], ["j3.0.1", 9]])  # type: ignore[attr-defined]
    assert scheduler.has_finished_requests()
    assert ends(scheduler.schedule()) == [("j1.0.1", 7), ("j2.0.1", -1), ("j3.0.1", 9)]
    assert not scheduler.has_finished_requests()
    assert ends(scheduler.schedule()) == []


def test_ranks_are_shown_steered_requests_that_wait_but_no_cells_of_sweeps(scheduler: Any) -> None:
    from midstream.workers.runner.vllm.scheduler import waiting

    def came(name: str, *tensors: str) -> bytes:
        steering = [
            StoredSteering(
                layers=[0], hook="pre_attn", positions="all", family="add", tensors=list(tensors)
            )
        ]
        spec = RankSpec(
            version="v",
            job="j",
            request=0,
            attempt=1,
            prompt_tokens=3,
            steering=steering if tensors else [],
            digest="d" if tensors else "",
        )
        params = SimpleNamespace(extra_args=pack(spec))
        scheduler.add_request(SimpleNamespace(request_id=name, sampling_params=params))
        return to_msgpack(spec)

    later = came("later", "v")
    came("now", "v")
    came("plain")
    came("cell", row_name(RunRow("job_s.0.tag", "pre_attn", 0, 1, ())))
    scheduler.scheduled = {"now": 3}
    assert waiting(scheduler.schedule()) == [later]
    assert waiting(scheduler.schedule()) == [], "once"
