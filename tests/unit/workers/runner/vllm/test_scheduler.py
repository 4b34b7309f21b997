"""Our part of vLLM's scheduler: what it sends to the ranks with a step, how much of a prompt the
cache may serve, and when it gives up blocks that it keeps.
"""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.broker.processes import orphans
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import RankSpec, StoredSteering, steering_rows
from midstream.workers.engine.ranks.request_ends import Ends
from midstream.workers.runner.base.packed_spec import pack
from midstream.workers.runner.vllm.cell_steps import RepeatedPrompt


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
    monkeypatch.setattr(orphans, "die_with_parent", lambda: None)
    from midstream.workers.runner.vllm import scheduler

    class Stock:
        """Schedules what the test says."""

        running: list[Any] = []
        waiting: list[Any] = []
        _inflight_prefills: set[Any] = set()
        requests: dict[str, Any] = {}
        scheduled: dict[str, int] = {}  # request → tokens
        kv_cache_manager = SimpleNamespace(usage=0.0)
        max_num_active_reqs = 8

        def has_finished_requests(self) -> bool:
            return False

        def get_request_counts(self) -> tuple[int, int]:
            return len(self.running), len(self.waiting)

        def schedule(self) -> Any:
            return SimpleNamespace(
                total_num_scheduled_tokens=sum(self.scheduled.values()),
                finished_req_ids=set(),
                num_scheduled_tokens=self.scheduled,
            )

        def add_request(self, request: Any) -> None:
            pass

        def _reserve_prefill_lookahead(self, *_: Any) -> int:
            return 0

    made: Any = object.__new__(type("Made", (scheduler._Midstream, Stock), {}))
    made._turns = SimpleNamespace(
        join=lambda _: None,
        crowding=lambda *_: None,
        divide=lambda *_: False,
        end=lambda: None,
        left=None,
    )
    made.rooms = []  # whether each call for room said that nothing else helps
    parts = {
        "blocks": SimpleNamespace(make_room=lambda stuck: made.rooms.append(stuck)),
        "rows": SimpleNamespace(pending=False),
        "ring": SimpleNamespace(begin=lambda *_: None, look=frozenset, take=lambda *_: 0),
        "cells": SimpleNamespace(composing=lambda *_: nullcontext()),
        "shallow": scheduler.ShallowSteps(),
        "finished": {},
        "capturing": {},
        "bases": {},
        "filling": set(),
        "ends": [],
        "arrived": {},
        "long": set(),
        "laid_out": set(),
    }
    for name, part in parts.items():
        setattr(made, f"_midstream_{name}", part)
    return made


def test_an_idle_engine_has_a_step_that_carries_the_ends_once(scheduler: Any) -> None:
    from vllm.v1.engine.core import EngineCore

    from midstream.workers.runner.vllm.scheduler import _accept_ends, orders_of

    assert not scheduler.has_finished_requests()
    _accept_ends()
    core = object.__new__(EngineCore)
    core.scheduler = scheduler
    core.midstream_end([["j1.0.1", 7]])  # type: ignore[attr-defined] # as it is decoded
    core.midstream_end([["j2.0.1", -1], ["j3.0.1", 9]])  # type: ignore[attr-defined]
    assert scheduler.has_finished_requests()
    assert orders_of(scheduler.schedule()).ends == [("j1.0.1", 7), ("j2.0.1", -1), ("j3.0.1", 9)]
    assert not scheduler.has_finished_requests()
    assert orders_of(scheduler.schedule()).ends == []


def test_ranks_are_shown_steered_requests_that_wait_but_no_cells_of_sweeps(scheduler: Any) -> None:
    from midstream.workers.runner.vllm.scheduler import orders_of

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
            rows=steering_rows(steering) if tensors else [],
            digest="d" if tensors else "",
        )
        params = SimpleNamespace(extra_args=pack(spec))
        scheduler.add_request(
            SimpleNamespace(request_id=name, sampling_params=params, num_computed_tokens=0)
        )
        return to_msgpack(spec)

    later = came("later", "v")
    came("now", "v")
    came("plain")
    came("cell", row_name(RunRow("job_s.0.tag", "pre_attn", 0, 1, ())))
    scheduler.scheduled = {"now": 3}
    assert orders_of(scheduler.schedule()).waiting == [later]
    assert orders_of(scheduler.schedule()).waiting == [], "once"


@pytest.mark.parametrize(("entries", "running", "waits"), [(65, 1, 1), (64, 1, 0), (65, 0, 0)])
def test_a_request_with_many_entries_waits_for_one_step_of_those_that_run(
    scheduler: Any, entries: int, running: int, waits: int
) -> None:
    """Ranks lay its rows out in this step; nobody else is held up if nothing runs."""
    held = held_of(scheduler)
    scheduler.add_request(steered("long", "v", entries))
    scheduler.running = [SimpleNamespace(request_id="other", num_computed_tokens=9)] * running
    scheduler.schedule()
    scheduler.schedule()
    assert held == [{"long"} if waits else set(), set()]


def test_only_the_first_request_waits_for_rows_that_many_have(scheduler: Any) -> None:
    """Those of global steering, or of a module for each layer."""
    held = held_of(scheduler)
    scheduler.running = [SimpleNamespace(request_id="other", num_computed_tokens=9)]
    for name, tensor in (("first", "v"), ("second", "v"), ("third", "w")):
        scheduler.add_request(steered(name, tensor, 65))
        scheduler.schedule()
    assert held == [{"first"}, set(), {"third"}]


def held_of(scheduler: Any) -> list[set[str]]:
    """The requests that each step from now on does not take."""
    held: list[set[str]] = []
    scheduler._midstream_cells.composing = lambda *given: held.append({*given[2]}) or nullcontext()
    return held


def steered(name: str, tensor: str, entries: int) -> Any:
    """A request with so many entries."""
    entry = StoredSteering(
        layers=[0], hook="pre_attn", positions="all", family="add", tensors=[tensor]
    )
    spec = RankSpec(
        version="v",
        job="j",
        request=0,
        attempt=1,
        prompt_tokens=3,
        rows=steering_rows([entry] * entries),
        digest="d",
    )
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=pack(spec)))


# --- Room


@pytest.mark.parametrize(
    ("waiting", "running", "scheduled", "stuck"),
    [(1, 0, 0, True), (1, 2, 0, False), (1, 2, 2, False), (0, 0, 0, False), (0, 2, 0, False)],
)
def test_blocks_are_given_up_when_nothing_else_lets_requests_proceed(
    scheduler: Any, waiting: int, running: int, scheduled: int, stuck: bool
) -> None:
    """With several steps under way a step may be empty because all that runs is in another one."""
    scheduler.waiting = [object()] * waiting
    scheduler.running = [object()] * running
    scheduler.scheduled = {"r": scheduled}
    scheduler.schedule()
    assert scheduler.rooms == ([False, True] if stuck else [False])


@pytest.mark.parametrize(("others", "pauses"), [((), [0.005]), (("other",), [])])
def test_while_all_that_runs_waits_for_writers_the_engine_pauses(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], pauses: list[float]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    scheduler.running = [
        SimpleNamespace(request_id=name, num_computed_tokens=9) for name in ("captures", *others)
    ]
    scheduler._midstream_ring.look = lambda: {"captures"}
    scheduler.schedule()
    assert slept == pauses
    request = SimpleNamespace(request_id="captures", spec_token_ids=[-1, -1])
    scheduler._midstream_chunks = {}
    scheduler.need_mamba_block_aligned_split = False
    assert scheduler._reserve_prefill_lookahead(request, 9, 3) == 0
    assert request.spec_token_ids == [], "drafts of an earlier step are not found"


# --- How many cached tokens a request may reuse, with a limit from vLLM and without one

TOKENS = 64


def without_limit(request: Any) -> tuple[str, int, int]:
    """vLLM 0.32's search in a cache that has every token."""
    assert request.block_hashes == ["hash"]
    return "found", request.num_tokens - 1, 0


def with_limit(request: Any, max_cache_hit_length: int | None = None) -> tuple[str, int, int]:
    """vLLM 0.33's."""
    if max_cache_hit_length is None:
        return without_limit(request)
    return "found", max_cache_hit_length, 0


@pytest.mark.parametrize("original", [without_limit, with_limit])
@pytest.mark.parametrize(
    ("capture", "base", "preemptions", "given", "expected"),
    [
        (None, None, 0, None, ("found", TOKENS - 1, 0)),
        (None, None, 0, 48, ("found", 48, 0)),
        (40, None, 0, None, ("found", 40, 0)),
        (40, None, 0, 48, ("found", 40, 0)),
        (40, None, 0, 32, ("found", 32, 0)),
        (0, None, 0, None, ("found", 0, 0)),
        (999, None, 0, None, ("found", TOKENS - 1, 0)),
        (40, None, 1, None, ("found", 5, 0)),  # its first captured position
        (None, RepeatedPrompt("r", 24, 0), 0, None, ("kept", 24, 0)),
        (None, RepeatedPrompt("r", 24, 0), 0, 16, ("kept", 16, 0)),
        (None, RepeatedPrompt("gone", 24, 3), 0, None, ("found", 24, 0)),
        (None, RepeatedPrompt("gone", 24, 3), 0, 16, ("found", 16, 0)),
        (40, RepeatedPrompt("r", 24, 3), 0, None, ("found", 24, 0)),
    ],
)
def test_the_lowest_limit_counts(
    scheduler: Any,
    original: Any,
    capture: int | None,
    base: RepeatedPrompt | None,
    preemptions: int,
    given: int | None,
    expected: tuple[str, int, int],
) -> None:
    scheduler._midstream_capturing = (
        {} if capture is None else {"a": SimpleNamespace(lowest_captured=5)}
    )
    scheduler._midstream_bases = {} if base is None else {"a": base}
    scheduler._midstream_rows = SimpleNamespace(reach=lambda *_: capture)
    scheduler._midstream_blocks = SimpleNamespace(
        find=lambda run, _, tokens: ("kept", tokens) if run == "r" else None
    )
    request = SimpleNamespace(
        request_id="a",
        num_tokens=TOKENS,
        num_preemptions=preemptions,
        block_hashes=["hash"],
        midstream_spec=None,
    )
    limits = () if original is without_limit and given is None else (given,)
    assert scheduler._capped(original, 16)(request, *limits) == expected
    assert request.num_tokens == TOKENS
